"""vLLM's pages for the store: whole pages, moved in ranges, without interpreting their bytes.

A page is one block. The store expects keys and values of tokens: the first half of a page's token slots in all heads
counts as its keys, the second half as its values. Each half is cut evenly into as many rows as a page has tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from keepwarm.core.geometry import KVGeometry, LayerGeometry
from keepwarm.core.memory import private_memory
from keepwarm.core.ports import Bytes
from keepwarm.core.reads import Reads

FORM = 2  # of a page's bytes in the store
BYTES = "float8_e4m3fn"  # a dtype of one byte: rows are moved unchanged, whatever they mean to vLLM
_KEPT = 256 << 20  # bytes of staging memory kept for later transfers


class Pages:
    """vLLM's KV memory: per layer `[pages, heads, page_size, width]`, in the order of the layers."""

    def __init__(self, views: Mapping[str, torch.Tensor], page_size: int) -> None:
        """Raises ValueError for an unexpected layout."""
        self.page_size = page_size
        self.names = list(views)
        self._views = [_bytes_of(name, view, page_size) for name, view in views.items()]
        self.geometry = KVGeometry(tuple(_shape(view, page_size) for view in self._views), BYTES)
        self.on_host = isinstance(self._views[0], np.ndarray)  # then loaders and the model share the cores
        is_even = len({view.shape[1:] for view in self._views}) == 1
        self.can_place = self.on_host and is_even and all(map(_has_rows, self._views))  # see `placed`
        self._free: list[Bytes] = []
        self._lock = threading.Lock()

    def stage(self, tokens: int) -> Staged:
        """Return memory for a transfer of `tokens` tokens. Call its `release` afterwards."""
        size = tokens * self.geometry.bytes_per_token
        with self._lock:
            fit = next((at for at, free in enumerate(self._free) if len(free) >= size), None)
            memory = None if fit is None else self._free.pop(fit)
        if memory is None:
            memory = np.frombuffer(private_memory(size), np.uint8)
        return Staged(self.geometry, tokens, memory, self._take_back)

    def _take_back(self, memory: Bytes) -> None:
        with self._lock:
            self._free.append(memory)
            self._free.sort(key=len)
            while sum(map(len, self._free)) > _KEPT:
                self._free.pop(0)

    def read(self, staged: Staged, pages: Sequence[int]) -> None:
        """Copy pages into staging memory."""
        for layer, view in enumerate(self._views):
            for kv, half in enumerate(_halves(view)):
                rows = staged.paged(layer, kv, half)
                for first, last, at in _stretches(pages):
                    _copy(rows[at : at + last - first], half[first:last])

    def placed(self, reads: Reads, staged: Staged, pages: Sequence[int]) -> Reads:
        """Turn reads into the staging memory of `pages` into reads into these pages, which must be on the host."""
        layers, heads = len(self._views), self._views[0].shape[1]
        half = self._views[0].shape[2] // 2 * self._views[0].shape[3]  # bytes of one head
        old = reads.parts.reshape(layers, -1, 2)
        at = (old["to"] - staged.addresses().reshape(layers, 1, 2)) // (heads * half)
        base = np.array([_address(view) for view in self._views]).reshape(-1, 1, 1)
        stride = np.array([view.strides for view in self._views]).reshape(layers, 1, 1, 4)
        place = base + np.asarray(pages)[at] * stride[..., 0] + np.array([0, self.page_size // 2]) * stride[..., 2]
        parts = np.empty((*old.shape, heads), Reads.PART)
        parts["offset"] = old["offset"][..., None] + half * np.arange(heads)
        parts["size"] = half
        parts["to"] = place[..., None] + stride[..., 1:2] * np.arange(heads)
        tasks = reads.tasks.copy()
        tasks["first"] *= heads
        tasks["last"] *= heads
        return Reads(parts.reshape(-1), tasks, reads.targets)

    def write(self, staged: Staged, layer: int, pages: Sequence[int], at: int) -> None:
        """Copy one layer of the staged pages, beginning with the one at index `at`, into `pages`."""
        for kv, half in enumerate(_halves(self._views[layer])):
            rows = staged.paged(layer, kv, half)[at:]
            for first, last, place in _stretches(pages):
                _copy(half[first:last], rows[place : place + last - first])


class Staged:
    """Host memory for the KV of consecutive pages: per layer keys `[1, tokens, row]`, then values."""

    def __init__(self, geometry: KVGeometry, tokens: int, memory: Bytes, release: Callable[[Bytes], None]) -> None:
        self.geometry = geometry
        self.tokens = tokens
        self._memory = memory
        self._release = release
        self._at: list[int] = [0]
        for layer in range(len(geometry.layers)):
            for kv in (0, 1):
                self._at.append(self._at[-1] + tokens * geometry.head_bytes(layer, kv))

    def plane(self, layer: int, kv: int) -> Bytes:
        """`[1, tokens, row]`."""
        first, last = self._at[2 * layer + kv], self._at[2 * layer + kv + 1]
        return self._memory[first:last].reshape(1, self.tokens, -1)

    def paged(self, layer: int, kv: int, half: Any) -> Bytes:
        """Return a plane as `[pages, heads, page_size / 2, width]`, the shape of `half` of vLLM's pages."""
        return self.plane(layer, kv).reshape(-1, *half.shape[1:])

    def addresses(self) -> npt.NDArray[np.int64]:
        """Return the addresses at which each layer's keys and values begin, `[2 * layers]`."""
        return _address(self._memory) + np.array(self._at[:-1])

    def ready(self) -> None:
        """Wait until it may be read: here it always may."""

    def release(self) -> None:
        """Give the memory back; it may not be read or written afterwards."""
        self._release(self._memory)


def _bytes_of(name: str, view: torch.Tensor, page_size: int) -> Any:
    """Return a layer's pages as bytes. On the CPU it is a numpy array: torch would copy with threads that the model
    needs."""
    if view.dim() != 4 or view.shape[2] != page_size or page_size % 2:
        raise ValueError(
            f"layer {name}: expected pages of shape [pages, heads, {page_size}, width], got {list(view.shape)}; this "
            "vLLM lays its KV out in another way"
        )
    rows = view.view(torch.uint8)
    return rows.numpy() if rows.device.type == "cpu" else rows


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])


def _has_rows(view: Bytes) -> bool:
    """Whether the token slots of a page's head are contiguous."""
    return view.strides[2:] == (view.shape[3], 1)


def _shape(view: Any, page_size: int) -> LayerGeometry:
    half = view.shape[1] * view.shape[3] // 2
    return LayerGeometry(1, half, half)


def _halves(view: Any) -> Iterator[Any]:
    middle = view.shape[2] // 2
    yield view[:, :, :middle]
    yield view[:, :, middle:]


def _stretches(pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield ranges of consecutive pages, to copy at once, as `(first, last + 1, place in the sequence)`."""
    begins = [0, *(at + 1 for at, (a, b) in enumerate(pairwise(pages)) if b != a + 1), len(pages)]
    for at, end in pairwise(begins):
        yield pages[at], pages[at] + end - at, at


def _copy(target: Any, source: Any) -> None:
    if isinstance(target, np.ndarray) and isinstance(source, np.ndarray):
        np.copyto(target, source)
    elif isinstance(target, np.ndarray):
        torch.from_numpy(target).copy_(source)
    else:
        target.copy_(torch.from_numpy(source))
