"""Opening a store's folder: checks, the catalogue (made again from the runs when damaged), and what crashes left."""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from keepwarm.errors import CorruptRun, StoreNotWritable, StoreUnusable
from keepwarm.store.format import RunHeader
from keepwarm.store.health import logger
from keepwarm.store.index import Index, RunRow
from keepwarm.store.reading import RunReader
from keepwarm.store.schema import DamagedCatalogue, network_file_system, open_catalogue, translated

CATALOGUE = "catalogue.sqlite"
RUNS = "runs"
QUARANTINE = "quarantine"
TEMPORARY = ".tmp"
_SAFE = re.compile(rf"^(?:{RUNS}|{QUARANTINE})/[0-9a-f]{{32}}\.safetensors$")
_RUN_FILE = re.compile(r"^([0-9a-f]{32})\.safetensors$")


def run_file(run_id: str) -> str:
    """Where a run lies, relative to the store's folder."""
    return f"{RUNS}/{run_id}.safetensors"


def quarantine_file(run_id: str) -> str:
    """Where a run is moved when its bytes are wrong, relative to the store's folder."""
    return f"{QUARANTINE}/{run_id}.safetensors"


def open_folder(folder: Path, clock: Callable[[], float] = time.time) -> Index:
    """Make a store's folder ready and open its catalogue.

    Raises StoreNotWritable, StoreUnusable (network file system, locked), StoreTooNew and StoreFull.
    """
    _prepare(folder)
    with _opening(folder):
        try:
            return _open_swept(folder, clock)
        except DamagedCatalogue as error:
            _move_aside(folder, error)
        try:
            return _open_swept(folder, clock)
        except DamagedCatalogue as error:
            raise StoreUnusable(f"a new catalogue in {folder} is damaged at once ({error}); check the disk") from error


def _open_swept(folder: Path, clock: Callable[[], float]) -> Index:
    """Open the catalogue, fill an empty one from the runs, and drop what crashes left. Raises DamagedCatalogue too."""
    path = folder / CATALOGUE
    connection, empty = open_catalogue(path)
    try:
        index = Index(path, connection, clock)
        for header, size, written in _scan(folder) if empty else ():
            index.adopt(header.run_id, run_file(header.run_id), size, written, header)
        _sweep(folder, index)
        return index
    except sqlite3.Error as error:
        connection.close()
        raise translated(error, path) from error
    except OSError as error:
        connection.close()
        raise StoreNotWritable(f"{folder} cannot be tidied up ({error}); fix its owner and permissions") from error


def _move_aside(folder: Path, error: DamagedCatalogue) -> None:
    # Read the runs first: should one be of a newer version, nothing has been moved when that is raised.
    count = len(_scan(folder))
    aside = folder / QUARANTINE / f"catalogue-{time.time_ns()}.sqlite"
    logger.warning("catalogue damaged (%s); made again from %d runs, the old one is %s", error, count, aside)
    for suffix in ("", "-wal", "-shm"):
        if (old := folder / (CATALOGUE + suffix)).exists():
            old.rename(aside.with_name(aside.name + suffix))


def unlink_rows(folder: Path, rows: Iterable[RunRow]) -> None:
    """Unlink the files of rows that are gone from the catalogue, finished or not. Raises OSError."""
    for row in rows:
        # A damaged catalogue must not be able to name a file outside the store.
        if _SAFE.match(row.file):
            (folder / row.file).unlink(missing_ok=True)
            (folder / (row.file + TEMPORARY)).unlink(missing_ok=True)


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # prompts are private
        for name in (RUNS, QUARANTINE):
            (folder / name).mkdir(exist_ok=True, mode=0o700)
        probe = folder / f".probe-{os.getpid()}-{time.monotonic_ns()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StoreNotWritable(
            f"the store folder {folder} cannot be written ({error.strerror or error}); "
            "choose another one with store=..., or fix its owner and permissions"
        ) from error
    kind = network_file_system(folder)
    if kind is not None:
        raise StoreUnusable(
            f"the store folder {folder} lies on a network file system ({kind}), where SQLite's write-ahead log is not "
            "safe; choose a folder on a local disk"
        )


@contextmanager
def _opening(folder: Path) -> Iterator[None]:
    """One process at a time opens, migrates or rebuilds. The kernel frees the lock of a process that dies."""
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreNotWritable(f"{folder}/lock cannot be made: {error.strerror}; fix its permissions") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _scan(folder: Path) -> list[tuple[RunHeader, int, float]]:
    """Headers of all run files, with size and time of writing, the oldest first; unreadable ones are left out."""
    found: list[tuple[RunHeader, int, float]] = []
    for entry in os.scandir(folder / RUNS):
        match = _RUN_FILE.match(entry.name)
        if match is None:
            continue
        try:
            with RunReader.open(Path(entry.path), match[1]) as reader:
                status = entry.stat()
                found.append((reader.header, status.st_size, status.st_mtime))
        except (CorruptRun, OSError) as error:
            logger.warning("run %s cannot be read and is dropped: %s", match[1], error)
    return sorted(found, key=lambda item: item[2])


def _sweep(folder: Path, index: Index) -> None:
    """Drop dead reservations, files that no row names, and rows whose file is gone."""
    unlink_rows(folder, index.expire())
    # List first, then ask: a file's row is always written before the file, so a file seen here without a row has none.
    files = [
        (f"{name}/{entry.name}", Path(entry.path))
        for name in (RUNS, QUARANTINE)
        for entry in os.scandir(folder / name)
        if entry.is_file() and not entry.name.startswith("catalogue-")
    ]
    rows = index.runs("1")
    known = {row.file for row in rows}
    for name, path in files:
        if name.removesuffix(TEMPORARY) not in known:
            path.unlink(missing_ok=True)
    lost = [row.id for row in rows if row.state != "reserved" and not (folder / row.file).exists()]
    if lost:
        index.forget(lost)
        logger.warning("%d runs were in the catalogue but not in %s; forgotten", len(lost), folder)
