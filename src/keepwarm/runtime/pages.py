"""KV of many sequences in pages of one preallocated memory. A common beginning is there only once.

A page holds 8 positions of every layer's keys and values, `[kv_heads][8][dim]` of each, as the kernels read them.
Full pages of a prompt that was computed exactly are named by their content, so that sequences which begin alike share
them; a sequence's last, partial page and what it generates are its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from keepwarm.core.blocks import Chain
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.lora import Lora
from keepwarm.core.ports import Bytes
from keepwarm.runtime.arena.gap import NO_GAP, Gap
from keepwarm.runtime.device import DevicePort
from keepwarm.runtime.device.host import HostPort
from keepwarm.runtime.native.places import PAGE, Recurrent, Region, Sequenced
from keepwarm.runtime.page_memory import PageMemory
from keepwarm.store.page_pool import PagePool

CopyRows = Callable[[Region, int, Region, int, int], None]  # source, its row, target, its row, rows


def pages_for(positions: int) -> int:
    return -(-positions // PAGE)


def page_bytes(geometry: KVGeometry) -> int:
    """Bytes of one page; 0 for a model without KV per token."""
    return PAGE * geometry.bytes_per_token


def page_names(blocks: Chain, length: int) -> list[bytes]:
    """Return the names of the full pages of a prompt of `length` tokens that was computed in these blocks.

    The exact name of the block that holds a page's last token covers every token and cut up to there: equal names mean
    equal bits.
    """
    return [
        blocks.exact[bisect_left(blocks.ends, (page + 1) * PAGE)] + page.to_bytes(8, "little")
        for page in range(length // PAGE)
    ]


class KVPages:
    """`count` pages of memory, allocated and touched once, and the pool that tracks their use."""

    def __init__(
        self, geometry: KVGeometry, count: int, kernels: Callable[[], CopyRows | None], port: DevicePort | None = None
    ) -> None:
        """`kernels` returns the function that copies rows of all layers and heads between regions, or None once the
        model runs without a decoder of ours. `port` is a port to the device that computes; None: the host."""
        dims = [(layer.kv_heads, dim) for layer in geometry.layers for dim in (layer.key_dim, layer.value_dim)]
        self.kernels = kernels
        self.geometry = geometry
        self.pool = PagePool(count)
        # The pages of one head are contiguous, so those of one prompt are mostly read as one stream.
        shapes = [(heads, dim * geometry.itemsize) for heads, dim in dims]
        self.memory = PageMemory(port or HostPort(), shapes, count * PAGE)
        self.region = self.memory.region

    def copy_rows(self, source: Region, row: int, target: Region, at: int, rows: int) -> None:
        kernels = self.kernels()
        if kernels is None:
            raise RuntimeError("the model stopped running on a decoder of ours while requests were under way")
        self.memory.take_turn()
        kernels(source, row, target, at, rows)

    def admit(self, positions: int, names: Sequence[bytes], lora: Lora | None = None) -> PagedSequence | None:
        """Return a sequence with room reserved for `positions`, to be computed with the adapter `lora`. It shares the
        pages `names` that are there. None means that there is no room."""
        found = self.pool.reserve(pages_for(positions) - len(names), names)
        if found is None:
            return None
        made = PagedSequence(self, found, pages_for(positions) - sum(page is not None for page in found))
        made.lora = lora
        return made


class PagedSequence:
    """One sequence's page table. It grows by one page at a time, and uses the room reserved for it first.

    It holds its pages until `release`, which must be called once, even after a failure. Parts of its prompt in encoded
    blocks are read there and take no pages.
    """

    def __init__(self, memory: KVPages, found: Sequence[int | None] = (), promised: int = 0) -> None:
        """`found` are the leading pages, already held for this sequence, with None for a missing one."""
        self.length = 0  # positions that hold keys and values
        self.lora: Lora | None = None  # the adapter with which steps compute
        self._state: Recurrent | None = None  # behind the last position, in a model whose layers have one
        self._memory = memory
        self._found = list(found)
        self._promised = promised
        self._regions = [memory.region]
        self._places: list[int] = []  # per page: region << 32 | row
        self._table: Sequenced | None = None
        self._read: tuple[int, int, npt.NDArray[np.int64]] | None = None  # the last rows that were read

    @property
    def pages(self) -> tuple[int, ...]:
        """The pages of the memory that it uses."""
        return tuple(place // PAGE for place in self._places if not place >> 32)

    @property
    def unused(self) -> int:
        """The number of free positions in its pages."""
        return len(self._places) * PAGE - self.length

    @property
    def promised(self) -> int:
        """The number of pages reserved for this sequence and not taken yet."""
        return self._promised

    @property
    def has_no_state(self) -> bool:
        """Whether all that steps go on from is keys and values."""
        return self._state is None

    @property
    def sequenced(self) -> Sequenced:
        """Where its pages are, for the calling thread's next step."""
        self._memory.memory.take_turn()
        if self._table is None:
            places = np.array(self._places, dtype=np.int64)
            self._table = Sequenced(tuple(self._regions), places, lora=self.lora, state=self._state)
        return self._table

    def fill(self, source: Sequenced, length: int, names: Sequence[bytes], gap: Gap = NO_GAP) -> None:
        """Take a prompt's first `length` positions, and its state, from `source`, which lacks those of `gap` in some
        layers.

        Pages of `names` that are there already are shared, except those that the gap touches: these are this
        sequence's own. The pages with which the sequence was admitted come first. Raises Overloaded when pages run
        out; `release` then gives back those that were taken.
        """
        pool = self._memory.pool
        numbers: dict[int, int] = {}  # of the source's regions here
        copies: list[tuple[Region, int, int, int]] = []
        named: list[tuple[int, bytes]] = []
        for number in range(pages_for(length)):
            there = self._found[number] if number < len(self._found) else None
            if there is not None:
                self._found[number] = None
                self._places.append(there * PAGE)
                continue
            place = int(source.pages[number])
            region, row = source.regions[place >> 32], place & 0xFFFFFFFF
            if region.is_encoded:
                here = numbers.setdefault(place >> 32, len(self._regions))
                if here == len(self._regions):
                    self._regions.append(region)
                self._places.append(here << 32 | row)
                continue
            is_named = number < len(names) and not gap.touches(number * PAGE, (number + 1) * PAGE)
            if is_named:
                page, is_there = self._claim(names[number])
            else:
                (page,), is_there = self._allocate(), False
            self._places.append(page * PAGE)
            if not is_there:
                _add_copy(copies, region, row, page * PAGE, min(PAGE, length - number * PAGE))
                named += [(page, names[number])] if is_named else []
        for region, row, at, count in copies:
            self._memory.copy_rows(region, row, self._memory.region, at, count)
        for page, name in named:
            pool.name(page, name)
        elsewhere = min(len(self._places) - len(self.pages), self._promised)
        pool.unreserve(elsewhere)
        self._promised -= elsewhere
        self.length = length
        self._state = _copied(source.state)
        self._table = self._read = None

    def grow(self, end: int) -> None:
        """Make the positions from `length` to `end` writable: copy a shared last page and take new pages.

        Raises Overloaded when no page is free; the sequence then keeps its content.
        """
        pool, first = self._memory.pool, self.length // PAGE
        for number in range(first, min(len(self._places), pages_for(end))):
            page = self._places[number] // PAGE
            if not pool.is_writable(page):
                (copy,) = self._allocate()
                self._memory.copy_rows(self._memory.region, page * PAGE, self._memory.region, copy * PAGE, PAGE)
                pool.release([page])
                self._places[number], self._table, self._read = copy * PAGE, None, None
        while len(self._places) * PAGE < end:
            self._places += [page * PAGE for page in self._allocate()]
            self._table = self._read = None

    def fork(self) -> PagedSequence:
        """Return another sequence with the same content. The first of both to write copies the last page."""
        other = PagedSequence(self._memory)
        self._memory.pool.share(self.pages)
        other._regions, other._places, other.length = list(self._regions), list(self._places), self.length
        other.lora, other._state = self.lora, _copied(self._state)
        return other

    def release(self) -> None:
        """Give back all pages and the reserved room."""
        pool = self._memory.pool
        pool.release(self.pages)
        pool.release([page for page in self._found if page is not None])
        pool.unreserve(self._promised)
        self._regions, self._places, self._found = [self._memory.region], [], []
        self._promised, self.length, self._table, self._read, self._state = 0, 0, None, None, None

    @property
    def is_plain(self) -> bool:
        """Whether all its content is in the memory's own pages, none in encoded blocks."""
        return len(self._regions) == 1

    # KVSource

    @property
    def geometry(self) -> KVGeometry:
        return self._memory.geometry

    def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        if self._read is None or self._read[:2] != (start, end):
            first = start // PAGE
            places = np.array(self._places[first : pages_for(end)], dtype=np.int64)
            positions = np.arange(start, end)
            self._read = start, end, places[positions // PAGE - first] + positions % PAGE
        return self._memory.memory.read(2 * layer + kv, self._read[2])

    def copy_to(self, data: Bytes, start: int, end: int) -> bool:
        """See `core.ports.WholeSource`. Adjacent pages take one kernel call, so a copy during a batch's steps holds the
        interpreter's lock only briefly."""
        kernels = self._memory.kernels()
        is_even = self._memory.region.planes is None
        if kernels is None or not self.is_plain or not is_even or not self._memory.memory.is_host:
            return False
        heads, rows = self.geometry.layers[0].kv_heads, end - start
        head = rows * self.geometry.head_bytes(0, 0)
        target = Region.even(data.ctypes.data, heads * head, head, data)
        copies: list[tuple[Region, int, int, int]] = []
        for number in range(start // PAGE, pages_for(end)):
            first, last = max(start, number * PAGE), min(end, (number + 1) * PAGE)
            row = self._places[number] + first % PAGE
            _add_copy(copies, self._memory.region, row, first - start, last - first)
        for region, row, at, count in copies:
            kernels(region, row, target, at, count)
        return True

    def _allocate(self) -> list[int]:
        pages = self._memory.pool.allocate(1, reserved=self._promised > 0)
        self._promised -= self._promised > 0
        return pages

    def _claim(self, name: bytes) -> tuple[int, bool]:
        if not self._promised:
            return self._allocate()[0], False
        self._promised -= 1
        return self._memory.pool.claim(name)


def _copied(state: Recurrent | None) -> Recurrent | None:
    return None if state is None else Recurrent(tuple(layer.clone() for layer in state.layers))


def _add_copy(copies: list[tuple[Region, int, int, int]], region: Region, row: int, at: int, rows: int) -> None:
    """Add a copy of `rows` rows to row `at`. Merge it with the copy before if source and target continue that one."""
    if copies:
        before, first, to, count = copies[-1]
        if before is region and (first + count, to + count) == (row, at):
            copies[-1] = region, first, to, count + rows
            return
    copies.append((region, row, at, rows))
