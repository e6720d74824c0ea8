"""Reads the weights of a LoRA adapter as PEFT saves it: `models.lora_folders` has looked at its settings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from keepwarm.errors import ConfigError
from keepwarm.models.lora_folders import CONFIG, WEIGHTS, settings_of
from keepwarm.runtime.native.low_rank import Low

_PREFIX = "base_model.model."
_MOST = torch.finfo(torch.float32).max
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])\.weight")


def read(folder: Path) -> dict[str, Low]:
    """Return what the adapter adds, by the module's name in the model. Raises ModelNotFound for a folder that has no
    adapter, ConfigError for an adapter that is not LoRA alone."""
    settings = settings_of(folder)
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in _tensors(folder).items():
        found = _KEY.fullmatch(key.removeprefix(_PREFIX))
        if found is None:
            raise ConfigError(
                f"{folder / WEIGHTS} holds {key!r}, where lora_A.weight and lora_B.weight of linear modules are "
                "expected: embeddings, biases and whole modules cannot be adapted here. Train without modules_to_save, "
                "or merge the adapter"
            )
        half = halves.setdefault(found["module"], {})
        if found["which"] in half:  # with PEFT's prefix, and without
            raise ConfigError(f"{folder / WEIGHTS} holds lora_{found['which']} of {found['module']} twice")
        half[found["which"]] = tensor
    if not halves:
        raise ConfigError(f"{folder / WEIGHTS} holds no weights of an adapter")
    return {module: _low(folder, settings, module, each) for module, each in sorted(halves.items())}


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / WEIGHTS
    try:
        return load(path.read_bytes())  # read once: mapped bytes could change between the digest and the packing
    except (SafetensorError, OSError, KeyError, ValueError) as error:  # KeyError: of numbers that torch does not have
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _low(folder: Path, settings: Mapping[str, Any], module: str, halves: Mapping[str, torch.Tensor]) -> Low:
    where = f"{folder}: module {module}"
    if set(halves) != {"A", "B"}:
        raise ConfigError(f"{where} has lora_{''.join(halves)} alone, where lora_A and lora_B are expected")
    a, b = halves["A"], halves["B"]
    if (a.dim(), b.dim()) != (2, 2) or not 0 < a.shape[0] == b.shape[1]:
        raise ConfigError(
            f"{where} has lora_A of shape {list(a.shape)} and lora_B of {list(b.shape)}, where [rank, in] and "
            "[out, rank] are expected"
        )
    if not (a.dtype.is_floating_point and b.dtype.is_floating_point):
        raise ConfigError(f"{where} has lora_A of {a.dtype} and lora_B of {b.dtype}, where floats are expected")
    rank = _by_pattern(settings, "rank_pattern", module, settings.get("r", 8))
    alpha = _by_pattern(settings, "alpha_pattern", module, settings.get("lora_alpha", 8))
    if rank != a.shape[0]:
        raise ConfigError(f"{where} has rank {a.shape[0]}, and {CONFIG} says {rank!r}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= _MOST:
        raise ConfigError(f"{folder / CONFIG}: expected a number as lora_alpha, got {alpha!r:.60}")
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    low = Low(a.float(), b.float(), scale)
    if not (low.a.isfinite().all() and low.b.isfinite().all()):
        raise ConfigError(f"{where} has weights that are not finite")
    return low


def _by_pattern(settings: Mapping[str, Any], name: str, module: str, default: Any) -> Any:
    """Return the value of the first pattern that a module's name, or its end, matches: as PEFT chooses it."""
    patterns = settings.get(name) or {}
    if not isinstance(patterns, Mapping):
        raise ConfigError(f"{CONFIG}: expected an object as {name}, got {patterns!r}")
    return next((patterns[key] for key in _matching(patterns, module)), default)


def _matching(patterns: Iterable[str], module: str) -> Iterable[str]:
    for key in patterns:
        try:
            if re.match(rf"(.*\.)?({key})$", module):
                yield key
        except re.error as error:
            raise ConfigError(f"{CONFIG}: {key!r} is no pattern of module names: {error}") from None
