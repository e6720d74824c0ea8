"""The client salts under which each tenant has stored something, so that a purge of the tenant finds all of it.

Several services may share a folder. A tenant's salts are in `NAME.salts`, one per line. A purge moves them to
`NAME.purging` before it begins, and removes them there when it has ended. A request that uses a salt after the move
notes it anew, and the salts of a purge whose service was killed are still found.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from keepwarm.errors import StoreNotWritable
from keepwarm.serving.protocols.errors import ApiError
from keepwarm.store.disk.files import locked, sync_folder, write_whole

Place = tuple[int, int, int, int]
MAX_SALTS = 10_000  # of one tenant; each must be remembered
_LOCK = ".lock"


class Salts:
    """Threads and processes may share a folder. Without a folder, salts are remembered only here."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[Place | None, frozenset[str]]] = {}  # by file, with the state that was read
        self._memory: dict[str, frozenset[str]] = {}  # by file, without a folder

    def note(self, tenant: str, salt: str) -> None:
        """Remember a salt before it is first used. Work that is stored under it must have begun before this call
        (`Archive.epoch`): a purge that does not see the salt then refuses that work. Raises ApiError for more salts
        than can be remembered. This may wait for the disk."""
        name = f"{tenant}.salts"
        with self._lock:
            if salt in self._known(name):
                return
            with self._writing():
                known = self._known(name)
                if salt in known:
                    return
                if len(known) >= MAX_SALTS:
                    raise ApiError(
                        "rate_limit", f"there are {MAX_SALTS} different cache salts already: purge, or use fewer"
                    )
                self._add(name, salt)

    def of(self, tenant: str) -> frozenset[str]:
        """Return all salts that a tenant may have stored under."""
        with self._lock:
            return frozenset(self._known(f"{tenant}.salts") | self._known(f"{tenant}.purging"))

    @contextmanager
    def purging(self, tenant: str) -> Iterator[frozenset[str]]:
        """Yield the salts for a purge in the body. They are forgotten afterwards, unless it raises. Salts that are
        noted meanwhile are kept."""
        salts, purging = f"{tenant}.salts", f"{tenant}.purging"
        with self._lock, self._writing():
            taken = frozenset(self._known(salts) | self._known(purging))
            self._write(purging, taken)
            self._write(salts, ())
        yield taken
        with self._lock, self._writing():
            self._write(purging, self._known(purging) - taken)

    # ---- files ----

    def _known(self, name: str) -> frozenset[str]:
        if self._folder is None:
            return self._memory.get(name, frozenset())
        place = _place(self._folder / name)
        if name not in self._kept or self._kept[name][0] != place:
            lines = [] if place is None else (self._folder / name).read_text().split("\n")
            self._kept[name] = place, frozenset(_salt_of(line) for line in lines if line)
        return self._kept[name][1]

    def _add(self, name: str, salt: str) -> None:
        known = self._known(name) | {salt}
        if self._folder is None:
            self._memory[name] = known
            return
        with (self._folder / name).open("a") as file:
            file.write(f"{json.dumps(salt)}\n")  # it may hold line breaks
            file.flush()
            os.fsync(file.fileno())
        self._kept[name] = _place(self._folder / name), known

    def _write(self, name: str, salts: Collection[str]) -> None:
        if self._folder is None:
            self._memory[name] = frozenset(salts)
        elif salts:
            write_whole(self._folder / name, "".join(f"{json.dumps(salt)}\n" for salt in sorted(salts)).encode())
        else:
            (self._folder / name).unlink(missing_ok=True)
            sync_folder(self._folder)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One writer among processes. Raises StoreNotWritable."""
        if self._folder is None:
            yield
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with locked(self._folder / _LOCK):
                yield
        except OSError as error:
            raise StoreNotWritable(f"cache salts cannot be noted in {self._folder}: {error.strerror}") from None


def _place(path: Path) -> Place | None:
    """Return what distinguishes a file from an earlier state of it; None without a file."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _salt_of(line: str) -> str:
    """Read a salt from its line. Earlier versions wrote it without JSON."""
    try:
        found = json.loads(line)
    except ValueError:
        return line
    return found if isinstance(found, str) else line
