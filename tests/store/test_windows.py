"""A layer that attends to a window of the last positions is given what it needs, from every tier, and no more."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from keepwarm.core.codecs import ReferenceCodec, codec
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.reads import Arriving
from keepwarm.errors import CorruptRun
from keepwarm.runtime.native.reads import cached_reads
from keepwarm.store import Archive
from keepwarm.store.disk.prefetch import Fetch
from keepwarm.store.runfile.codec import Coding
from keepwarm.store.runfile.header import read_header
from keepwarm.store.runfile.source import FileSource
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, namespace, prompt

CAP = 1 << 24
LENGTH, STEP = 64, 8
TOKENS = prompt(LENGTH)
BLOCKS = blocks_of(TOKENS, STEP)
EVEN = KVGeometry.uniform(4, 2, 8, "bfloat16")
TIERS = ["ram", "disk", "encrypted", "mapped", "remote", "split"]


class Windowed(MemoryKV):
    """Takes from each layer what is behind a position of its own."""

    def __init__(self, geometry: KVGeometry, needs: list[int], *, defers: bool = False) -> None:
        super().__init__(geometry, LENGTH)
        self._needs, self._defers = needs, defers
        self.arriving: Arriving | None = None

    def needed_from(self, layer: int) -> int:
        return self._needs[layer]

    def defer(self, arriving: Arriving) -> bool:
        self.arriving = arriving if self._defers else None
        return self._defers


def opened(tier: str, folder: Path, coding: Coding | None = None) -> Archive:
    return Archive.open(
        None if tier in ("ram", "remote") else folder / "near",
        max_ram=CAP if tier == "ram" else 0,
        max_disk=CAP,
        key=bytes(range(32)) if tier == "encrypted" else None,
        map_files=tier == "mapped",
        remotes=[f"file://{folder / 'far'}"] if tier == "remote" else [],
        coding=coding,
    )


def put(archive: Archive, kv: MemoryKV, tier: str) -> None:
    """In one run, or, for the tier `split`, in one for every two blocks."""
    each = 2 if tier == "split" else len(BLOCKS)
    for first in range(0, len(BLOCKS), each):
        archive.put(kv, BLOCKS[first : first + each], namespace())
        archive.flush()


def load(archive: Archive, sink: MemoryKV, end: int) -> None:
    refs = tuple(ref for ref in archive.lookup([block.exact for block in BLOCKS]) if ref.start < end)
    archive.load(refs, TOKENS[:end], end, sink)


def check(sink: MemoryKV, kv: MemoryKV, needs: list[int], end: int) -> None:
    """What a layer needs is there; the blocks that end before it are not, and nothing lies behind the end."""
    for layer, need in enumerate(needs):
        first = need // STEP * STEP if need < end else end
        for mine, theirs in zip(sink.arrays[layer], kv.arrays[layer], strict=True):
            assert not mine[:, :first].any()
            assert np.array_equal(mine[:, first:end], theirs[:, first:end])
            assert not mine[:, end:].any()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("end", [LENGTH, LENGTH - 3, STEP, 3])
@pytest.mark.parametrize("needs", [[0, 20, 40], [STEP, LENGTH - 1, 0], [LENGTH, 16, LENGTH], [LENGTH] * 3])
def test_blocks_before_the_window_are_not_brought(tmp_path: Path, tier: str, end: int, needs: list[int]) -> None:
    kv = MemoryKV.random(UNEVEN, LENGTH)
    with opened(tier, tmp_path) as archive:
        put(archive, kv, tier)
        sink = Windowed(UNEVEN, needs)
        load(archive, sink, end)
        check(sink, kv, needs, end)
        whole = MemoryKV(UNEVEN, LENGTH)
        load(archive, whole, end)
        assert whole.same(kv, 0, end)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("end", [LENGTH, LENGTH - 3])
def test_encoded_blocks_before_the_window_are_not_decoded(tmp_path: Path, tier: str, end: int) -> None:
    kv = MemoryKV(UNEVEN, LENGTH)
    for layer, pair in enumerate(kv.arrays):
        for array in pair:
            array[..., 1::2] = 0x3F + layer  # bfloat16 that is finite
    needs = [0, 20, 50]
    with opened(tier, tmp_path, Coding(ReferenceCodec(codec("int8")), UNEVEN)) as archive:
        put(archive, kv, tier)
        whole, sink = MemoryKV(UNEVEN, LENGTH), Windowed(UNEVEN, needs)
        load(archive, whole, end)
        load(archive, sink, end)
        check(sink, whole, needs, end)


@pytest.mark.skipif(cached_reads() is None, reason="no compiler, or the xxHash library hides its functions")
@pytest.mark.parametrize("needs", [[0, 20, 40, 0], [40, 0, 0, LENGTH], [LENGTH, 20, 20, 40], [LENGTH] * 4])
def test_the_compiled_reader_reads_what_is_needed(tmp_path: Path, needs: list[int]) -> None:
    kv = MemoryKV.random(EVEN, LENGTH)
    with opened("disk", tmp_path) as archive:
        put(archive, kv, "disk")
        sink = Windowed(EVEN, needs, defers=True)
        load(archive, sink, LENGTH)
        fetch = sink.arriving
        assert isinstance(fetch, Fetch)
        reads = fetch.reads()
        read = 0 if reads is None else int(reads.parts["size"].sum())
        assert read == sum((LENGTH - need // STEP * STEP) * 2 * 2 * 16 for need in needs)
        for layer in range(len(needs)):
            fetch.ready(layer, cached_reads())
        assert not fetch._arrived  # no thread of the store was needed
        check(sink, kv, needs, LENGTH)


@pytest.mark.parametrize("damaged", [8, 48])
def test_damage_counts_where_it_is_read(tmp_path: Path, damaged: int) -> None:
    kv = MemoryKV.random(EVEN, LENGTH)
    with opened("disk", tmp_path) as archive:
        put(archive, kv, "disk")
        (path,) = (tmp_path / "near" / "runs").iterdir()
        with path.open("r+b") as file:
            header = read_header(FileSource(file.fileno()))
            at = header.data_offset + damaged * 16  # a row of the first layer's first head
            byte = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), at)
        sink = Windowed(EVEN, [40, 0, 0, 0])
        if damaged < 40:
            load(archive, sink, LENGTH)
            check(sink, kv, [40, 0, 0, 0], LENGTH)
        else:
            with pytest.raises(CorruptRun):
                load(archive, sink, LENGTH)
