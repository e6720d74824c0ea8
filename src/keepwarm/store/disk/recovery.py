"""Open a store's folder: check it, open the catalogue (rebuilt from the runs if damaged), remove what crashes left."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from keepwarm.errors import CorruptRun, StoreLocked, StoreNotWritable, StoreUnusable
from keepwarm.store.catalog.database import Database
from keepwarm.store.catalog.index import Index
from keepwarm.store.catalog.rows import RunRow
from keepwarm.store.catalog.schema import UNFILLED, DamagedCatalogue, network_file_system, open_catalogue, translated
from keepwarm.store.runfile.crypto import StoreKey
from keepwarm.store.runfile.header import RunHeader
from keepwarm.store.runfile.reader import RunReader

log = logging.getLogger(__name__)

CATALOGUE = "catalogue.sqlite"
RUNS = "runs"
QUARANTINE = "quarantine"
TEMPORARY = ".tmp"
SWEPT_AT_OPENING = 4096  # runs; larger stores are checked in the background
NO_FAULT_OF_THE_FILE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EINTR}
_SAFE = re.compile(rf"^(?:{RUNS}|{QUARANTINE})/[0-9a-f]{{32}}\.safetensors$")
_RUN_FILE = re.compile(r"^([0-9a-f]{32})\.safetensors$")


def run_file(run_id: str) -> str:
    """Path of a run's file, relative to the store's folder."""
    return f"{RUNS}/{run_id}.safetensors"


def quarantine_file(run_id: str) -> str:
    """Path to which a run with wrong bytes is moved, relative to the store's folder."""
    return f"{QUARANTINE}/{run_id}.safetensors"


def open_folder(
    folder: Path, clock: Callable[[], float] = time.time, key: StoreKey | None = None, *, damage: str = ""
) -> Index:
    """Make a store's folder ready and open its catalogue. A new store is encrypted if a key is given.

    `damage` says what was found wrong with the catalogue while it was in use.

    Raises StoreNotWritable, StoreUnusable (network file system, locked), StoreTooNew, StoreLocked and StoreFull.
    """
    _prepare(folder)
    with _opening(folder):
        try:
            index = _open_swept(folder, clock, key)
            if damage:
                index.database.check()  # another process may have rebuilt it meanwhile
                if index.database.damage:
                    index.database.close()
                    raise DamagedCatalogue(damage)
            return index
        except DamagedCatalogue as error:
            _move_aside(folder, error, key)
        try:
            return _open_swept(folder, clock, key)
        except DamagedCatalogue as error:
            raise StoreUnusable(f"a new catalogue in {folder} is damaged at once ({error}); check the disk") from error


def check_folder(folder: Path, key: StoreKey | None = None) -> None:
    """Raise what opening the store would raise, without creating a missing folder."""
    if folder.exists():
        open_folder(folder, key=key).database.close()
        return
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise _not_writable(folder, f"{above} is {'not writable' if above.is_dir() else 'a file'}")


def _open_swept(folder: Path, clock: Callable[[], float], key: StoreKey | None) -> Index:
    """Open the catalogue, fill a new one from the runs, and drop what crashes left. Also raises DamagedCatalogue."""
    path = folder / CATALOGUE
    connection, unfilled = open_catalogue(path)
    index: Index | None = None
    try:
        index = Index(Database(path, connection, clock))
        found = _scan(folder, key) if unfilled else []
        _unlock(folder, index, key)
        if unfilled:
            index.adopt_all(
                (header.run_id, run_file(header.run_id), size, written, header) for header, size, written in found
            )
        gone = index.expire()
        unlink_rows(folder, gone)
        index.unlinked(row.id for row in gone)
        if index.run_count() <= SWEPT_AT_OPENING:
            sweep(folder, index)
        return index
    except BaseException as error:
        (index.database if index else connection).close()
        if isinstance(error, sqlite3.Error):
            raise translated(error, path) from error
        if isinstance(error, OSError):
            raise StoreNotWritable(f"{folder} cannot be tidied up ({error}); fix its owner and permissions") from error
        raise


def _unlock(folder: Path, index: Index, key: StoreKey | None) -> None:
    """Raise StoreLocked unless the key is the store's. A new store without runs takes the key it is opened with."""
    known = index.setting("key")
    if known is None:
        known = "" if index.run_count() or key is None else key.id
        index.set_setting("key", known)
    check_key(folder, known, key)


def check_key(folder: Path, known: str, key: StoreKey | None) -> None:
    """Raise StoreLocked when a key is not the one a store was made with. `known` is that key's id, or empty."""
    given = "" if key is None else key.id
    if known == given:
        return
    if not known:
        raise StoreLocked(
            f"the store at {folder} is not encrypted, and a key given later cannot change that: leave the key out, or "
            "choose a new folder for an encrypted store"
        )
    raise StoreLocked(
        f"the store at {folder} is encrypted, and {'another key opens it' if given else 'no key was given'}: name the "
        "file with its key in store_key_file=... (--store-key-file), or put the key into KEEPWARM_STORE_KEY"
    )


def set_aside(folder: Path, reason: str, key: StoreKey | None) -> None:
    """Move a damaged catalogue away. Opening the store then rebuilds it.

    Raises StoreTooNew, StoreLocked and StoreUnusable (nothing is moved then), StoreNotWritable and OSError.
    """
    with _opening(folder):
        _move_aside(folder, DamagedCatalogue(reason), key)


def _move_aside(folder: Path, error: DamagedCatalogue, key: StoreKey | None) -> None:
    # Read the runs first. If one is of a newer version or needs another key, that raises before anything is moved.
    count = len(_scan(folder, key))
    aside = folder / QUARANTINE / f"catalogue-{time.time_ns()}.sqlite"
    log.warning("catalogue damaged (%s); made again from %d runs, the old one is %s", error, count, aside)
    for suffix in ("", "-wal", "-shm"):
        if (old := folder / (CATALOGUE + suffix)).exists():
            old.rename(aside.with_name(aside.name + suffix))


def unlink_rows(folder: Path, rows: Iterable[RunRow]) -> None:
    """Unlink the files, finished or not, of rows that are gone from the catalogue. Raises OSError.

    The unfinished file is unlinked first: a process that is about to rename it then fails, or has already renamed it.
    """
    for row in rows:
        # A damaged catalogue must not be able to name a file outside the store.
        if _SAFE.match(row.file):
            (folder / (row.file + TEMPORARY)).unlink(missing_ok=True)
            (folder / row.file).unlink(missing_ok=True)


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # prompts are private
        for name in (RUNS, QUARANTINE):
            (folder / name).mkdir(exist_ok=True, mode=0o700)
        probe = folder / f".probe-{os.getpid()}-{time.monotonic_ns()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _not_writable(folder, "it is a file" if folder.is_file() else error.strerror or str(error)) from error
    kind = network_file_system(folder)
    if kind is not None:
        raise StoreUnusable(
            f"the store folder {folder} lies on a network file system ({kind}), where SQLite's write-ahead log is not "
            "safe; choose a folder on a local disk"
        )


def _not_writable(folder: Path, why: str) -> StoreNotWritable:
    return StoreNotWritable(
        f"the store folder {folder} cannot be written ({why}); choose another one with store=... (--store), or fix its "
        "owner and permissions"
    )


@contextmanager
def _opening(folder: Path) -> Iterator[None]:
    """Lock: one process at a time opens, migrates or rebuilds. The kernel frees the lock of a process that dies."""
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreNotWritable(f"{folder}/lock cannot be made: {error.strerror}; fix its permissions") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _scan(folder: Path, key: StoreKey | None) -> list[tuple[RunHeader, int, float]]:
    """Return the headers of all run files, with size and time of writing, a prompt's first run first. Unreadable files
    are left out.

    Raises StoreTooNew, StoreLocked, and StoreUnusable for an error that is not the file's fault: if such a run were
    left out, it would be lost.
    """
    found: list[tuple[RunHeader, int, float]] = []
    for entry in os.scandir(folder / RUNS):
        match = _RUN_FILE.match(entry.name)
        if match is None:
            continue
        try:
            with RunReader.open(Path(entry.path), match[1], key) as reader:
                status = entry.stat()
                found.append((reader.header, status.st_size, status.st_mtime))
        except (CorruptRun, OSError) as error:
            if isinstance(error, OSError) and error.errno in NO_FAULT_OF_THE_FILE:
                raise StoreUnusable(
                    f"the catalogue in {folder} cannot be made again now: run {match[1]} cannot be read ({error}): "
                    "remove the cause and try again"
                ) from error
            log.warning("run %s cannot be read and is dropped: %s", match[1], error)
        except StoreLocked as error:
            raise StoreLocked(
                f"the store at {folder}: {error} ({entry.name}). Give the key it was made with, in store_key_file=... "
                "or KEEPWARM_STORE_KEY; none if it was made without"
            ) from error
    # The run that another stands on begins earlier, so it is entered first. A snapshot may begin where its block does.
    return sorted(found, key=lambda item: (item[0].start, item[0].geometry.is_state, item[2]))


def sweep(folder: Path, index: Index) -> None:
    """Drop files that no row names, and rows whose file is gone. Only changes from outside cause these, since the
    catalogue names every file that the store makes. Does nothing while the catalogue is not filled."""
    if index.setting(UNFILLED) is not None:
        return
    # List files first: a file's row is always written before the file. So if no row is found for a file, it has none.
    files = {
        f"{name}/{entry.name}": entry.path
        for name in (RUNS, QUARANTINE)
        for entry in os.scandir(folder / name)
        if entry.is_file() and not entry.name.startswith("catalogue-")
    }
    rows = index.files()
    known = {file for _, file, _ in rows}
    for name, path in files.items():
        if name.removesuffix(TEMPORARY) not in known:
            Path(path).unlink(missing_ok=True)
    missing = [(run_id, file) for run_id, file, state in rows if state != "reserved" and file not in files]
    lost = [run_id for run_id, file in missing if not (folder / file).exists()]  # it may have been written since
    if lost:
        gone = index.forget(lost)
        unlink_rows(folder, gone)
        index.unlinked(row.id for row in gone)
        log.warning("%d runs were in the catalogue but not in %s; forgotten", len(lost), folder)
