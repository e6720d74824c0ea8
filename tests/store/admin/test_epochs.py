"""The epoch that purges count up: what began before is refused, in every process, and a purge that broke off waits."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from keepwarm.errors import PurgedMeanwhile, StoreError, StoreNotWritable
from keepwarm.store.admin.purge_epochs import COUNTER, EVERYTHING, PURGES, Epochs, is_under

MINE, THEIRS = b"m" * 32, b"t" * 32


@pytest.fixture(params=["folder", "memory"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Epochs, Epochs]:
    """As two processes have it; in memory one alone does."""
    if request.param == "memory":
        alone = Epochs(None)
        return alone, alone
    return Epochs(tmp_path), Epochs(tmp_path)


def test_what_began_before_a_purge_or_within_is_refused(pair: tuple[Epochs, Epochs]) -> None:
    one, other = pair
    before = one.now()
    with other.purging({MINE}) as tags:
        assert tags == {MINE}
        within = one.now()
        assert one.pending() == {MINE}
        assert one.since(before) == {MINE}
        assert not one.allows(within, {MINE})
        with pytest.raises(PurgedMeanwhile):
            one.check(before, [THEIRS, MINE])
    after = one.now()
    assert before < within < after
    assert [one.allows(epoch, {MINE}) for epoch in (before, within, after)] == [False, False, True]
    assert all(one.allows(epoch, tags) for epoch in (before, within, after) for tags in ((), (THEIRS,)))
    assert not one.allows(within, [b""]), "of whom nobody knows"
    assert one.allows(after, [b""])
    assert one.pending() == frozenset()
    assert one.since(after) == frozenset()
    with other.purging({EVERYTHING}):
        pass
    assert not one.allows(after, ())
    assert one.allows(one.now(), {MINE})


def test_asking_is_a_look_at_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Epochs(tmp_path), Epochs(tmp_path)
    for name in ("stat", "pread", "open", "fstat"):
        monkeypatch.setattr(f"os.{name}", lambda *_, **__: pytest.fail("it may hang"))
    epoch = one.now()
    assert not one.is_news
    monkeypatch.undo()
    with other.purging({MINE}):
        assert one.is_news
        assert one.now() > epoch
        assert not one.is_news


def test_a_purge_that_broke_off_is_pending_until_somebody_finishes_it(pair: tuple[Epochs, Epochs]) -> None:
    one, other = pair

    def break_off() -> None:
        with one.purging({MINE}):
            raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"):
        break_off()
    assert other.pending() == {MINE}
    assert not other.allows(other.now(), {MINE})
    with other.purging({THEIRS}) as tags:
        assert tags == {THEIRS}, "who follows another replica finishes nothing"
    assert other.pending() == {MINE}
    with other.purging((), finish=True) as tags:
        assert tags == {MINE}
    assert one.pending() == frozenset()
    assert one.allows(one.now(), {MINE})


def test_one_purges_at_a_time_and_a_dead_process_holds_up_nobody(tmp_path: Path) -> None:
    one, other = Epochs(tmp_path), Epochs(tmp_path)

    def purge_too() -> None:
        with other.purging({THEIRS}, wait=False):
            pass

    with one.purging({MINE}), pytest.raises(StoreError, match="under way"):
        purge_too()
    code = f"""
import os
from pathlib import Path
from keepwarm.store.admin.purge_epochs import Epochs
with Epochs(Path({str(tmp_path)!r})).purging({{{MINE!r}}}):
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert one.pending() == {MINE}
    with one.purging((), finish=True, wait=False) as tags:
        assert tags == {MINE}
    assert other.pending() == frozenset()


def remove(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def damage(folder: Path) -> None:
    (folder / PURGES).write_bytes((folder / PURGES).read_bytes().replace(b'"epoch": 1', b'"epoch": 9'))


def remove_number(folder: Path) -> None:
    (folder / COUNTER).unlink()


@pytest.mark.parametrize("harm", [remove, damage, remove_number])
def test_files_that_somebody_harmed_are_made_again(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    one = Epochs(tmp_path / "store") if (tmp_path / "store").mkdir() is None else None
    assert one is not None
    with one.purging({MINE}):
        pass
    before, folder = one.now(), tmp_path / "store"
    harm(folder)
    new = Epochs(folder)
    assert new.allows(new.now(), {MINE})
    with new.purging({MINE}):
        pass
    with pytest.raises(PurgedMeanwhile):
        one.check(before, {MINE})
    assert not one.allows(before, {MINE})
    assert one.allows(one.now(), {MINE}), "both read what there is"
    if harm is damage:
        assert not one.allows(before, ()), "what was purged before is not known any more"


def test_a_closed_one_allows_nothing_and_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    one = Epochs(tmp_path)
    epoch = one.now()
    one.close()
    assert one.now() == epoch
    assert not one.allows(epoch, ())
    (tmp_path / "file").touch()
    with pytest.raises(StoreNotWritable, match="cannot be read or made"):
        Epochs(tmp_path / "file")


def test_what_another_process_says_of_when_it_began(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    one, same, other, alone = (Epochs(folder) for folder in (tmp_path / "a", tmp_path / "a", tmp_path / "b", None))
    began = one.began(one.now())
    with other.purging({MINE}):
        pass
    for epochs in (one, same):
        assert epochs.of(began) == began.epoch
    for epochs in (other, alone):
        assert epochs.of(began) == epochs.now(), "each store counts by itself"
    assert alone.of(alone.began(1)) == 1


def test_what_goes_with_what() -> None:
    assert is_under({MINE, THEIRS}, {MINE})
    assert not is_under({THEIRS}, {MINE})
    assert not is_under((), {MINE})
    assert is_under((), {EVERYTHING})
    assert is_under({b""}, {MINE}), "of whom nobody knows"
    assert not is_under({b""}, ())
