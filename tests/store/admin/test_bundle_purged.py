"""Exports and imports that are under way when everything is purged leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.archives import CAP
from tests.helpers.bundles import made, store
from tests.helpers.states import stored

from keepwarm.core.identity import salt_key
from keepwarm.errors import PurgedMeanwhile
from keepwarm.store import Archive
from keepwarm.store.admin import bundle
from keepwarm.toolsets import Registry
from keepwarm.toolsets.carried import note_of, register_carried

Between = Callable[[str, Callable[[], object]], None]


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Between:
    """Has something happen after a step of the work was done."""

    def arrange(step: str, happens: Callable[[], object]) -> None:
        real = getattr(bundle, step)

        def then(*given: Any, **more: Any) -> Any:
            done = real(*given, **more)
            happens()
            return done

        monkeypatch.setattr(bundle, step, then)

    return arrange


def purge_elsewhere(folder: Path) -> None:
    with Archive.open(folder, max_ram=0, max_disk=CAP) as archive:
        archive.purge_all()


def purge_another(folder: Path) -> None:
    with Archive.open(folder, max_ram=0, max_disk=CAP) as archive:
        archive.purge(salt_key("theirs"))


def test_an_export_ends_without_a_file(tmp_path: Path, between: Between) -> None:
    made(tmp_path / "store", tmp_path / "first.bundle")
    with store(tmp_path / "store") as archive:
        between("write_run", lambda: purge_elsewhere(tmp_path / "store"))
        with pytest.raises(PurgedMeanwhile):
            archive.contents.export("support bot", tmp_path / "second.bundle")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["first.bundle"]


def test_a_purge_of_somebody_else_stops_no_export(tmp_path: Path, between: Between) -> None:
    made(tmp_path / "store", tmp_path / "first.bundle")
    with store(tmp_path / "store") as archive:
        between("write_run", lambda: purge_another(tmp_path / "store"))
        archive.contents.export("support bot", tmp_path / "second.bundle")
    assert (tmp_path / "second.bundle").exists()


@pytest.mark.parametrize("step", ["_states", "_check_model", "keep"])
def test_an_import_stores_nothing(tmp_path: Path, between: Between, step: str) -> None:
    made(tmp_path / "from", tmp_path / "file.bundle")
    with store(tmp_path / "to") as archive:
        between(step, lambda: purge_elsewhere(tmp_path / "to"))
        with pytest.raises(PurgedMeanwhile):
            archive.contents.import_(tmp_path / "file.bundle")
        assert archive.contents.names() == {}
        assert archive.contents.entries() == []
        assert list((tmp_path / "to" / "runs").iterdir()) == []


@pytest.mark.parametrize("step", ["_states", "keep"])
def test_nor_does_one_with_snapshots(tmp_path: Path, between: Between, step: str) -> None:
    with store(tmp_path / "from") as archive:
        archive.contents.name("bot", stored(archive, states=(2, 7)).ids[7])
        assert archive.contents.export("bot", tmp_path / "file.bundle").snapshots == 2
    with store(tmp_path / "to") as archive:
        between(step, lambda: purge_elsewhere(tmp_path / "to"))
        with pytest.raises(PurgedMeanwhile):
            archive.contents.import_(tmp_path / "file.bundle")
        assert archive.contents.names() == {}
        assert archive.contents.entries() == []


def test_a_set_that_comes_with_a_bundle(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "from")
    registry.register([{"name": "a", "description": "b"}], name="set")
    with store(tmp_path / "to") as archive:
        epoch = archive.epoch()
        purge_elsewhere(tmp_path / "to")
        there = Registry(tmp_path / "to", epochs=archive.epochs)
        with pytest.raises(PurgedMeanwhile):
            register_carried(there, note_of(registry, "set"), epoch)
        assert there.names() == ()
