"""Real faults of the machine under an open store: no lookup, load or put raises, and the store heals when they end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.helpers.archives import CAP, LENGTH, Prompt, only_run

from keepwarm.errors import CorruptRun, StoreError, StoreFull, StoreNotWritable, StoreUnusable
from keepwarm.store import Archive
from keepwarm.store.catalog import schema

_HOLDER = """
import sqlite3, sys, time
db = sqlite3.connect(sys.argv[1], isolation_level=None)
if sys.argv[2] == "all":
    db.execute("PRAGMA locking_mode = EXCLUSIVE")
db.execute("BEGIN EXCLUSIVE")
db.execute("INSERT OR REPLACE INTO counters VALUES ('held', 1)")
if sys.argv[2] == "all":
    db.execute("COMMIT")
    db.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
time.sleep(100)
"""


def loads(one: Prompt, archive: Archive) -> int:
    """Tokens loaded; a run that cannot be read is a miss."""
    with suppress(CorruptRun):
        return sum(one.loads(archive).values())
    return 0


@pytest.fixture
def device(tmp_path: Path) -> Iterator[tuple[Path, Callable[..., None]]]:
    """A folder on a 2 MB file system of its own, and `mount`."""
    folder = tmp_path / "device"
    folder.mkdir()
    mount, unmount = shutil.which("mount"), shutil.which("umount")
    if mount is None or unmount is None:
        pytest.skip("no mount command")
    if subprocess.run([mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("may not mount here")

    def mounted(*arguments: str) -> None:
        done = subprocess.run([mount, *arguments], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"may not mount here: {done.stderr.strip()}")

    yield folder, mounted
    subprocess.run([unmount, "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Write until nothing fits any more; returns the file that takes the space."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        for size in (1 << 16, 1 << 10, 1):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    return path


def test_a_device_filled_to_the_last_byte(device: tuple[Path, Callable[..., None]]) -> None:
    folder = device[0] / "store"
    one, two, three = Prompt(1), Prompt(2), Prompt(3)
    with Archive.open(folder, max_ram=0, max_disk=CAP) as archive:
        one.put(archive)
        archive.flush()
        filler = fill(device[0])
        two.put(archive)
        archive.contents.name("two", two.ids[-1])
        archive.flush()
        assert archive.stats()["store_errors"] > 0
        assert [loads(one, archive), loads(two, archive)] == [LENGTH, 0]
        filler.unlink()
        three.put(archive)
        two.put(archive)
        archive.flush()
        assert [loads(each, archive) for each in (one, two, three)] == [LENGTH] * 3
        fill(device[0])
    filler.unlink()
    with Archive.open(folder, max_ram=0, max_disk=CAP) as archive:
        assert [loads(each, archive) for each in (one, two, three)] == [LENGTH] * 3
        assert not list(folder.rglob("*.tmp"))


def test_a_full_device_is_named_when_a_store_is_made_on_it(device: tuple[Path, Callable[..., None]]) -> None:
    fill(device[0])
    with pytest.raises((StoreFull, StoreNotWritable), match=r"[Nn]o space|full"):
        Archive.open(device[0] / "store", max_ram=0, max_disk=CAP)


def test_a_folder_that_becomes_read_only(device: tuple[Path, Callable[..., None]]) -> None:
    """The runs' folder alone, since the catalogue is open for writing and keeps its file system so."""
    folder, mount = device
    one, two = Prompt(1), Prompt(2)
    runs = folder / "store" / "runs"
    with Archive.open(folder / "store", max_ram=0, max_disk=CAP) as archive:
        one.put(archive)
        archive.flush()
        mount("--bind", str(runs), str(runs))
        try:
            mount("-o", "remount,bind,ro", str(runs))
            two.put(archive)
            archive.flush()
            assert [loads(one, archive), loads(two, archive)] == [LENGTH, 0]
            assert archive.stats()["store_errors"] > 0
        finally:
            subprocess.run(["umount", runs], check=True)
        two.put(archive)
        archive.flush()
        assert [loads(one, archive), loads(two, archive)] == [LENGTH, LENGTH]


def test_a_read_only_device_is_named_when_a_store_is_opened_on_it(device: tuple[Path, Callable[..., None]]) -> None:
    folder, mount = device
    Archive.open(folder, max_ram=0, max_disk=CAP).close()
    mount("-o", "remount,ro", str(folder))
    with pytest.raises(StoreNotWritable, match=r"Read-only file system.*choose another"):
        Archive.open(folder, max_ram=0, max_disk=CAP)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Another process that locks the catalogue, for writing or altogether, until it is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(what: str) -> subprocess.Popen[str]:
        code = [sys.executable, "-c", _HOLDER, str(tmp_path / "catalogue.sqlite"), what]
        started.append(subprocess.Popen(code, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == "locked\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_catalogue_that_another_process_holds(
    tmp_path: Path, holder: Callable[[str], subprocess.Popen[str]], stopped: bool
) -> None:
    """The holder may even be stopped for good: requests go on, and what it blocked is stored when it is gone."""
    one, two = Prompt(1), Prompt(2)
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP) as archive:
        one.put(archive)
        archive.flush()
        process = holder("writing")
        if stopped:
            process.send_signal(signal.SIGSTOP)
        assert loads(one, archive) == LENGTH
        two.put(archive)
        assert loads(two, archive) == 0
        process.kill()
        archive.flush()
        assert [loads(one, archive), loads(two, archive)] == [LENGTH, LENGTH]


@pytest.mark.parametrize("what", ["writing", "all"])
def test_a_store_whose_catalogue_is_held_is_refused_with_a_reason(
    tmp_path: Path, holder: Callable[[str], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    Archive.open(tmp_path, max_ram=0, max_disk=CAP).close()
    process = holder(what)
    monkeypatch.setattr(schema, "BUSY_SECONDS", 0.2)
    with pytest.raises(StoreUnusable, match="locked"):
        Archive.open(tmp_path, max_ram=0, max_disk=CAP)
    process.kill()
    process.wait()
    Archive.open(tmp_path, max_ram=0, max_disk=CAP).close()


@pytest.mark.parametrize("what", ["pipe", "folder", "device", "loop", "unreadable"])
def test_something_else_in_a_runs_place(tmp_path: Path, what: str) -> None:
    """A pipe nobody writes into must not stall the request that opens it."""
    one, two = Prompt(1), Prompt(2)
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP) as archive:
        one.put(archive)
        archive.flush()
        path = only_run(tmp_path)
        path.unlink()
        if what == "pipe":
            os.mkfifo(path)
        elif what == "folder":
            path.mkdir()
        elif what == "device":
            path.symlink_to("/dev/zero")
        elif what == "loop":
            path.symlink_to(path)
        else:
            path.write_bytes(b"")
            path.chmod(0)
        assert loads(one, archive) == 0
        assert loads(one, archive) == 0
        two.put(archive)
        archive.flush()
        assert loads(two, archive) == LENGTH
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP) as archive:
        assert loads(two, archive) == LENGTH
        one.put(archive)
        archive.flush()
        assert loads(one, archive) == LENGTH


@pytest.mark.parametrize("damage", ["pages", "truncated", "text"])
def test_a_catalogue_damaged_while_it_is_open(tmp_path: Path, damage: str) -> None:
    one, two = Prompt(1), Prompt(2)
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP) as archive:
        one.put(archive)
    path = tmp_path / "catalogue.sqlite"
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP) as archive:
        with path.open("r+b") as file:
            if damage == "truncated":
                file.truncate(5000)
            else:
                file.write((b"\xa5" if damage == "pages" else b"text") * (path.stat().st_size // 4))
        loads(one, archive)
        two.put(archive)
        archive.flush()
        archive.contents.entries()
        archive.contents.names()
        loads(two, archive)
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP) as archive:  # made again from the runs
        assert loads(one, archive) == LENGTH
        two.put(archive)
        archive.flush()
        assert loads(two, archive) == LENGTH


def test_asking_a_broken_store_says_so(tmp_path: Path) -> None:
    with Archive.open(tmp_path / "store", max_ram=0, max_disk=CAP) as archive:
        Prompt(1).put(archive)
        archive.flush()
        shutil.rmtree(tmp_path / "store")
        for ask in (
            lambda: archive.contents.export("some name", tmp_path / "bundle"),
            lambda: archive.contents.import_(tmp_path / "bundle"),
            lambda: archive.purge(bytes(32)),
        ):
            with pytest.raises(StoreError):
                ask()
    assert list(tmp_path.iterdir()) == []
