"""Under which salts of its clients each tenant has stored something, so that a purge of the tenant finds all of it.

Several services may share a folder. A tenant's salts are in `NAME.salts`, one in a line. Who purges moves them to
`NAME.purging` before the purge begins, and removes that when it has ended: whoever uses a salt from then on notes it
anew, and one whose service was killed is still found.
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
    """Threads and processes may share a folder. Without one they are remembered here alone."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[Place | None, frozenset[str]]] = {}  # by file; with the file that was read
        self._memory: dict[str, frozenset[str]] = {}  # by file, without a folder

    def note(self, tenant: str, salt: str) -> None:
        """Remember a salt before it is first used. What is stored under it must have begun before (`Archive.epoch`): a
        purge that does not see it then refuses that. Raises ApiError for more than can be remembered. May wait for the
        disk."""
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
        """All that a tenant may have stored under."""
        with self._lock:
            return frozenset(self._known(f"{tenant}.salts") | self._known(f"{tenant}.purging"))

    @contextmanager
    def purging(self, tenant: str) -> Iterator[frozenset[str]]:
        """Purge in the body what is under the salts that it gets; they are forgotten then, unless it raises. Those that
        are noted meanwhile are kept."""
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
    """What tells a file from an earlier state of it; None when there is none."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _salt_of(line: str) -> str:
    """A salt as it was written; earlier versions wrote it as it is."""
    try:
        found = json.loads(line)
    except ValueError:
        return line
    return found if isinstance(found, str) else line
