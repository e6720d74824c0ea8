"""Encrypted stores: nothing readable on disk, nothing exchangeable, and no opening without the key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tests.helpers.archives import CAP, LENGTH, Prompt, only_run

from keepwarm.config import EngineConfig, store_key
from keepwarm.errors import ConfigError, CorruptRun, StoreLocked
from keepwarm.store import Archive
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.runfile.crypto import StoreKey, new_salt
from keepwarm.store.runfile.header import encode_header, file_bytes
from keepwarm.store.runfile.layout import Run
from keepwarm.store.runfile.reader import RunReader
from keepwarm.store.runfile.writer import write_run
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, make_run, prompt

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))


@pytest.fixture
def sealed(tmp_path: Path) -> Iterator[Archive]:
    with Archive.open(tmp_path / "store", max_ram=0, max_disk=CAP, key=KEY) as archive:
        yield archive


def written(folder: Path, seed: int = 0, key: bytes | None = KEY) -> tuple[Run, Path]:
    run = make_run(MemoryKV.random(UNEVEN, LENGTH, seed), blocks_of(prompt(LENGTH, seed)))
    path = folder / f"{run.id}.safetensors"
    with path.open("wb") as file:
        write_run(file.fileno(), run, run.layers(), StoreKey(key) if key else None)
    return run, path


def read(path: Path, run_id: str, key: bytes | None = KEY) -> Run:
    with RunReader.open(path, run_id, StoreKey(key) if key else None) as reader:
        return reader.read_run()


def test_an_encrypted_prompt_loads_equal_to_the_bit_and_in_parts(tmp_path: Path) -> None:
    one = Prompt()
    with Archive.open(tmp_path, max_ram=CAP, max_disk=CAP, key=KEY) as archive:
        one.put(archive, 0, 5)
        one.put(archive)
        archive.flush()
    with Archive.open(tmp_path, max_ram=CAP, max_disk=CAP, key=KEY) as archive:
        assert one.loads(archive) == {"disk": LENGTH}
        for end in range(1, LENGTH, 7):
            assert one.loads(archive, end=end) == {"disk": end}
        archive.promote(entry.id for entry in archive.contents.entries())
        archive.flush()
        assert one.loads(archive) == {"ram": LENGTH}


def test_neither_token_ids_nor_kv_are_in_the_folder(tmp_path: Path) -> None:
    one = Prompt()
    found: dict[bool, int] = {}
    for key in (None, KEY):
        folder = tmp_path / str(key is None)
        with Archive.open(folder, max_ram=0, max_disk=CAP, key=key) as archive:
            one.put(archive)
        everything = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
        pieces = [one.tokens[at : at + 4].tobytes() for at in range(0, LENGTH, 4)]
        pieces += [part[0, at].tobytes() for pair in one.kv.arrays for part in pair for at in range(0, LENGTH, 5)]
        found[key is None] = sum(piece in everything for piece in pieces)
        assert len(pieces) > 50
    assert found == {True: len(pieces), False: 0}


def test_an_encrypted_file_is_a_safetensors_file_of_the_planned_size(tmp_path: Path) -> None:
    run, path = written(tmp_path)
    assert path.stat().st_size == file_bytes(run, sealed=True)
    with safe_open(path, "numpy") as opened:
        assert set(opened.keys()) == {"tokens", "sealed.000", "sealed.001", "sealed.002"}
    again = read(path, run.id)
    assert np.array_equal(again.data, run.data)
    assert np.array_equal(again.tokens, run.tokens)
    assert again.blocks == run.blocks


def test_equal_runs_are_encrypted_differently_each_time(tmp_path: Path) -> None:
    run, path = written(tmp_path)
    head = len(encode_header(run)) + 4096
    first = path.read_bytes()
    with path.open("wb") as file:
        write_run(file.fileno(), run, run.layers(), StoreKey(KEY))
    same = sum(a == b for a, b in zip(first[head:], path.read_bytes()[head:], strict=True))
    assert same < 2 * (len(first) - head) / 256


@pytest.mark.parametrize("key", [None, OTHER])
def test_a_missing_or_other_key_is_refused_and_nothing_is_lost(tmp_path: Path, key: bytes | None) -> None:
    one = Prompt()
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP, key=KEY) as archive:
        one.put(archive)
    for damage in (False, True):  # a damaged catalogue must not make it forget that it is encrypted
        if damage:
            (tmp_path / "catalogue.sqlite").write_bytes(b"x" * 5000)
        with pytest.raises(StoreLocked, match="KEEPWARM_STORE_KEY"):
            Archive.open(tmp_path, max_ram=0, max_disk=CAP, key=key)
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP, key=KEY) as archive:
        assert one.loads(archive) == {"disk": LENGTH}


def test_an_unencrypted_store_is_not_opened_with_a_key(tmp_path: Path) -> None:
    one = Prompt()
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP) as archive:
        one.put(archive)
    for damage in (False, True):
        if damage:
            (tmp_path / "catalogue.sqlite").write_bytes(b"x" * 5000)
        with pytest.raises(StoreLocked, match=r"not encrypted"):
            Archive.open(tmp_path, max_ram=0, max_disk=CAP, key=KEY)
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP) as archive:
        assert one.loads(archive) == {"disk": LENGTH}


def test_a_lost_catalogue_is_made_again_from_encrypted_runs(tmp_path: Path) -> None:
    one = Prompt()
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP, key=KEY) as archive:
        one.put(archive)
    (tmp_path / "catalogue.sqlite").unlink()
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP, key=KEY) as archive:
        assert one.loads(archive) == {"disk": LENGTH}


def test_a_plain_file_in_an_encrypted_store_is_a_miss(tmp_path: Path, sealed: Archive) -> None:
    """Who can write to the folder but has no key cannot slip in KV of his own."""
    one = Prompt()
    one.put(sealed)
    sealed.flush()
    path = only_run(tmp_path / "store")
    run = read(path, path.stem)
    with path.open("wb") as file:
        write_run(file.fileno(), run, run.layers())
    with pytest.raises(CorruptRun, match="not encrypted"):
        one.loads(sealed)
    assert one.loads(sealed) == {}
    assert sealed.stats()["corrupt"] == 1


def swapped(path: Path, run: Run, layer: int, one: int, other: int) -> None:
    """Exchange two pieces of one layer, and their tags in the header, and mend the header's checksum."""
    import json

    import xxhash

    from keepwarm.core.identity import canonical_json
    from keepwarm.store.runfile.layout import Layout

    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    text = json.loads(raw[8 : 8 + length])
    meta = text["__metadata__"]
    tags = [meta["checksums"][at : at + 32] for at in range(0, len(meta["checksums"]), 32)]
    a, b = layer * len(run.blocks) + one, layer * len(run.blocks) + other
    tags[a], tags[b] = tags[b], tags[a]
    meta["checksums"] = "".join(tags)
    layout = Layout.of(run)
    width, base = layout.token_bytes(layer), 8 + length + 4 * LENGTH + layout.offset(layer, 0)
    size = 8 * width
    p, q = base + one * size, base + other * size
    raw[p : p + size], raw[q : q + size] = raw[q : q + size], raw[p : p + size]
    meta.pop("header_xxh3")
    hasher = xxhash.xxh3_128(canonical_json(meta).encode())
    hasher.update(bytes(raw[8 + length : 8 + length + 4 * LENGTH]))
    meta["header_xxh3"] = hasher.hexdigest()
    mended = json.dumps(text, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
    path.write_bytes(raw[:8] + mended + raw[8 + length :])


def test_swapped_pieces_are_noticed_even_with_a_mended_checksum(tmp_path: Path) -> None:
    run, path = written(tmp_path)
    swapped(path, run, 1, 2, 5)
    with pytest.raises(CorruptRun, match="authentication tag"):
        read(path, run.id)
    swapped(path, run, 1, 2, 5)
    assert np.array_equal(read(path, run.id).data, run.data)


def test_a_piece_opens_in_its_own_place_only() -> None:
    cipher = StoreKey(KEY).cipher("a" * 32, new_salt())
    sealed = cipher.seal(1, 2, 16, b"plain")
    assert cipher.open(1, 2, 16, sealed) == b"plain"
    for place in ((0, 2, 16), (1, 1, 16), (1, 2, 17)):
        with pytest.raises(CorruptRun):
            cipher.open(*place, sealed)
    salt = new_salt()
    for run_id, other in (("b" * 32, salt), ("a" * 32, new_salt())):
        with pytest.raises(CorruptRun):
            StoreKey(KEY).cipher(run_id, other).open(
                1, 2, 16, StoreKey(KEY).cipher("a" * 32, salt).seal(1, 2, 16, b"x")
            )


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_change_of_an_encrypted_file_is_noticed(tmp_path: Path, data: st.DataObject) -> None:
    run, path = written(tmp_path)
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    bad = [good[:at], good + good[: at + 1], good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :]]
    path.write_bytes(data.draw(st.sampled_from(bad)))
    with pytest.raises((CorruptRun, StoreLocked)):
        read(path, run.id)


def test_disk_tier_keeps_its_promises_encrypted(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path, CAP, key=StoreKey(KEY))
    run = make_run(MemoryKV.random(UNEVEN, LENGTH), blocks_of(prompt(LENGTH)))
    assert tier.put(run)
    assert tier.index.runs()[0].nbytes == tier.files.path(run.id).stat().st_size
    assert np.array_equal(tier.files.read_run(run.id).data, run.data)
    tier.close()


@pytest.mark.parametrize("form", ["raw", "hex", "base64", "lines"])
def test_a_key_comes_from_a_file_or_the_environment(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import base64

    forms = {
        "raw": KEY,
        "hex": KEY.hex().encode(),
        "base64": base64.b64encode(KEY),
        "lines": KEY.hex().encode() + b"\n",
    }
    file = tmp_path / "key"
    file.write_bytes(forms[form])
    assert store_key(EngineConfig.build(store_key_file=str(file)).store_key_file) == KEY
    assert store_key() is None
    if form != "raw":
        monkeypatch.setenv("KEEPWARM_STORE_KEY", forms[form].decode())
        assert store_key() == KEY
        file.write_text(OTHER.hex())
        assert store_key(file) == OTHER  # what is named goes before what surrounds


@pytest.mark.parametrize("text", ["", "short", "x" * 64, "00" * 31, "00" * 33, "5a" * 17 + "c3" * 16])
def test_what_is_no_key_is_refused_without_repeating_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"openssl rand -hex 32") as refused:
        store_key(file)
    assert not text or text not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        store_key(tmp_path / "none")
