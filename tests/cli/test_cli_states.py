"""Commands over a store that holds snapshots of recurrent state beside KV."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.archives import CAP
from tests.helpers.cli import Cli
from tests.helpers.states import STATE, stored

from keepwarm.store import Archive


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A prompt of 64 tokens in two runs, named "bot", with two snapshots."""
    with Archive.open(tmp_path / "store", max_ram=0, max_disk=CAP) as archive:
        one = stored(archive, states=(2, 7))
        archive.contents.name("bot", one.ids[7])
    return tmp_path / "store"


def test_ls_tells_states_from_kv(cli: Cli, store: Path) -> None:
    listed = cli("ls", "--store", store, "--json").json
    kinds = sorted((entry["kind"], entry["start"], entry["tokens"]) for entry in listed["entries"])
    assert kinds == [("kv", 0, 24), ("kv", 24, 40), ("snapshot", 23, 1), ("snapshot", 63, 1)]
    assert listed["snapshots"] == 2
    assert listed["snapshot_bytes"] + listed["kv_bytes"] == sum(entry["bytes"] for entry in listed["entries"])
    shown = cli("ls", "--store", store)
    assert [line.split()[2] for line in shown.out.splitlines()[1:]].count("snapshot") == 2
    assert "2 snapshots of 9.3" in shown.err
    assert "of KV" in shown.err


def test_show_says_that_it_is_a_snapshot(cli: Cli, store: Path) -> None:
    entries = cli("ls", "--store", store, "--json").json["entries"]
    state = next(entry for entry in entries if entry["kind"] == "snapshot")
    found = cli("show", state["id"], "--store", store, "--json").json
    assert found["kind"] == "snapshot"
    assert f"2 layers, {STATE.bytes_per_token:,} bytes in all" in cli("show", state["id"], "--store", store).out


def test_stats_tells_how_many_there_are(cli: Cli, store: Path) -> None:
    found = cli("stats", "--store", store, "--json").json["stored"]
    assert (found["runs"], found["snapshots"]) == (4, 2)
    assert "2 snapshots of" in cli("stats", "--store", store).out


def test_a_store_without_snapshots_speaks_of_none(cli: Cli, tmp_path: Path) -> None:
    with Archive.open(tmp_path / "plain", max_ram=0, max_disk=CAP) as archive:
        stored(archive, states=())
    assert "snapshots of" not in cli("ls", "--store", tmp_path / "plain").err
    assert "snapshots of" not in cli("stats", "--store", tmp_path / "plain").out


def test_export_and_import_say_what_went_along(cli: Cli, store: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bot.bundle"
    assert "64 tokens, 2 snapshots," in cli("export", "bot", bundle, "--store", store).out
    assert "with 2 snapshots of recurrent state" in cli("import", bundle, "--store", tmp_path / "to").out
    assert cli("ls", "--store", tmp_path / "to", "--json").json["snapshots"] == 2
    assert cli("verify", "--store", tmp_path / "to").code == 0
