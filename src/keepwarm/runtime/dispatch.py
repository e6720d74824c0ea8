"""Models that accelerate dispatched: layers on several devices, or weights that lie in the host's memory or in files
until the module they belong to runs. Their parameters are on the device "meta" then, in between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from keepwarm.errors import UnsupportedModel

_META = torch.device("meta")


def device_of(module: torch.nn.Module, weight: torch.Tensor) -> torch.device:
    """The device that computes with a module's own weight. Raises UnsupportedModel when that is told nowhere."""
    if weight.device != _META:
        return weight.device
    for hook in _hooks(module):
        if getattr(hook, "execution_device", None) is not None:
            found: int | str | torch.device = hook.execution_device
            return torch.device("cuda", found) if isinstance(found, int) else torch.device(found)
    raise UnsupportedModel(f"weights of its {type(module).__name__} are on the device 'meta', that is: not loaded")


def devices(model: torch.nn.Module) -> dict[str, torch.device]:
    """The device that computes with each parameter, by the parameter's name."""
    return {
        f"{prefix}.{name}": device_of(module, parameter)
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
    }


def is_brought(module: torch.nn.Module) -> bool:
    """Whether a module's parameters come when it runs, and go afterwards."""
    return any(parameter.device == _META for parameter in module.parameters(recurse=False))


def brought(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those parameters from where they lie, by name; one at a time, for they may not all fit."""
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.device == _META:
                yield f"{prefix}.{name}", _kept(module, name)


def _kept(module: torch.nn.Module, name: str) -> torch.Tensor:
    for hook in _hooks(module):
        weights = getattr(hook, "weights_map", None)
        if weights is not None:
            found: torch.Tensor = weights[name]
            return found
    raise UnsupportedModel(f"weights of its {type(module).__name__} are on the device 'meta', that is: not loaded")


@contextmanager
def without_autocast(kinds: Iterable[str]) -> Iterator[None]:
    """Have no kind of device compute in another precision than it is asked to."""
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _hooks(module: torch.nn.Module) -> Iterator[Any]:
    """accelerate's, of one module."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        yield from getattr(hook, "hooks", [hook])
