"""A model with an adapter as transformers runs it, to compare the kernels with. The loaded model stays as it is."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from keepwarm.runtime.native.low_rank import Low


def beside(model: PreTrainedModel, changes: Mapping[str, Low]) -> PreTrainedModel:
    """Return a model of other module objects with the same tensors, whose modules add what an adapter adds, in float32
    as PEFT does. It has a lock of its own, so requests go on meanwhile."""
    made: PreTrainedModel = _copied(model, {})
    made.__dict__.pop("_keepwarm_lock", None)
    modules = dict(made.named_modules())
    for name, low in changes.items():
        modules[name].register_forward_hook(_adding(low))
    return made


def _copied(module: Any, known: dict[int, Any]) -> Any:
    """Return a module with the same parameters and buffers, over copies of its parts. One that is in two places is so
    in the copy, too."""
    if id(module) not in known:
        made = known[id(module)] = copy.copy(module)
        made._forward_hooks = OrderedDict(module._forward_hooks)
        made._buffers = dict(module._buffers)  # some rotary embeddings register theirs again as they run
        made._modules = {
            name: None if child is None else _copied(child, known) for name, child in module._modules.items()
        }
    return known[id(module)]


def _adding(low: Low) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]:
    def add(module: nn.Module, given: tuple[torch.Tensor, ...], made: torch.Tensor) -> torch.Tensor:
        more = given[0].float() @ low.a.T @ low.b.T * low.scale
        return (made.float() + more).to(made.dtype)

    return add
