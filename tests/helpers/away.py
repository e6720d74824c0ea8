"""A second device where there is none: torch's own way for a backend in Python, which computes with the processor's
tensors. What mixes the two is refused, as on a real one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

from keepwarm.runtime.device.common import OneStreamPort, TensorMemory
from keepwarm.runtime.device.host import HostStream
from keepwarm.runtime.device.port import Memory

NAME = "away"
_MOVES = ("aten::copy_", "aten::_to_copy", "aten::to")


class Away(torch.Tensor):
    """A tensor on the device; `inner` has its bytes."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Away:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=f"{NAME}:0",
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name
        if name not in _MOVES:
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, torch.Tensor) and not isinstance(each, Away) and each.dim():
                    raise RuntimeError(f"{name}: expected all tensors to be on the same device, {NAME}:0 and cpu found")
        asked = [each.type for each in tree_leaves((args, kwargs)) if isinstance(each, torch.device)]
        if name == "aten::to" and len(args) > 1 and isinstance(args[1], torch.Tensor):
            asked = [args[1].device.type]
        stays = asked in ([], [NAME])
        found = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        if func._schema.is_mutable and not name.endswith("_out"):
            return args[0]
        first = next((each for each in tree_leaves(args) if isinstance(each, Away)), None)
        with torch.inference_mode(first is not None and first.is_inference()):  # a view is of its base's kind
            return tree_map(lambda each: Away(each) if stays and isinstance(each, torch.Tensor) else each, found)


def _inner(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.inner if isinstance(value, Away) else value


class _Backend:
    """What torch asks of a device's module."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        return

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False


class AwayPort(OneStreamPort):
    """See `DevicePort`."""

    kind = NAME
    is_host = False

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(torch.device(NAME, 0) if device is None else device, HostStream())

    def _allocate(self, nbytes: int, huge: bool) -> Memory:
        return TensorMemory(Away(torch.full((nbytes,), 0xFF, dtype=torch.uint8)))


@cache
def register() -> Any:
    """Make the device known to torch, once for a process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Backend())
    library = torch.library.Library("aten", "IMPL")

    def empty(size: Any, **given: Any) -> Away:
        return Away(torch.empty(size, dtype=given.get("dtype")))

    def empty_strided(size: Any, stride: Any, **given: Any) -> Away:
        return Away(torch.empty_strided(size, stride, dtype=given.get("dtype")))

    def copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
        _inner(target).copy_(_inner(source))
        return target

    library.impl("_copy_from", copy_from, "PrivateUse1")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    return library  # what was registered lasts as long as this


def to(module: torch.nn.Module) -> None:
    """Put a module's tensors on the device, and have it and what follows get what they are given there."""
    for each in module.modules():
        for name, parameter in each.named_parameters(recurse=False):
            each._parameters[name] = torch.nn.Parameter(Away(parameter.detach()), requires_grad=False)
        for name, buffer in each.named_buffers(recurse=False):
            each._buffers[name] = Away(buffer)
    module.register_forward_pre_hook(lambda _, args, given: _moved((args, given), NAME), with_kwargs=True)


def back(module: torch.nn.Module) -> None:
    """Have a module get what it is given on the processor again."""
    module.register_forward_pre_hook(lambda _, args, given: _moved((args, given), "cpu"), with_kwargs=True)


def _moved(given: tuple[Any, Mapping[str, Any]], device: str) -> Any:
    return tree_map(lambda each: each.to(device) if isinstance(each, torch.Tensor) else each, given)
