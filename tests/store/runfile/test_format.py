"""Run files: valid safetensors, and nothing in them left unchecked."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from keepwarm.core.blocks import derived_id
from keepwarm.errors import CorruptRun, StoreTooNew
from keepwarm.store.runfile import header as run_header
from keepwarm.store.runfile.header import KnownHeaders, encode_header, file_bytes, read_header
from keepwarm.store.runfile.layout import Run, stored_blocks
from keepwarm.store.runfile.reader import RunReader
from keepwarm.store.runfile.source import FileSource
from keepwarm.store.runfile.writer import write_run
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, make_run, prompt

LENGTH = 24


def written(folder: Path, seed: int = 0) -> tuple[Run, Path]:
    run = make_run(MemoryKV.random(UNEVEN, LENGTH, seed), blocks_of(prompt(LENGTH, seed)))
    path = folder / f"{run.id}.safetensors"
    with path.open("wb") as file:
        write_run(file.fileno(), run, run.layers())
    return run, path


def read(path: Path, run_id: str, known: KnownHeaders | None = None) -> Run:
    with RunReader.open(path, run_id, known=known) as reader:
        return reader.read_run()


def test_a_run_file_is_a_safetensors_file(tmp_path: Path) -> None:
    run, path = written(tmp_path)
    tensors = load_file(path)
    assert np.array_equal(tensors["tokens"], run.tokens)
    assert set(tensors) == {"tokens", "k.000", "v.000", "k.001", "v.001", "k.002", "v.002"}
    for layer in range(3):
        for kv, letter in enumerate("kv"):
            assert np.array_equal(tensors[f"{letter}.{layer:03d}"], run.view(layer, kv, 0, LENGTH))
    with safe_open(path, "numpy") as opened:
        meta = opened.metadata()
    assert json.loads(meta["geometry"]) == UNEVEN.describe()
    assert [row["exact"] for row in json.loads(meta["blocks"])] == [block.id.hex() for block in run.blocks]
    assert json.loads(meta["namespace"]) == run.namespace


def test_the_payload_is_aligned_and_the_size_known_beforehand(tmp_path: Path) -> None:
    run, path = written(tmp_path)
    assert len(encode_header(run)) % 4096 == 0
    assert path.stat().st_size == file_bytes(run)


def test_reading_gives_back_what_was_written(tmp_path: Path) -> None:
    run, path = written(tmp_path)
    again = read(path, run.id)
    assert again.blocks == run.blocks
    assert again.geometry == run.geometry
    assert again.namespace == run.namespace
    assert np.array_equal(again.data, run.data)


def test_blocks_with_other_ids_are_linked_by_them() -> None:
    blocks = blocks_of(prompt(LENGTH))
    ids = [derived_id(b"above".ljust(32), blocks[0])]
    ids += [derived_id(ids[0], blocks[1]), b"x" * 32]
    records = stored_blocks(blocks, ids, parent=b"above".ljust(32))
    assert [record.id for record in records] == ids
    assert [record.parent for record in records] == [b"above".ljust(32), ids[0], ids[1]]
    assert stored_blocks(blocks)[0].parent == blocks[0].parent_exact
    with pytest.raises(ValueError, match="3 blocks"):
        stored_blocks(blocks, ids[:1])
    with pytest.raises(ValueError, match="does not continue"):
        stored_blocks([blocks[0], blocks[2]])


def test_a_newer_format_is_told_from_a_damaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(run_header, "_version_of", lambda blocks: run_header.FORMAT + 1)
        run, path = written(tmp_path)
    with pytest.raises(StoreTooNew, match="format 5"):
        read(path, run.id)
    path.write_bytes(path.read_bytes().replace(b'"keepwarm_format":"5"', b'"keepwarm_format":"6"'))
    with pytest.raises(CorruptRun):
        read(path, run.id)


def test_every_bit_counts(tmp_path: Path) -> None:
    """Any single flipped bit makes the file unreadable: every 7th byte of the header's text, its length, its padding,
    and random places everywhere."""
    run, path = written(tmp_path)
    good = path.read_bytes()
    text = len(good[8:].split(b"   ")[0])
    generator = np.random.default_rng(0)
    places = [*range(8), *range(8, 8 + text, 7), *generator.integers(8 + text, len(good), 150).tolist()]
    for place in places:
        flipped = bytearray(good)
        flipped[place] ^= 1 << int(generator.integers(8))
        path.write_bytes(flipped)
        with pytest.raises(CorruptRun):
            read(path, run.id)
    path.write_bytes(good)
    read(path, run.id)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_file_of_another_length_or_content_is_corrupt(tmp_path: Path, data: st.DataObject) -> None:
    run, path = written(tmp_path)
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    bad = data.draw(
        st.sampled_from([
            good[:at],  # truncated
            good + good[: at + 1],  # longer
            good[:at] + bytes(1) + good[at:],  # shifted
            good[:at] + bytes([good[at] ^ 255]) + good[at + 1 :],
        ])
    )
    known = KnownHeaders(1 << 20)
    read(path, run.id, known)
    path.write_bytes(bad)
    for before in (None, known):  # also when the file was read before it was damaged
        with pytest.raises(CorruptRun):
            read(path, run.id, before)


def test_a_header_that_was_read_before_is_not_read_into_again(tmp_path: Path) -> None:
    run, path = written(tmp_path)
    known = KnownHeaders(1 << 20)
    headers = []
    for _ in range(2):
        with RunReader.open(path, run.id, known=known) as reader:
            headers.append(reader.header)
    assert headers[0] is headers[1]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300), st.booleans())
def test_no_bytes_make_the_reader_fail_otherwise(tmp_path: Path, text: bytes, framed: bool) -> None:
    path = tmp_path / "any"
    if framed:
        text = text.ljust(4088)
        text = len(text).to_bytes(8, "little") + text
    path.write_bytes(text)
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(CorruptRun):
            read_header(FileSource(fd))
    finally:
        os.close(fd)


def test_another_runs_file_is_corrupt(tmp_path: Path) -> None:
    run, path = written(tmp_path, 0)
    _, other = written(tmp_path, 1)
    other.rename(path)
    with pytest.raises(CorruptRun, match="holds run"):
        read(path, run.id)
