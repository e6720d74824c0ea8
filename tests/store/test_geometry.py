"""KV of another form than the model's is never given to it, whatever tier it lies in and whatever its checksums say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.archives import CAP
from tests.helpers.remote_archives import PATIENT

from keepwarm.core.geometry import KVGeometry
from keepwarm.errors import CorruptRun
from keepwarm.store import Archive
from keepwarm.store.runfile.header import read_header
from keepwarm.store.runfile.layout import check_geometry
from keepwarm.store.runfile.source import FileSource
from keepwarm.store.runfile.writer import write_run
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, make_run, namespace, prompt

LENGTH = 48
TOKENS = prompt(LENGTH)
BLOCKS = blocks_of(TOKENS)
FIRST, *_, LAST = UNEVEN.layers
OTHERS = {
    "fewer layers": KVGeometry(UNEVEN.layers[:-1], "bfloat16"),
    "more layers": KVGeometry((*UNEVEN.layers, LAST), "bfloat16"),
    "fewer heads": KVGeometry((replace(FIRST, kv_heads=1), *UNEVEN.layers[1:]), "bfloat16"),
    "narrower keys": KVGeometry((replace(FIRST, key_dim=4), *UNEVEN.layers[1:]), "bfloat16"),
    "wider values": KVGeometry((*UNEVEN.layers[:-1], replace(LAST, value_dim=16)), "bfloat16"),
    "another dtype": KVGeometry(UNEVEN.layers, "float16"),
}


def opened(tier: str, folder: Path) -> Archive:
    remotes = [f"file://{folder / 'far'}"] if tier == "remote" else []
    path = None if tier in ("ram", "remote") else folder / "near"
    ram = CAP if tier == "ram" else 0
    return Archive.open(path, max_ram=ram, max_disk=CAP, map_files=tier == "mapped", remotes=remotes, limits=PATIENT)


@pytest.mark.parametrize("tier", ["ram", "disk", "mapped", "remote"])
@pytest.mark.parametrize("other", OTHERS)
def test_a_run_of_another_form_is_refused_and_not_found_again(tmp_path: Path, tier: str, other: str) -> None:
    with opened(tier, tmp_path) as archive:
        archive.put(MemoryKV.random(OTHERS[other], LENGTH), BLOCKS, namespace())
        archive.flush()
        ids = [block.exact for block in BLOCKS]
        refs = archive.lookup(ids)
        assert [ref.id for ref in refs] == ids
        sink = MemoryKV(UNEVEN, LENGTH)
        with pytest.raises(CorruptRun, match="KV"):
            archive.load(refs, TOKENS, LENGTH, sink)
        assert not sink.commits
        assert not any(part.any() for pair in sink.arrays for part in pair)
        assert archive.lookup(ids) == ()
        assert archive.stats()["corrupt"] == 1
        mine = MemoryKV.random(UNEVEN, LENGTH)
        archive.put(mine, BLOCKS, namespace())
        archive.flush()
        archive.load(archive.lookup(ids), TOKENS, LENGTH, sink)
        assert sink.same(mine, 0, LENGTH)


def test_a_window_is_no_other_form() -> None:
    """Bytes lie alike; which positions a layer attends to is the model's affair."""
    check_geometry(KVGeometry((replace(FIRST, window=8), *UNEVEN.layers[1:]), "bfloat16"), UNEVEN)


@pytest.mark.parametrize("layers", [(replace(FIRST, kv_heads=0),), (replace(FIRST, key_dim=-8),)])
def test_a_file_without_kv_is_no_run(tmp_path: Path, layers: tuple[object, ...]) -> None:
    geometry = KVGeometry(layers, "bfloat16")  # type: ignore[arg-type]
    run = replace(make_run(MemoryKV.random(UNEVEN, LENGTH), BLOCKS), geometry=geometry, data=np.empty(0, np.uint8))
    with (tmp_path / "run").open("w+b") as file:
        write_run(file.fileno(), run, [])
        with pytest.raises(CorruptRun, match="layer"):
            read_header(FileSource(file.fileno()))
