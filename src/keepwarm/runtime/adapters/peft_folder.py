"""Reads a LoRA adapter as PEFT saves it: a folder with `adapter_config.json` and `adapter_model.safetensors`.

What the kernels do not compute is refused: an adapter that is applied in part would answer wrongly.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from keepwarm.errors import ConfigError, ModelNotFound
from keepwarm.runtime.native.low_rank import Low

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])\.weight")
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"}
# Settings of training, of how the weights were first made, and of where they came from. Which modules are adapted is read
# from the weights themselves.
_HARMLESS = {
    "arrow_config",
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
_CHANGING = ("pissa", "olora", "loftq", "corda", "lora_ga")  # ways to begin that change the model's own weights
_WITHOUT = (None, False, "", "none", [], {})


def look(folder: Path) -> None:
    """Refuse a folder that `read` would refuse for its settings, without reading weights. Raises what `read` does."""
    _check(_settings(folder), folder)
    _weights(folder)


def read(folder: Path) -> dict[str, Low]:
    """Return what the adapter adds, by the module's name in the model. Raises ModelNotFound for a folder that has no
    adapter, ConfigError for an adapter that is not LoRA alone."""
    settings = _settings(folder)
    _check(settings, folder)
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in _tensors(folder).items():
        found = _KEY.fullmatch(key.removeprefix(_PREFIX))
        if found is None:
            raise ConfigError(
                f"{folder / WEIGHTS} holds {key!r}, where lora_A.weight and lora_B.weight of linear modules are "
                "expected: embeddings, biases and whole modules cannot be adapted here. Train without modules_to_save, "
                "or merge the adapter"
            )
        halves.setdefault(found["module"], {})[found["which"]] = tensor
    if not halves:
        raise ConfigError(f"{folder / WEIGHTS} holds no weights of an adapter")
    return {module: _low(folder, settings, module, each) for module, each in sorted(halves.items())}


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        settings = json.loads(path.read_text())
    except OSError as error:
        raise ModelNotFound(
            f"no adapter in {str(folder)!r}: {CONFIG} cannot be read ({error.strerror or error}). Expected a folder that "
            "PEFT's save_pretrained made"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold an object, got {type(settings).__name__}")
    return settings


def _weights(folder: Path) -> Path:
    path = folder / WEIGHTS
    if not path.exists():
        pickled = (folder / "adapter_model.bin").exists()
        cure = "; adapter_model.bin is a pickle, which may run code: save it with safe_serialization=True"
        raise ModelNotFound(f"no {WEIGHTS} in {str(folder)!r}{cure if pickled else ''}")
    return path


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    path = _weights(folder)
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _check(settings: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError for a setting by which the adapter computes something else than B A x, scaled."""
    where, kind = folder / CONFIG, settings.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{where}: expected peft_type 'LORA', got {kind!r}. Merge the adapter into a model's folder")
    for name, value in settings.items():
        if name not in _READ and name not in _HARMLESS and value not in _WITHOUT:
            raise ConfigError(
                f"{where}: {name} is {_short(value)}, and the kernels add B A x alone. Train without it, or merge the "
                "adapter into a model's folder"
            )
    begun = settings.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGING):
        raise ConfigError(
            f"{where}: init_lora_weights is {begun!r}, which changes the model's own weights. Convert the adapter to a "
            "plain one (path_initial_model_for_weight_conversion of PEFT's save_pretrained)"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _low(folder: Path, settings: Mapping[str, Any], module: str, halves: Mapping[str, torch.Tensor]) -> Low:
    where = f"{folder}: module {module}"
    if set(halves) != {"A", "B"}:
        raise ConfigError(f"{where} has lora_{''.join(halves)} alone, where lora_A and lora_B are expected")
    a, b = halves["A"], halves["B"]
    if (
        a.dim() != 2
        or b.dim() != 2
        or a.shape[0] != b.shape[1]
        or not (a.is_floating_point() and b.is_floating_point())
    ):
        raise ConfigError(
            f"{where} has lora_A of shape {list(a.shape)} and lora_B of {list(b.shape)}, where [rank, in] and "
            "[out, rank] are expected"
        )
    rank = _by_pattern(settings, "rank_pattern", module, settings.get("r", 8))
    alpha = _by_pattern(settings, "alpha_pattern", module, settings.get("lora_alpha", 8))
    if rank != a.shape[0]:
        raise ConfigError(f"{where} has rank {a.shape[0]}, and {CONFIG} says {rank}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ConfigError(f"{folder / CONFIG}: expected a number as lora_alpha, got {alpha!r}")
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
