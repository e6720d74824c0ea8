"""vLLM's pages on a device: whole pages, moved by one plan of copies, in the order in which their bytes lie there.

The store expects keys and values of each layer. Here a stored layer has one layer's page as its keys and the next
one's as its values, so that a page is not cut. Only the last one of an odd number of layers is cut into two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from keepwarm.core.geometry import KVGeometry, LayerGeometry
from keepwarm.integrations.vllm.page_copies import BYTES, Staged
from keepwarm.integrations.vllm.pinned import Block, PinnedPool
from keepwarm.runtime.device import Copies, DevicePort, Event, Stream
from keepwarm.runtime.device.copies import Numbers

FORM = 3  # of a page's bytes in the store; `page_copies.FORM` is another


@dataclass(frozen=True)
class _Plane:
    """What counts as the keys, or as the values, of a stored layer: bytes of one layer's pages, in `size` each.

    Part `k` begins `offsets[k]` bytes behind the page's beginning on the device and `places[k]` behind that in the
    staging memory.
    """

    base: int  # address of the layer's first page
    stride: int  # bytes from a page to the next one
    size: int
    offsets: Numbers
    places: Numbers
    sizes: Numbers


class DevicePages:
    """vLLM's KV memory on a device: per layer `[pages, heads, tokens, width]`, in any order in memory.

    vLLM's kernels may cut each of its pages into several of fewer tokens, which lie side by side.
    """

    on_host = False
    can_place = False

    def __init__(
        self, views: Mapping[str, torch.Tensor], page_size: int, port: DevicePort, count: int | None = None
    ) -> None:
        """`count` is the number of vLLM's pages; by default it follows from the tokens of a kernel's page. Raises
        ValueError for an unexpected layout."""
        self.page_size = page_size
        self.names = list(views)
        self.port = port
        self.pinned = PinnedPool(port)
        self._streams: list[Stream] = []
        self._views = list(views.values())  # keeps the addresses valid
        layers = [_layer(name, view, page_size, count) for name, view in views.items()]
        self._planes = _planes(layers, page_size)
        rows = [plane.size // page_size for plane in self._planes]
        pairs = zip(rows[::2], rows[1::2], strict=True)
        self.geometry = KVGeometry(tuple(LayerGeometry(1, keys, values) for keys, values in pairs), BYTES)

    def stage(self, tokens: int) -> PinnedStaged:
        """Return pinned memory for a transfer of `tokens` tokens. Call its `release` afterwards."""
        block = self.pinned.take(tokens * self.geometry.bytes_per_token)
        return PinnedStaged(self.geometry, tokens, block, self.pinned)

    def plan(self, staged: PinnedStaged, pages: Sequence[int], *, inward: bool) -> Copies:
        """Plan the copies of all layers of `pages` from the staging memory, or to it."""
        numbers = np.asarray(pages, np.int64)[:, None]
        at = np.arange(len(pages), dtype=np.int64)[:, None]
        there, here, sizes = [], [], []
        for plane, begin in zip(self._planes, staged.addresses(), strict=True):
            there.append((plane.base + numbers * plane.stride + plane.offsets).ravel())
            here.append((begin + at * plane.size + plane.places).ravel())
            sizes.append(np.broadcast_to(plane.sizes, (len(pages), len(plane.sizes))).ravel())
        return Copies.between(np.concatenate(there), np.concatenate(here), np.concatenate(sizes), inward=inward)

    def bring(self, staged: PinnedStaged, pages: Sequence[int], stream: Stream) -> Event:
        """Queue the copies of staged pages into `pages`. Return the event after them."""
        return self._copy(self.plan(staged, pages, inward=True), staged, stream)

    def fetch(self, staged: PinnedStaged, pages: Sequence[int], computed: Event) -> Event:
        """Queue the copies of `pages`, once they are `computed`, to the staging memory. Return the event after them."""
        self.port.outbound.wait(computed)
        return self._copy(self.plan(staged, pages, inward=False), staged, self.port.outbound)

    def read(self, staged: Staged, pages: Sequence[int]) -> None:
        """Copy pages into staging memory. What is computed from now on may write over them."""
        assert isinstance(staged, PinnedStaged)
        current = self.port.current()
        current.wait(self.fetch(staged, pages, current.record()))

    def _copy(self, plan: Copies, staged: PinnedStaged, stream: Stream) -> Event:
        try:
            self.port.copy_all(plan, stream)
        finally:  # after an error a part of them may be queued
            event = stream.record()
            staged.note(event, plan)
        return event

    def drain(self) -> None:
        """Wait for all copies."""
        self.pinned.drain()

    def take_stream(self) -> Stream:
        """Return a stream that no other load uses."""
        return self._streams.pop() if self._streams else self.port.stream()

    def give_stream(self, stream: Stream) -> None:
        self._streams.append(stream)


class PinnedStaged(Staged):
    """Staging memory that a device copies from and to: `copying` is the copies that may still run."""

    def __init__(self, geometry: KVGeometry, tokens: int, block: Block, pool: PinnedPool) -> None:
        super().__init__(geometry, tokens, block.memory, lambda _: None)
        self.copying: list[tuple[Event, Copies]] = []
        self.nbytes = len(block.memory)
        self.is_released = False
        self._block, self._pool = block, pool

    def note(self, event: Event, plan: Copies) -> None:
        """Note copies that are done at an event."""
        self.copying.append((event, plan))
        self._pool.note(self._block, event)

    def ready(self) -> None:
        """Wait until all copies are done, so that the host may read it."""
        for event, _ in self.copying:
            event.synchronize()

    def release(self) -> None:
        """Give the memory back; it is used again once its copies are done."""
        self.is_released = True
        self._pool.give(self._block, self.copying)


@dataclass(frozen=True)
class _Layer:
    base: int
    stride: int
    offsets: list[int]  # of the stretches of a page, ascending
    size: int  # of each stretch


def _layer(name: str, view: torch.Tensor, page_size: int, count: int | None) -> _Layer:
    if view.dim() != 4 or (page_size % view.shape[2] if count is None else view.shape[0] % count):
        raise ValueError(
            f"layer {name}: expected {count or 'some'} pages of {page_size} tokens, as [pages, heads, tokens, width] "
            f"or cut evenly, got {list(view.shape)}; this vLLM lays its KV out in another way"
        )
    if view.stride(3) != 1 and view.shape[3] != 1:
        raise ValueError(f"layer {name}: the numbers of a token do not lie side by side, strides {view.stride()}")
    item, cuts = view.itemsize, page_size // view.shape[2] if count is None else view.shape[0] // count
    run = view.shape[3] * item
    dims = sorted(
        (view.stride(dim) * item, cuts if dim == 0 else view.shape[dim])
        for dim in range(3)
        if (cuts if dim == 0 else view.shape[dim]) > 1
    )
    while dims and dims[0][0] == run:
        run *= dims.pop(0)[1]
    offsets = sorted(map(sum, product(*(range(0, stride * count, stride) for stride, count in dims))))
    if (len(offsets) * run) % page_size:
        raise ValueError(f"layer {name}: a page of {len(offsets) * run} bytes has no whole bytes for each token")
    return _Layer(view.data_ptr(), cuts * view.stride(0) * item, offsets, run)


def _planes(layers: Sequence[_Layer], page_size: int) -> list[_Plane]:
    whole = layers[: len(layers) // 2 * 2]
    planes = [_plane(layer, 0, len(layer.offsets) * layer.size) for layer in whole]
    for layer in layers[len(whole) :]:
        size = len(layer.offsets) * layer.size
        middle = size // page_size // 2 * page_size
        planes += [_plane(layer, 0, middle), _plane(layer, middle, size)]
    return planes


def _plane(layer: _Layer, first: int, last: int) -> _Plane:
    """Take bytes `[first, last)` of each page of a layer, counted in the order in which they lie."""
    parts = []
    for number, offset in enumerate(layer.offsets):
        begin, end = max(first, number * layer.size), min(last, (number + 1) * layer.size)
        if begin < end:
            parts.append((offset + begin - number * layer.size, begin - first, end - begin))
    offsets, places, sizes = (np.array(column, np.int64) for column in zip(*parts, strict=True))
    return _Plane(layer.base, layer.stride, last - first, offsets, places, sizes)
