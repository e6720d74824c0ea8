"""The store's folder, its space, its locks and what it holds, and the remote tiers. Nothing is changed."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from keepwarm.cli import output
from keepwarm.cli.doctor.finding import Finding
from keepwarm.errors import ConfigError, KeepwarmError, StoreError, StoreLocked
from keepwarm.store.catalog.database import TURNS
from keepwarm.store.catalog.schema import network_file_system
from keepwarm.store.disk.files import size_of
from keepwarm.store.disk.fsck import Survey, check_store_key, survey
from keepwarm.store.disk.recovery import QUARANTINE, RUNS
from keepwarm.store.remote.backend import redacted
from keepwarm.store.remote.limits import Limits
from keepwarm.store.remote.tiers import open_blobs
from keepwarm.store.runfile.crypto import StoreKey

_LITTLE_SPACE = 1 << 30  # bytes
_PATIENCE = 2.0  # seconds that a lock may be held
_PING = 5.0  # seconds that a remote may take to answer
_LOCKS = {"lock": "opening or rebuilding", TURNS: "writing to"}


@dataclass(frozen=True)
class Named:
    """A store, as commands name it."""

    folder: Path
    key_file: Path | None = None

    @property
    def quoted(self) -> str:
        """The folder, for a shell."""
        return shlex.quote(str(self.folder))

    def command(self, said: str) -> str:
        """A command line of ours about this store."""
        key = f" --store-key-file {shlex.quote(str(self.key_file))}" if self.key_file else ""
        return f"`keepwarm {said} --store {self.quoted}{key}`"


def store(named: Named, secret: bytes | None, max_disk: int) -> list[Finding]:
    """Look at a store's folder. `secret`: the key it is opened with. `max_disk`: its cap in bytes."""
    try:
        return _looked_at(named, secret, max_disk)
    except OSError as error:  # a folder above it is shut, a name is too long, a disk fails
        cure = "name another folder with --store, or fix its owner and permissions"
        return [Finding("store", "fail", f"{named.folder} cannot be looked at: {error.strerror or error}", cure)]


def _looked_at(named: Named, secret: bytes | None, max_disk: int) -> list[Finding]:
    folder = named.folder
    if not folder.exists():
        return [_missing(folder), _space(named, 0, max_disk)]
    found = _permissions(named)
    if found.status == "fail":
        return [found]
    space = _space(named, size_of(folder), max_disk)
    if not (folder / RUNS).is_dir():
        return [found, space]
    return [found, space, _locks(named), _contents(named, secret)]


def _missing(folder: Path) -> Finding:
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
        return Finding("store", "ok", f"{folder} does not exist yet: the first request makes it")
    why = "cannot be written" if above.is_dir() else "is a file"
    return Finding(
        "store", "fail", f"{folder} cannot be made: {above} {why}", "name another folder with --store, or fix its owner"
    )


def _permissions(named: Named) -> Finding:
    folder = named.folder
    if not folder.is_dir():
        return Finding("store", "fail", f"{folder} is a file", "name another folder with --store")
    if (kind := network_file_system(folder)) is not None:
        return Finding(
            "store",
            "fail",
            f"{folder} lies on a network file system ({kind}), where SQLite's log is not safe",
            "name a folder on a local disk with --store; share KV through a remote tier (--remote)",
        )
    places = [folder, *(folder / name for name in (RUNS, QUARANTINE) if (folder / name).exists())]
    shut = [str(place) for place in places if not os.access(place, os.R_OK | os.W_OK | os.X_OK)]
    if shut:
        cure = f'make them this user\'s (chown -R "$(id -u)" {named.quoted}), or name another folder with --store'
        return Finding("store", "fail", f"not readable and writable for this user: {', '.join(shut)}", cure)
    if folder.stat().st_mode & 0o077:
        return Finding(
            "store",
            "warn",
            f"{folder} is open to other users of this machine, and it holds what prompts say",
            f"chmod 700 {named.quoted}",
        )
    return Finding("store", "ok", f"{folder}, for this user alone")


def _space(named: Named, used: int, max_disk: int) -> Finding:
    folder = named.folder
    above = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(above).free
    detail = f"{output.in_bytes(used)} of {output.in_bytes(max_disk)} used, {output.in_bytes(free)} free on the disk"
    if free < _LITTLE_SPACE:
        cure = (
            f"{named.command('gc --max-disk 1GiB')} frees space"
            if used
            else "make room there, or name a folder on another one with --store"
        )
        cure = f"the disk is nearly full: {cure}; else nothing more is stored"
        return Finding("space", "warn", detail, cure)
    if free < max_disk - used:
        cure = f"the disk is full before the cap is reached: --max-disk {max(1, (used + free) // 2 >> 30)}GiB fits it"
        return Finding("space", "warn", detail, cure)
    return Finding("space", "ok", detail)


def _locks(named: Named) -> Finding:
    held = [f"a process has been {what} the store" for name, what in _LOCKS.items() if _is_held(named.folder / name)]
    if held:
        detail = f"{' and '.join(held)} for {_PATIENCE:g} s"
        cure = f"a purge or a repair may take longer; else find the process: fuser -v {named.quoted}/*"
        return Finding("locks", "warn", detail, cure)
    return Finding("locks", "ok", "none is held")


def _is_held(path: Path) -> bool:
    """Whether others hold a lock for as long as we are patient."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # nobody has made it yet
        return False
    end = time.monotonic() + _PATIENCE
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
            except BlockingIOError:
                if time.monotonic() >= end:
                    return True
            time.sleep(0.05)
    finally:
        os.close(fd)


def _contents(named: Named, secret: bytes | None) -> Finding:
    try:
        found = survey(named.folder)
        if not found.unreadable:
            check_store_key(named.folder, StoreKey(secret) if secret else None)
    except StoreLocked as error:
        return Finding("contents", "fail", str(error), "give the key it was made with: --store-key-file")
    except (StoreError, OSError, sqlite3.Error) as error:
        return Finding("contents", "fail", str(error), "see the message; another folder is named with --store")
    return _told(named, found)


def _told(named: Named, found: Survey) -> Finding:
    damage = [each for each in found.findings if each.is_damage]
    left = [each for each in found.findings if not each.is_damage]
    runs = output.counted(len(found.rows), "run")
    if damage:
        first = f"{damage[0].kind}: {damage[0].detail}"
        detail = f"{runs}, {output.counted(len(damage), 'damaged thing')} ({first})"
        return Finding("contents", "fail", detail, f"{named.command('verify --repair')} takes them out of use")
    if left:
        weight = output.in_bytes(sum(each.nbytes for each in left))
        detail = f"{runs}, and {output.counted(len(left), 'leftover')} of {weight} ({left[0].kind}: {left[0].detail})"
        return Finding("contents", "warn", detail, f"{named.command('gc')} removes them")
    return Finding(
        "contents", "ok", f"{runs}; catalogue and files agree. {named.command('verify')} also reads every byte"
    )


def remotes(urls: Sequence[str]) -> list[Finding]:
    """Ask each remote tier for a sign of life."""
    return [_remote(url) for url in urls]


def _remote(url: str) -> Finding:
    shown = redacted(url)
    try:
        with closing(open_blobs(url, Limits(timeout=_PING, load_timeout=_PING))) as blobs:
            blobs.ping(_PING)
    except ConfigError as error:
        return Finding("remote", "fail", str(error), "name another one with --remote or KEEPWARM_REMOTE")
    except KeepwarmError as error:
        cure = "requests go on without it: start it, or fix its address; `--remote` and KEEPWARM_REMOTE name it"
        return Finding("remote", "warn", f"{shown}: {error}", cure)
    return Finding("remote", "ok", f"{shown} answers")
