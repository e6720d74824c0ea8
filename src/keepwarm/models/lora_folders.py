"""Folders in which PEFT's `save_pretrained` left a LoRA adapter: what is refused before any weight is read.

What the kernels do not compute is refused: an adapter that is applied in part would answer wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepwarm.errors import ConfigError, ModelNotFound

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"}
# Settings of training, of how the weights were first made, and of where they came from. The weights themselves say
# which modules are adapted.
_HARMLESS = {
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
_BEGUN = ("true", "false", "gaussian", "eva", "orthogonal")  # ways to begin that leave the model's own weights alone
_WITHOUT: tuple[Any, ...] = (None, False, "", "none", [], {})


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the settings of a folder's adapter, whose weights are there, too. Raises ModelNotFound for a folder that
    has no adapter, ConfigError for an adapter that is not LoRA alone."""
    settings = _settings(folder)
    _check(settings, folder)
    _find(folder)
    return settings


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        settings = json.loads(path.read_text())
    except OSError as error:
        raise ModelNotFound(
            f"no adapter in {str(folder)!r}: {CONFIG} cannot be read ({error.strerror or error}). Expected a folder "
            "that PEFT's save_pretrained made"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold an object, got {type(settings).__name__}")
    return settings


def _find(folder: Path) -> None:
    path = folder / WEIGHTS
    if not path.exists():
        pickled = (folder / "adapter_model.bin").exists()
        cure = "; adapter_model.bin is a pickle, which may run code: save it with safe_serialization=True"
        raise ModelNotFound(f"no {WEIGHTS} in {str(folder)!r}{cure if pickled else ''}")


def _check(settings: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError for a setting by which the adapter computes something else than B A x, scaled."""
    where, kind = folder / CONFIG, settings.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{where}: expected peft_type 'LORA', got {kind!r}. Merge the adapter into a model's folder")
    if settings.get("target_parameters"):  # PEFT also writes it for `target_modules` of experts
        raise ConfigError(
            f"{where}: target_parameters is {_short(settings['target_parameters'])}, so it adapts experts, or other "
            "weights that are no module's own, and the kernels add nothing to these. Train without them, or merge the "
            "adapter into a model's folder"
        )
    for name, value in settings.items():
        if name not in _READ and name not in _HARMLESS and value not in _WITHOUT:
            raise ConfigError(
                f"{where}: {name} is {_short(value)}, and the kernels add B A x alone. Train without it, or merge the "
                "adapter into a model's folder"
            )
    begun = settings.get("init_lora_weights")
    if begun is not None and str(begun).lower() not in _BEGUN:
        raise ConfigError(
            f"{where}: init_lora_weights is {begun!r}, which may change the model's own weights. Convert the adapter "
            "to a plain one (path_initial_model_for_weight_conversion of PEFT's save_pretrained)"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
