"""`keepwarm ls` and `keepwarm show` over a real store that holds made-up KV."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from tests.helpers.cli import Cli

from keepwarm.store import Archive
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, namespace, prompt


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with two prompts: 40 tokens named "schemas", and 24 without a name."""
    folder = tmp_path / "store"
    with Archive.open(folder, max_ram=0, max_disk=1 << 24) as archive:
        for seed, length in ((1, 40), (2, 24)):
            blocks = blocks_of(prompt(length, seed))
            archive.put(MemoryKV.random(UNEVEN, length, seed), blocks, namespace())
            if seed == 1:
                archive.contents.name("schemas", blocks[-1].exact)
        archive.flush()
    return folder


def test_ls_lists_runs_with_their_sizes(cli: Cli, store: Path) -> None:
    listed = cli("ls", "--store", store, "--json")
    assert listed.code == 0
    entries = listed.json["entries"]
    assert {(entry["tokens"], entry["name"], entry["tier"]) for entry in entries} == {
        (40, "schemas", "disk"),
        (24, "", "disk"),
    }
    assert all(entry["bytes"] > entry["tokens"] * UNEVEN.bytes_per_token for entry in entries)
    assert listed.json["size_on_disk"] >= sum(entry["bytes"] for entry in entries)
    lines = cli("ls", "--store", store).out.splitlines()
    assert lines[0].split()[:5] == ["id", "name", "kind", "start", "tokens"]
    assert len(lines) == 3


def test_show_takes_a_name_or_the_first_digits_of_an_id(cli: Cli, store: Path) -> None:
    by_name = cli("show", "schemas", "--store", store, "--json").json
    by_id = cli("show", by_name["id"][:12], "--store", store, "--json").json
    assert by_name == by_id
    assert by_name["tokens"] == 40
    assert by_name["token_ids"] == prompt(40, 1).tolist()
    text = cli("show", "schemas", "--store", store).out
    assert "3 layers" in text
    assert "40 of them" in text, "40 token ids are counted, not printed"
    assert text.count("\n") < 50


def test_show_of_nothing_is_a_store_error(cli: Cli, store: Path) -> None:
    result = cli("show", "nothing", "--store", store, "--json")
    assert result.code == 4
    assert "nothing" in result.err
    assert not result.out


def test_looking_makes_no_store(cli: Cli, tmp_path: Path) -> None:
    for command in (("ls",), ("show", "abcd")):
        result = cli(*command, "--store", tmp_path / "none")
        assert result.code == 4
        assert str(tmp_path / "none") in result.err
    assert not (tmp_path / "none").exists()


def test_empty_store(cli: Cli, tmp_path: Path) -> None:
    Archive.open(tmp_path / "store", max_ram=0, max_disk=1 << 24).close()
    assert cli("ls", "--store", tmp_path / "store", "--json").json["entries"] == []
    assert cli("ls", "--store", tmp_path / "store").out.startswith("id  name  kind  start  tokens")


def test_default_store_is_in_the_cache_folder(cli: Cli, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.name == "store"
    monkeypatch.setenv("KEEPWARM_CACHE", str(store.parent))
    assert len(cli("ls", "--json").json["entries"]) == 2


def test_newer_store_is_refused(cli: Cli, store: Path) -> None:
    with sqlite3.connect(store / "catalogue.sqlite") as db:
        db.execute("PRAGMA user_version = 999")
    db.close()
    result = cli("ls", "--store", store)
    assert result.code == 4
    assert "newer" in result.err
