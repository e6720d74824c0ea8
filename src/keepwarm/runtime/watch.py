"""Notices that a loaded model was changed in place.

It checks before every request. By then the memory has left the processor's caches, so the time depends on how much it
touches. So it loops in C, and if there is a compiler (`native/watch.cpp`), it prefetches many places at once. Bytes in
a device's memory are gathered and compared there, so that only a small answer comes back.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from keepwarm.runtime.capture import CudaCapture
from keepwarm.runtime.dispatch import bringer, is_brought, kept_in_memory
from keepwarm.runtime.identity import computed_buffers, lora_state, model_tensors, replaced_buffers
from keepwarm.runtime.native.build import WATCH, compiled
from keepwarm.runtime.native.narrow import narrow_tensors

_SPOT = _LINE = 64  # bytes
_version = operator.attrgetter("_version")
_Addresses = npt.NDArray[np.uintp]


class WeightWatch:
    """Tells whether a model's tensors, buffers or adapters were changed, added or exchanged since construction.

    torch's version counters show changes that autograd sees (`copy_`, optimizers, `load_state_dict`); a few bytes of
    every tensor show most of those that it does not see (`.data`), but not of weights that are left in their files.
    """

    def __init__(self, model: torch.nn.Module, *, native: bool = True) -> None:
        self._model = model
        modules = list(model.modules())
        # every module's own tables: a replaced parameter or submodule is another object
        self._tables: list[dict[str, Any]] = [table for m in modules for table in _tables(m) if table]
        self._held = [*chain.from_iterable(map(dict.values, self._tables))]
        self._adapted = any(type(module).__module__.startswith("peft.") for module in modules)
        computed = (tensor for module in modules for _, tensor in computed_buffers(module))
        narrow = narrow_tensors(model)  # they lie in files, which may be cut short: their bytes are not read again
        own = [*model_tensors(model)]
        every = [*(tensor for name, tensor in own if name not in narrow), *kept_in_memory(model), *computed]
        self._bringers = [(module, bringer(module)) for module in modules if is_brought(module)]
        counted = [*every, *(tensor for name, tensor in own if name in narrow)]
        self._tensors = [tensor for tensor in counted if not tensor.is_inference()]
        spots = [spot.numpy().data for t in every if t.device.type == "cpu" for spot in _spots(t)]
        self._elsewhere = [Elsewhere(device, found) for device, found in _by_device(every).items()]
        kernels = compiled(WATCH) if native else None
        self._looks = (
            _Plain(self._tables, self._held, spots)
            if kernels is None
            else _Compiled(ctypes.PyDLL(kernels.library._name), self._tables, self._held, spots, self._tensors)
        )
        self._last = self._state()

    def changed(self) -> bool:
        """Whether anything differs from the state at construction."""
        self._looks.ask()
        if any(bringer(module) is not who for module, who in self._bringers):
            return True
        return not self._looks.held() or self._state() != self._last or any(each.changed() for each in self._elsewhere)

    def _state(self) -> tuple[Any, ...]:
        versions = [*map(_version, self._tensors)]
        places = [*map(torch.Tensor.data_ptr, self._tensors)]
        return versions, places, self._looks.sampled(), lora_state(self._model) if self._adapted else "none"


class Elsewhere:
    """A few bytes of every tensor on one device, and a copy of them there. It sees changes made earlier on the current
    stream. On CUDA one call compares them all: what it launches was recorded."""

    def __init__(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        self._spots = [spot for tensor in tensors for spot in _spots(tensor)]
        with torch.inference_mode():
            self._last = torch.cat(self._spots)
            self._differ()  # kernels are loaded when they are launched first, which nothing may that is recorded
        self._capture = CudaCapture(device) if device.type == "cuda" else None
        self._replay: tuple[Callable[[], None], torch.Tensor] | None = None
        with suppress(RuntimeError), torch.inference_mode():  # where CUDA records nothing they are launched one by one
            self._replay = None if self._capture is None else self._capture.record(self._differ)

    def changed(self) -> bool:
        """Whether the bytes differ from the copy. Waits for the device. One call at a time."""
        if self._capture is None or self._replay is None:
            with torch.inference_mode():
                return bool(self._differ())
        replay, found = self._replay
        self._capture.in_turn()
        replay()
        return bool(found)

    def _differ(self) -> torch.Tensor:
        return (torch.cat(self._spots) != self._last).any()


class _Plain:
    """Checks in Python."""

    def __init__(self, tables: Sequence[dict[str, Any]], held: Sequence[object], spots: Sequence[memoryview]) -> None:
        self._tables, self._held, self._spots = tables, held, spots

    def ask(self) -> None:
        """Prefetch what will be checked; a no-op here."""

    def held(self) -> bool:
        """Whether the tables hold the same objects as at construction."""
        now: Iterator[object] = chain.from_iterable(map(dict.values, self._tables))
        return sum(map(len, self._tables)) == len(self._held) and all(map(operator.is_, now, self._held))

    def sampled(self) -> object:
        """Return a checksum over the spots."""
        return xxhash.xxh3_64_intdigest(b"".join(self._spots))


class _Compiled:
    """Checks addresses with `native/watch.cpp`. It keeps the objects there alive, whatever happens to the model."""

    def __init__(
        self,
        library: ctypes.PyDLL,
        tables: Sequence[dict[str, Any]],
        held: Sequence[object],
        spots: Sequence[memoryview],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        self._alive = (tables, held, spots)  # a tensor whose `data` is replaced would free its memory
        self._tables, self._held = _addresses(map(id, tables)), _addresses(map(id, held))
        whole = [spot for spot in spots if len(spot) == _SPOT]
        self._spots = _addresses(np.frombuffer(spot, np.uint8).ctypes.data for spot in whole)
        self._small = [spot for spot in spots if len(spot) < _SPOT]
        there = [at for tensor in tensors for at in _whereabouts(tensor)]
        self._asked = _addresses(dict.fromkeys(int(at) for at in (*self._tables, *there, *self._spots)))
        self._ask = _function(library.keepwarm_ask, None, self._asked)
        self._holds = _function(library.keepwarm_holds, ctypes.c_int, self._tables, self._held)
        self._sampled = _function(library.keepwarm_sampled, ctypes.c_uint64, self._spots)

    def ask(self) -> None:
        self._ask()

    def held(self) -> bool:
        return bool(self._holds())

    def sampled(self) -> object:
        return int(self._sampled()), b"".join(self._small)


def _addresses(found: Any) -> _Addresses:
    return np.fromiter(found, dtype=np.uintp)


def _function(function: Any, result: Any, *places: _Addresses) -> Callable[[], Any]:
    function.restype = result
    arguments = [part for at in places for part in (ctypes.c_void_p(at.ctypes.data), ctypes.c_int64(len(at)))]
    return lambda: function(*arguments)


def _whereabouts(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the addresses of a tensor's CPython and torch objects, to be prefetched. They are never read."""
    there = int(getattr(tensor, "_cdata", 0))
    return id(tensor), there, there + _LINE, int(getattr(tensor.untyped_storage(), "_cdata", 0))


def _tables(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """Return a module's own tables that stay the same unless the model is changed."""
    if is_brought(module):  # its tensors are new objects at each run, and are not watched
        return (module._modules,)
    own: tuple[dict[str, Any], ...] = (module._parameters, module._modules)
    return own if replaced_buffers(module) else (*own, module._buffers)


def _by_device(tensors: Sequence[torch.Tensor]) -> dict[torch.device, list[torch.Tensor]]:
    """Return the tensors on devices other than the processor, by device."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type not in ("cpu", "meta") and _spots(tensor):
            found.setdefault(tensor.device, []).append(tensor)
    return found


def _spots(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return two spots of 64 bytes, at the beginning and in the middle; of a smaller tensor, all bytes."""
    size = tensor.numel() * tensor.itemsize
    if not tensor.is_contiguous() or not size:
        return ()
    raw = tensor.detach().flatten().view(torch.uint8)
    middle = min(size // 2, size - _SPOT)
    return (raw[:_SPOT], raw[middle : middle + _SPOT]) if size >= _SPOT else (raw,)
