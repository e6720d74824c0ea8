"""Says whether a model runs on the Triton kernels, and why not. This needs no Triton."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from keepwarm.runtime.native.blocks import Blocks
from keepwarm.runtime.native.description import Description, Linear, NotCovered
from keepwarm.runtime.native.families import described
from keepwarm.runtime.native.windows import differing

_INTERPRETED = ("1", "true", "on", "yes", "y")  # values of TRITON_INTERPRET


def missing(device: torch.device) -> str:
    """Return why the kernels do not run on a device; empty if they do."""
    if find_spec("triton") is None:
        return "Triton is not installed (pip install 'keepwarm[triton]')"
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in _INTERPRETED
    if device.type == "cpu" and not interpreted:
        return "Triton's kernels run on a GPU, and the model is on the processor, which has compiled kernels"
    if device.type == "cuda" and interpreted:
        return "TRITON_INTERPRET is set: Triton's interpreter has no GPU"
    if device.type not in ("cpu", "cuda"):
        return f"Triton has no kernels for {device.type}"
    return ""


def device_of_weights(model: Any) -> torch.device:
    """Return where a model's embeddings are."""
    found: torch.device = model.get_input_embeddings().weight.device
    return found


def uncovered(model: Any, windows: Sequence[int | None]) -> str:
    """Return why a model does not run on the kernels; empty if it does. `windows` are those of its cache's layers."""
    try:
        found = described(model, anywhere=True)
        _check(found)
    except NotCovered as reason:
        return str(reason)
    return differing(found, windows)


def _check(found: Description) -> None:
    """Raise NotCovered for what only the kernels for the processor compute."""
    if found.recurrent:
        raise NotCovered("recurrent states")
    if isinstance(found.head, Blocks):
        raise NotCovered("weights in blocks")
    if found.factors is not None:
        raise NotCovered("factors of queries by position")
    if found.per_layer or any(attention.shape or attention.shares is not None for attention in found.attentions):
        raise NotCovered("layers of different shapes, or that share keys and values")
    if any(attention.gate is not None for attention in found.attentions):
        raise NotCovered("gates of attention")
    if any(experts.sigmoid for experts in found.experts):
        raise NotCovered("routers by sigmoid")
    if any(experts.norms or experts.scale is not None for experts in found.experts):
        raise NotCovered("experts with norms of their own")
    if any(mlp.activation == "clamped" for mlp in found.mlps):
        raise NotCovered("activation 'clamped' outside of experts")
    weights = [each.weight for layer in found.layers for each in layer.products]
    if any(isinstance(each, Blocks) or (each.dim() == 2 and each.stride() != (each.shape[1], 1)) for each in weights):
        raise NotCovered("weights that do not lie row after row")
    if any(_strides(experts.all.gate) != _strides(experts.all.up) for experts in found.experts):
        raise NotCovered("experts whose gates lie otherwise than the values beside them")


def _strides(linear: Linear | None) -> list[tuple[int, ...] | None]:
    """Return how a weight and a bias of experts lie in memory."""
    parts = [] if linear is None else [linear.weight, linear.bias]
    return [each.stride() if isinstance(each, torch.Tensor) else None for each in parts]
