"""A layer that attends to a window of the last positions is given what it needs, from every tier, and no more."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from keepwarm.core.blocks import chain
from keepwarm.core.codecs import ReferenceCodec, codec, encode
from keepwarm.core.geometry import KVGeometry, LayerGeometry
from keepwarm.core.reads import Arriving
from keepwarm.errors import CorruptRun, StoreTooNew
from keepwarm.runtime.native.reads import cached_reads
from keepwarm.store import Archive
from keepwarm.store.disk.prefetch import Fetch
from keepwarm.store.runfile.codec import Coding
from keepwarm.store.runfile.header import read_header
from keepwarm.store.runfile.layout import Run, stored_blocks
from keepwarm.store.runfile.reader import RunReader
from keepwarm.store.runfile.source import FileSource
from keepwarm.store.runfile.writer import write_run
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
@pytest.mark.parametrize(
    "end",
    [
        pytest.param(LENGTH, marks=pytest.mark.slow),
        LENGTH - 3,
        pytest.param(STEP, marks=pytest.mark.slow),
        pytest.param(3, marks=pytest.mark.slow),
    ],
)
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
@pytest.mark.parametrize("end", [LENGTH, pytest.param(LENGTH - 3, marks=pytest.mark.slow)])
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


# ---- what is stored of a windowed layer ----

SLIDING = KVGeometry(
    (replace(UNEVEN.layers[0], window=6), UNEVEN.layers[1], replace(UNEVEN.layers[2], window=21)), "bfloat16"
)
ALIKE = KVGeometry((LayerGeometry(2, 8, 8, 6), LayerGeometry(2, 8, 8), LayerGeometry(2, 8, 8, 21)), "bfloat16")
LENGTHS = (20, 3, 2, 30, 9)
CUTS = list(accumulate(LENGTHS))


class Going(Windowed):
    """Is loaded for steps that go on at a position."""

    def __init__(self, geometry: KVGeometry, end: int, *, defers: bool = False) -> None:
        needs = [0 if layer.window is None else max(0, end - layer.window + 1) for layer in geometry.layers]
        super().__init__(geometry, needs, defers=defers)
        self.needs = needs

    def has(self, kv: MemoryKV, end: int) -> bool:
        return all(
            np.array_equal(mine[:, need:end], theirs[:, need:end])
            for need, pair, others in zip(self.needs, self.arrays, kv.arrays, strict=True)
            for mine, theirs in zip(pair, others, strict=True)
        )


def cut() -> Any:
    return chain(TOKENS, CUTS, namespace())


def go_on(archive: Archive, geometry: KVGeometry, kv: MemoryKV, end: int) -> dict[str, int]:
    """Load what steps at `end` need, and find it there."""
    refs = tuple(ref for ref in archive.lookup([block.exact for block in cut()]) if ref.start < end)
    sink = Going(geometry, end)
    taken = archive.load(refs, TOKENS[:end], end, sink)
    assert sink.has(kv, end)
    return taken


def finite(geometry: KVGeometry) -> MemoryKV:
    kv = MemoryKV.random(geometry, LENGTH)
    for pair in kv.arrays:
        for array in pair:
            array[..., 1::2] &= 0x3F
    return kv


@pytest.mark.parametrize("geometry", [SLIDING, ALIKE], ids=["sliding", "alike"])
@pytest.mark.parametrize("tier", TIERS)
def test_one_can_go_on_at_every_cut(tmp_path: Path, geometry: KVGeometry, tier: str) -> None:
    kv = MemoryKV.random(geometry, LENGTH)
    with opened(tier, tmp_path) as archive:
        for first, last in [(0, 2), (2, 5)] if tier == "split" else [(0, 5)]:
            archive.put(kv, cut()[first:last], namespace())
            archive.flush()
        for end in CUTS:
            assert sum(go_on(archive, geometry, kv, end).values()) == end
        # inside a block that is no longer than what every layer keeps of one
        for end in (21, 24):
            go_on(archive, geometry, kv, end)
        with pytest.raises(ValueError, match="does not keep"):
            go_on(archive, geometry, kv, 40)


@pytest.mark.parametrize("tier", TIERS)
def test_encoded_ends_of_blocks(tmp_path: Path, tier: str) -> None:
    kv = finite(SLIDING)
    coding = Coding(ReferenceCodec(codec("int8")), SLIDING)
    with opened(tier, tmp_path, coding) as archive:
        archive.put(kv, cut(), namespace())
        archive.flush()
        for end in CUTS:
            refs = tuple(ref for ref in archive.lookup([block.exact for block in cut()]) if ref.start < end)
            sink = Going(SLIDING, end)
            archive.load(refs, TOKENS[:end], end, sink)
            for layer, (need, dims) in enumerate(zip(sink.needs, SLIDING.layers, strict=True)):
                for part, dim in enumerate((dims.key_dim, dims.value_dim)):
                    for block in (block for block in cut() if need < block.end <= end):
                        begin = SLIDING.stored.layers[layer].kept_from(block.start, block.end)
                        seen = encode(kv.read(layer, part, begin, block.end), codec("int8"), part, dim, "bfloat16")
                        assert np.array_equal(sink.read(layer, part, begin, block.end), seen.decode())


def test_a_store_has_the_bytes_that_the_geometry_says(tmp_path: Path) -> None:
    kv = MemoryKV.random(SLIDING, LENGTH)
    run = Run.copy_from(kv, stored_blocks(cut()), TOKENS, namespace().describe())
    rows = [sum(min(length, most) for length in LENGTHS) for most in (5, LENGTH, 20)]
    bytes_of = [2 * layer.elements() * count for layer, count in zip(SLIDING.layers, rows, strict=True)]
    assert run.data.nbytes == sum(bytes_of) == sum(SLIDING.stored.block_bytes(length) for length in LENGTHS)
    with opened("disk", tmp_path) as archive:
        archive.put(kv, cut(), namespace())
        archive.flush()
        (path,) = (tmp_path / "near" / "runs").iterdir()
    header = read_header(FileSource(os.open(path, os.O_RDONLY)))
    assert header.file_bytes - header.data_offset == run.data.nbytes
    assert header.geometry == SLIDING.stored
    assert {name: value.shape for name, value in load_file(path).items()} == {
        "tokens": (LENGTH,),
        **{
            f"{letter}.{layer:03d}": (shape.kv_heads, rows[layer], 2 * dim)
            for layer, shape in enumerate(SLIDING.layers)
            for letter, dim in (("k", shape.key_dim), ("v", shape.value_dim))
        },
    }


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    run = Run.copy_from(MemoryKV.random(SLIDING, LENGTH), stored_blocks(cut()), TOKENS, namespace().describe())
    path = tmp_path / "run"
    with path.open("wb") as file:
        write_run(file.fileno(), run, run.layers())
    content = path.read_bytes()
    with RunReader.open(path, run.id) as reader:
        reader.verify()
        assert np.array_equal(reader.read_run().data, run.data)
    for at in np.random.default_rng(1).integers(0, len(content), 60).tolist():
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        with pytest.raises((CorruptRun, StoreTooNew)), RunReader.open(path, run.id) as reader:
            reader.verify()


def test_compaction_parts_and_bundles(tmp_path: Path) -> None:
    kv = MemoryKV.random(SLIDING, LENGTH)
    with opened("disk", tmp_path) as archive:
        for last in range(1, len(LENGTHS) + 1):
            archive.put(kv, cut()[:last], namespace())
            archive.flush()
        archive.contents.name("it", cut()[-1].exact)
        archive.contents.export("it", tmp_path / "many")
        assert archive.compact() == len(LENGTHS)
        assert len(archive.contents.entries()) == 1
        archive.contents.export("it", tmp_path / "one")
        for end in CUTS:
            assert go_on(archive, SLIDING, kv, end) == {"disk": end}
    for name in ("many", "one"):
        with Archive.open(tmp_path / f"from {name}", max_ram=0, max_disk=CAP) as archive:
            archive.put(kv, cut()[:2], namespace())  # the rest is taken from the bundle
            archive.flush()
            archive.contents.import_(tmp_path / name)
            for end in CUTS:
                assert go_on(archive, SLIDING, kv, end) == {"disk": end}
    run = Run.copy_from(kv, stored_blocks(cut()), TOKENS, namespace().describe()).part(1, 4)
    again = Run.copy_from(kv, stored_blocks(cut()[1:4]), TOKENS[CUTS[0] : CUTS[3]], namespace().describe())
    assert np.array_equal(run.data, again.data)


def test_runs_of_earlier_versions_hold_whole_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = MemoryKV.random(SLIDING, LENGTH)
    with opened("disk", tmp_path) as archive:
        with monkeypatch.context() as earlier:
            earlier.setattr(KVGeometry, "stored", property(lambda geometry: geometry))
            archive.put(kv, cut()[:3], namespace())
            archive.flush()
        archive.put(kv, cut(), namespace())
        archive.flush()
        found = {
            path: read_header(FileSource(os.open(path, os.O_RDONLY))) for path in (tmp_path / "near/runs").iterdir()
        }
        assert {header.geometry for header in found.values()} == {SLIDING, SLIDING.stored}
        for end in (*CUTS, 15):
            go_on(archive, SLIDING, kv, end)
