"""Where and how torch computes a model.

accelerate may have dispatched it: layers on several devices, or tensors that stay in the host's memory or in files
until their module runs. Until then these tensors are on the device "meta"."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from keepwarm.errors import UnsupportedModel

_META = torch.device("meta")


def device_of(module: torch.nn.Module, weight: torch.Tensor) -> torch.device:
    """Return the device that computes with a module's own weight. Raises UnsupportedModel when it cannot be found."""
    if weight.device != _META:
        return weight.device
    for hook in _hooks(module):
        if getattr(hook, "execution_device", None) is not None:
            found: int | str | torch.device = hook.execution_device
            return torch.device("cuda", found) if isinstance(found, int) else torch.device(found)
    raise UnsupportedModel(f"weights of its {type(module).__name__} are on the device 'meta', that is: not loaded")


def devices(model: torch.nn.Module) -> dict[str, torch.device]:
    """Return the device that computes with each parameter and buffer, by name."""
    return {
        f"{prefix}.{name}": device_of(module, tensor)
        for prefix, module in model.named_modules()
        for name, tensor in _own(module, persistent=False)
    }


def rounds_float32(device: torch.device) -> bool:
    """Whether torch rounds float32 to fewer bits before it multiplies. Processes may ask for that, and CUDA's devices
    and processors with matrix units then do it (`torch.set_float32_matmul_precision`)."""
    matmul = getattr(torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn, "matmul", None)
    precision = getattr(matmul, "fp32_precision", None)  # torch before 2.9 has the one setting alone
    return torch.get_float32_matmul_precision() != "highest" if precision is None else precision not in ("none", "ieee")


def is_brought(module: torch.nn.Module) -> bool:
    """Whether a module's tensors are loaded when it runs and unloaded afterwards."""
    return any(tensor.device == _META for _, tensor in _own(module))


def brought(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that are loaded when their module runs, by name, from where they are kept; of tied ones only
    the first. One at a time, for they may not all fit."""
    tied = getattr(model, "all_tied_weights_keys", {})
    for prefix, module in model.named_modules():
        for name, tensor in _own(module):
            full = f"{prefix}.{name}"
            if tensor.device == _META and full not in tied:
                source, key = _source(module, name)
                yield full, source[key]


def kept_in_memory(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that `brought` yields if they are kept in the host's memory."""
    for module in model.modules():
        for name, tensor in _own(module):
            if tensor.device == _META:
                source, key = _source(module, name)
                if isinstance(source, dict):
                    yield source[key]


def bringer(module: torch.nn.Module) -> object:
    """Return the object that loads a module's tensors; None when they are in place."""
    return getattr(module, "_hf_hook", None)


def _own(module: torch.nn.Module, *, persistent: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if not persistent or name not in module._non_persistent_buffers_set:
            yield name, buffer


def _source(module: torch.nn.Module, name: str) -> tuple[Mapping[str, torch.Tensor], str]:
    """Return the mapping that holds a tensor, and its name there. accelerate wraps mappings in mappings."""
    for hook in _hooks(module):
        source: Any = getattr(hook, "weights_map", None)
        if source is not None:
            while hasattr(source, "dataset"):
                source, name = source.dataset, f"{getattr(source, 'prefix', '')}{name}"
            held = getattr(source, "state_dict", None)
            return (held if isinstance(held, dict) and name in held else source), name
    raise UnsupportedModel(f"tensors of its {type(module).__name__} are on the device 'meta', that is: not loaded")


class Cudnn:
    """cuDNN's attention, which torch may prefer on CUDA. It makes a plan for each length of a sequence, so decoding
    takes 2 ms per layer and token on an H100. torch has one switch for all threads: the first who comes turns it, and
    the last who leaves turns it back."""

    def __init__(self) -> None:
        self._lock, self._users, self._before = threading.Lock(), 0, True

    @contextmanager
    def unused(self) -> Iterator[None]:
        """Compute attention without cuDNN while the `with` block runs."""
        with self._lock:
            if not self._users:
                self._before = torch.backends.cuda.cudnn_sdp_enabled()
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    torch.backends.cuda.enable_cudnn_sdp(self._before)


CUDNN = Cudnn()


@contextmanager
def without_autocast(kinds: Iterable[str]) -> Iterator[None]:
    """Turn autocast off for these kinds of devices, so that each computes in the precision it is given."""
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _hooks(module: torch.nn.Module) -> Iterator[Any]:
    """Yield accelerate's hooks of one module."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        yield from getattr(hook, "hooks", [hook])
