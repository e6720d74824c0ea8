"""Encoded KV through every part of the store: it comes back as the codec, and nothing else, left it."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from keepwarm.core.blocks import chain
from keepwarm.core.codecs import ReferenceCodec, codec, encode, narrow
from keepwarm.core.geometry import KVGeometry, LayerGeometry
from keepwarm.errors import CorruptRun
from keepwarm.store import Archive
from keepwarm.store.runfile.codec import Coding, bytes_of, coded_geometry, coded_runs
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, make_run, namespace, prompt

CAP = 1 << 24
LENGTHS = (100, 64, 5, 130, 70)
TOTAL = sum(LENGTHS)
NAMES = ("int8", "int4", "fp8")


class Coded:
    """A prompt of uneven blocks, its KV, and what a codec leaves of it."""

    def __init__(self, name: str) -> None:
        self.coding = Coding(ReferenceCodec(codec(name)), UNEVEN)
        self.tokens = prompt(TOTAL)
        self.blocks = chain(self.tokens, list(accumulate(LENGTHS)), namespace())
        self.ids = [block.exact for block in self.blocks]
        self.kv, self.left = MemoryKV(UNEVEN, TOTAL), MemoryKV(UNEVEN, TOTAL)
        rng = np.random.default_rng(0)
        for layer, shape in enumerate(UNEVEN.layers):
            for kv, dim in enumerate((shape.key_dim, shape.value_dim)):
                values = rng.normal(0, 2, (shape.kv_heads, TOTAL, dim)).astype(np.float32)
                self.kv.view(layer, kv, 0, TOTAL)[...] = narrow(values, "bfloat16")
                for block in self.blocks:
                    raw = self.kv.read(layer, kv, block.start, block.end)
                    seen = encode(raw, codec(name), kv, dim, "bfloat16").decode()
                    self.left.view(layer, kv, block.start, block.end)[...] = seen

    def open(self, folder: Path | None, key: bytes | None = None) -> Archive:
        return Archive.open(folder, max_ram=CAP, max_disk=CAP, key=key, coding=self.coding)

    def loads(self, archive: Archive, end: int = TOTAL) -> dict[str, int]:
        refs = tuple(ref for ref in archive.lookup(self.ids) if ref.start < end)
        sink = MemoryKV(UNEVEN, TOTAL)
        taken = archive.load(refs, self.tokens[:end], end, sink)
        assert sink.same(self.left, 0, end)
        assert not any(array[:, end:].any() for pair in sink.arrays for array in pair)
        assert [layer for layer, start, _ in sink.commits if start == 0] == [0, 1, 2]
        return taken


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", [None, bytes(range(32))])
def test_through_ram_and_disk(tmp_path: Path, name: str, key: bytes | None) -> None:
    one = Coded(name)
    with one.open(tmp_path, key) as archive:
        archive.put(one.kv, one.blocks, namespace())
        archive.flush()
        assert one.loads(archive) == {"ram": TOTAL}
        assert one.loads(archive, 33) == {"ram": 33}
    with one.open(tmp_path, key) as archive:
        for end in (TOTAL, TOTAL - 1, 164, 165, 120, 1):
            assert one.loads(archive, end) == {"disk": end}
        archive.promote(ref.run_id for ref in archive.lookup(one.ids))
        archive.flush()
        assert one.loads(archive) == {"ram": TOTAL}


def test_blocks_that_would_waste_space_get_runs_of_their_own(tmp_path: Path) -> None:
    one = Coded("int4")
    with one.open(tmp_path) as archive:
        archive.put(one.kv, one.blocks, namespace())
        archive.flush()
        runs = sorted(archive.contents.entries(), key=lambda entry: entry.start)
        assert 1 < len(runs) <= len(LENGTHS)
        assert sum(run.tokens for run in runs) == TOTAL
        held = archive.stats()["bytes"]["ram"]
        assert held <= bytes_of(UNEVEN, one.coding, make_run(one.kv, one.blocks).blocks) + 4 * TOTAL


def test_compaction_and_bundles_carry_what_is_encoded(tmp_path: Path) -> None:
    one = Coded("int8")
    with one.open(tmp_path / "a") as archive:
        for number in range(len(LENGTHS)):
            archive.put(one.kv, one.blocks[number : number + 1], namespace())
            archive.flush()
        archive.compact()
        archive.clear_ram()
        assert one.loads(archive) == {"disk": TOTAL}
        archive.contents.name("mine", one.ids[-1])
        archive.contents.export("mine", tmp_path / "bundle")
    with one.open(tmp_path / "b") as archive:
        archive.contents.import_(tmp_path / "bundle")
        assert sum(one.loads(archive).values()) == TOTAL


def test_a_codec_refuses_what_another_one_wrote(tmp_path: Path) -> None:
    one, other = Coded("int8"), Coded("int4")
    with one.open(tmp_path) as archive:
        archive.put(one.kv, one.blocks, namespace())
    for coding in (other.coding, Coding(one.coding.codec, KVGeometry(UNEVEN.layers, "float16")), None):
        with Archive.open(tmp_path, max_ram=0, max_disk=CAP, coding=coding) as archive:
            refs = archive.lookup(one.ids)
            if refs:
                with pytest.raises(CorruptRun):
                    archive.load(refs, one.tokens[: refs[-1].end], refs[-1].end, MemoryKV(UNEVEN, TOTAL))


def test_a_flipped_bit_is_found_before_anything_is_decoded(tmp_path: Path) -> None:
    one = Coded("int4")
    with one.open(tmp_path) as archive:
        archive.put(one.kv, one.blocks[:1], namespace())
    (file,) = (tmp_path / "runs").iterdir()
    data = bytearray(file.read_bytes())
    data[-40] ^= 1
    file.write_bytes(data)
    with one.open(tmp_path) as archive, pytest.raises(CorruptRun):
        archive.load(archive.lookup(one.ids[:1]), one.tokens[:100], 100, MemoryKV(UNEVEN, TOTAL))


def test_numbers_that_are_not_finite_are_not_stored() -> None:
    one = Coded("int4")
    one.kv.view(1, 1, 3, 4)[0, 0, :2] = 0x80, 0x7F
    with one.open(None) as archive:
        archive.put(one.kv, one.blocks, namespace())
        archive.flush()
        assert archive.lookup(one.ids) == ()
        assert archive.stats()["store_errors"] == 1


def test_rows_of_one_run_fit_its_neediest_block() -> None:
    geometry = KVGeometry((LayerGeometry(1, 64, 64),), "bfloat16")
    assert coded_geometry(geometry, codec("int4"), [128]).bytes_per_token == 72
    assert coded_geometry(geometry, codec("int4"), [128, 3]).bytes_per_token == 256
    assert coded_geometry(geometry, codec("int4"), [128]).itemsize == 1
    source = MemoryKV(geometry, 128)
    tokens = prompt(128)
    (run,) = coded_runs(make_run(source, blocks_of(tokens, 64)), ReferenceCodec(codec("int4")))
    assert run.nbytes == 128 * (72 + 4)
