"""Loads a model in float32 from a folder in bfloat16, and leaves its weights as the files have them.

A processor that does not multiply bfloat16 computes in float32 by default. transformers would widen every weight as it
loads, which takes twice the checkpoint's memory; the kernels, which pack what they read, need none of it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from keepwarm.errors import UnsupportedModel
from keepwarm.runtime.checkpoint import generation_on, language_model, loaded_class
from keepwarm.runtime.filling import empty, keep_maps
from keepwarm.runtime.native.build import kernels
from keepwarm.runtime.native.description import NotCovered
from keepwarm.runtime.native.families import COVERED, described
from keepwarm.runtime.native.narrow import NarrowEmbedding, NarrowLinear, TiedHead
from keepwarm.runtime.tensor_files import COMPUTED, Tensors, has_own_head, named_as_in_model

log = logging.getLogger(__name__)


_REFUSED = ("auto_map", "quantization_config", "transformers_weights")  # code, other weights, and their place
_UNUSUAL = (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError)


class _Other(Exception):
    """Why transformers loads a folder."""


def kept_narrow(where: Path | str, device: torch.device, dtype: torch.dtype) -> tuple[PreTrainedModel, Path] | None:
    """Return the model of a folder, or of a hub's id, in float32 on the processor over its weights in bfloat16, and the
    folder. Return None if other dtypes, files or devices are asked for or found, or if the kernels do not run such a
    model. Then transformers loads it, and says what is wrong with it."""
    if device.type != "cpu" or dtype is not torch.float32:
        return None
    try:
        folder = where if isinstance(where, Path) else _fetched(where)
        model = _model(folder)
    except (_Other, NotCovered, UnsupportedModel, *_UNUSUAL) as reason:
        log.info("%s is loaded by transformers, with its weights widened: %s", where, reason)
        return None
    model.config._name_or_path = str(where)
    return model, folder


def _fetched(name: str) -> Path:
    """Fetch the files of a hub's model that are read here. transformers would fetch them, too."""
    quiet = {"_raise_exceptions_for_missing_entries": False}
    if cached_file(name, "adapter_config.json", **quiet) is not None:
        raise _Other("it is an adapter")
    for beside in ("config.json", "generation_config.json"):
        cached_file(name, beside, **quiet)
    found = cached_file(name, "model.safetensors", **quiet)
    if found is None:
        found = cached_file(name, "model.safetensors.index.json", **quiet)
        if found is None:
            raise _Other("it has no safetensors files of the usual names")
        get_checkpoint_shard_files(name, found)
    return Path(found).parent


def _model(folder: Path) -> PreTrainedModel:
    from transformers.conversion_mapping import get_model_conversion_mapping  # other versions may have it elsewhere

    told = json.loads((folder / "config.json").read_bytes())
    if refused := [name for name in _REFUSED if told.get(name) is not None]:
        raise _Other(f"its config.json has {refused[0]}")
    kind, is_part = loaded_class(folder)
    if kind not in COVERED:
        raise _Other(f"the kernels do not have {kind}")
    if kernels() is None:
        raise _Other("there are no kernels")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config = (language_model(config) if is_part else None) or config
    if getattr(config, "quantization_config", None) is not None:
        raise _Other("it is quantized")
    tensors = Tensors.of(folder)
    named = named_as_in_model(folder, tensors.found, is_part=is_part)
    tied = bool(config.tie_word_embeddings) and not has_own_head(named)
    config.tie_word_embeddings = tied
    model = empty(config, torch.float32)
    if any(hasattr(each, "operations") for each in get_model_conversion_mapping(model)):
        raise _Other("it has tensors that transformers joins, splits or turns")
    _fill(model, {name: tensor for name, (_, tensor) in named.items() if not (tied and name == "lm_head.weight")})
    if tied:
        table = model.get_input_embeddings()
        if not isinstance(table, NarrowEmbedding):
            raise _Other(f"its embeddings are a {type(table).__name__}")
        model.set_output_embeddings(TiedHead(table))
    if missing := [name for name, each in model.named_parameters() if each.device.type == "meta"]:
        raise _Other(f"it lacks {missing[0]}")
    if described(model).experts:
        raise _Other("it has experts")
    keep_maps(model, tensors.maps)
    model.generation_config = generation_on(folder)
    return model


def _fill(model: PreTrainedModel, found: Mapping[str, torch.Tensor]) -> None:
    """Put a folder's tensors into an empty model."""
    modules: dict[str, Any] = dict(model.named_modules())
    if lacking := model.state_dict().keys() - found.keys() - {name for name, _ in model.named_parameters()}:
        raise _Other(f"it lacks {min(lacking)}")  # a buffer, which has numbers already
    for name, tensor in found.items():
        if name.endswith(COMPUTED):
            continue
        where, _, own = name.rpartition(".")
        there = getattr(modules.get(where), own, None)
        if not isinstance(there, torch.Tensor) or there.shape != tensor.shape or not tensor.is_floating_point():
            raise _Other(f"{type(model).__name__} has no {name} of the shape {list(tensor.shape)} and {tensor.dtype}")
        owner = modules[where]
        is_linear = type(owner) is nn.Linear
        if own == "weight" and (is_linear or isinstance(owner, nn.Embedding)):
            if tensor.dtype is not torch.bfloat16:
                raise _Other(f"{name} is in {tensor.dtype}")
            bias = found[f"{where}.bias"].float() if is_linear and owner.bias is not None else None
            scale = getattr(owner, "embed_scale", None)
            model.set_submodule(where, NarrowLinear(tensor, bias) if is_linear else NarrowEmbedding(tensor, scale))
        elif own in owner._buffers:
            owner.register_buffer(own, tensor.to(there.dtype))
        elif not is_linear:  # a bias is put in with its weight
            setattr(owner, own, nn.Parameter(tensor.float(), requires_grad=False))
