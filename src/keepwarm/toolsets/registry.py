"""The registry of sets: one file per salt and name in the store's folder, or in memory without a store."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from keepwarm.core.identity import canonical_json, json_text, salt_key, salt_tag
from keepwarm.errors import ConfigError, CorruptRun, PromptError, StoreLocked, StoreNotWritable
from keepwarm.models.schemas import checked_tools
from keepwarm.store.admin.purge_epochs import EVERYTHING, Epochs
from keepwarm.store.admin.set_files import FOLDER, FORMAT, WITHOUT_SALT, set_file, set_files, writing_sets
from keepwarm.store.disk.files import write_whole
from keepwarm.store.disk.room import TOOL_SETS, TakeRoom
from keepwarm.store.runfile.crypto import StoreKey, new_salt
from keepwarm.toolsets.versions import Version, next_version

log = logging.getLogger(__name__)

_VERSIONS_KEPT = 16


class Registry:
    """Sets by salt and name, each with its latest versions. Threads and processes may share a folder."""

    def __init__(
        self,
        store: Path | None = None,
        key: StoreKey | None = None,
        epochs: Epochs | None = None,
        room: TakeRoom = lambda part, need: nullcontext(),
    ) -> None:
        """`key`, `epochs` and `room` are the store's. Files are encrypted with the key. Raises StoreNotWritable."""
        self._room = room
        self._folder = None if store is None else store / FOLDER
        self._key = key
        self._memory: dict[tuple[bytes, str], tuple[Version, ...]] = {}
        self._lock = threading.RLock()
        self._changes = False  # whether the folder's lock is held; guarded by `_lock`
        self.corrupt = 0  # damaged files that were moved aside
        if self._folder is not None:
            with _writable(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
        self._epochs = Epochs(store) if epochs is None else epochs

    def register(
        self,
        tools: Sequence[Any] | Mapping[str, Any] = (),
        *,
        system: str | None = None,
        documents: Sequence[Any] = (),
        name: str | None = None,
        based_on: str | None = None,
        salt: str | None = None,
        epoch: int | None = None,
    ) -> tuple[str, Version, Version | None]:
        """Remember a set. Return its name, its version, and the version that it continues (None for a new one).

        The same content under the same name is the same version, whatever the order of tools and keys; it keeps the
        order in which it was registered first. Other content is a new version that keeps the order of the last one, or
        of the set `based_on` (see `next_version`). Without a name, one is made from the content. A purge of the salt
        removes its sets. `epoch` is the store's when the call's work began (None: now). Raises PromptError for unusable
        tools or documents, ConfigError for bad names, PurgedMeanwhile.
        """
        epoch = self._epochs.now() if epoch is None else epoch
        schemas = checked_tools(tools)
        if not schemas and not system and not documents:
            raise PromptError("a set needs tools, a system prompt or documents; nothing was given")
        try:
            canonical_json(list(documents))
        except (TypeError, ValueError) as error:
            raise PromptError(f"documents must be plain JSON values: {error}") from None
        wanted = next_version(schemas, system, documents)
        name = f"set-{wanted.hash[:12]}" if name is None else _checked_name(name)
        with self._changing():
            versions = self.versions(name, salt)
            last = versions[-1] if versions else None
            if last is not None and last.hash == wanted.hash:
                return name, last, last
            base = last
            if based_on is not None and last is None:
                base = self.get(based_on, salt=salt)
            number = last.number + 1 if last else 1
            earlier = next((version for version in reversed(versions) if version.hash == wanted.hash), None)
            if earlier is not None:  # the set returns to an earlier content, whose KV may still be stored
                version = Version(
                    number, earlier.tools, earlier.system, earlier.documents, earlier.ends, created=wanted.created
                )
            else:
                version = next_version(schemas, system, documents, base, number)
            self._save(name, (*versions, version)[-_VERSIONS_KEPT:], _tag(salt), epoch)
            return name, version, base

    def adopt(self, name: str, version: Version, epoch: int | None = None) -> Version:
        """Take another registry's version, with its order and cuts, as the newest version of a name. Nothing changes
        when it is the newest already. For `epoch` see `register`. Raises ConfigError for a bad name, StoreNotWritable,
        PurgedMeanwhile."""
        epoch = self._epochs.now() if epoch is None else epoch
        name = _checked_name(name)
        with self._changing():
            versions = self.versions(name)
            last = versions[-1] if versions else None
            if last is not None and (last.hash, last.text, last.ends) == (version.hash, version.text, version.ends):
                return last
            adopted = replace(version, number=last.number + 1 if last else 1)
            self._save(name, (*versions, adopted)[-_VERSIONS_KEPT:], b"", epoch)
            return adopted

    def get(self, name: str, version: int | None = None, *, salt: str | None = None) -> Version:
        """Return a set's last version, or the one of that number. Raises ConfigError, which names those there are."""
        versions = self.versions(name, salt)
        if not versions:
            known = ", ".join(self.names(salt)) or "none"
            raise ConfigError(f"no tool set is called {name!r}; registered are: {known}")
        if version is None:
            return versions[-1]
        found = next((v for v in versions if v.number == version), None)
        if found is None:
            raise ConfigError(f"{name!r} has versions {', '.join(str(v.number) for v in versions)}, not {version}")
        return found

    def versions(self, name: str, salt: str | None = None) -> tuple[Version, ...]:
        """Return all kept versions of a set, oldest first; none for an unknown name. Raises StoreLocked without the
        key."""
        tag = _tag(salt)
        if self._folder is None:
            with self._lock:
                return self._memory.get((tag, name), ())
        try:
            return self._read(self._folder / set_file(name, tag), name, tag)
        except _Damaged:
            with self._changing():  # locked, so that a purge finds the file under its old or its new name
                return self._set_aside(self._folder / set_file(name, tag), name, tag)

    def names(self, salt: str | None = None) -> tuple[str, ...]:
        """Return the names of all sets under a salt (None: under none), sorted. Damaged ones are left out."""
        tag = _tag(salt)
        return tuple(sorted(name for name, other in self._all() if other == tag))

    def latest(self, salt: str | None = None) -> dict[str, Version]:
        """Return the newest version of every set under a salt (None: under none), sorted by name. A set that is removed
        or found damaged meanwhile is left out."""
        found = ((name, self.versions(name, salt)) for name in self.names(salt))
        return {name: versions[-1] for name, versions in found if versions}

    def all_names(self) -> tuple[str, ...]:
        """Return the names of all sets of all salts, sorted."""
        return tuple(sorted(name for name, _ in self._all()))

    def _all(self) -> list[tuple[str, bytes]]:
        if self._folder is None:
            with self._lock:
                return [(name, tag) for tag, name in self._memory]
        with _writable(self._folder):
            return list(set_files(self._folder))

    def remove(self, name: str, salt: str | None = None) -> bool:
        """Forget a set. Return whether there was one. Its KV stays in the store until it is evicted."""
        tag = _tag(salt)
        with self._changing():
            if self._folder is None:
                return self._memory.pop((tag, name), None) is not None
            try:
                (self._folder / set_file(name, tag)).unlink()
            except FileNotFoundError:
                return False
            return True

    def purged(self, tags: Collection[bytes]) -> None:
        """Remove the sets of purged salts from memory. In a folder, the process that purges removes them."""
        with self._lock:
            for tag, name in list(self._memory):
                if tag in tags or EVERYTHING in tags:
                    del self._memory[tag, name]

    # ---- files ----

    def _save(self, name: str, versions: tuple[Version, ...], tag: bytes, epoch: int) -> None:
        self._epochs.check(epoch, [tag] if tag else [])  # a purge too late for this check removes what is written
        if self._folder is None:
            self._memory[tag, name] = versions
            return
        body = json_text([version.to_dict() for version in versions])  # keeps the order, which is the point of a set
        record: dict[str, Any] = {"format": FORMAT, "name": name, "salt": tag.hex()}
        if self._key is None:
            record |= {"sha256": hashlib.sha256(body.encode()).hexdigest(), "versions": body}
        else:
            salt = new_salt()
            sealed = self._key.cipher(_sealed_as(name, tag), salt).seal(0, 0, 0, body.encode())
            record |= {"key": self._key.id, "salt_of_key": salt.hex(), "sealed": base64.b64encode(sealed).decode()}
        data = json.dumps(record).encode()
        with self._room(TOOL_SETS, len(data)):  # the file that it replaces exists until then
            write_whole(self._folder / set_file(name, tag), data)

    def _set_aside(self, path: Path, name: str, tag: bytes) -> tuple[Version, ...]:
        """Move a file that was found damaged aside, unless it was rewritten meanwhile."""
        try:
            return self._read(path, name, tag)
        except _Damaged as error:
            aside = path.with_suffix(".corrupt")
            log.warning("the tool set %r cannot be read (%s); it is moved to %s", name, error, aside)
            self.corrupt += 1
            path.replace(aside)
            return ()

    def _read(self, path: Path, name: str, tag: bytes) -> tuple[Version, ...]:
        try:
            return self._parsed(path.read_bytes(), name, tag)
        except FileNotFoundError:
            return ()
        except (CorruptRun, ValueError, KeyError, TypeError) as error:
            raise _Damaged(str(error)) from error

    def _parsed(self, data: bytes, name: str, tag: bytes) -> tuple[Version, ...]:
        record = json.loads(data)
        old = record["format"] == WITHOUT_SALT and not tag
        if record["name"] != name or not (old or (record["format"] == FORMAT and record["salt"] == tag.hex())):
            raise ValueError(f"format {record['format']}, name {record['name']!r}")
        if "sealed" in record:
            if self._key is None or record["key"] != self._key.id:
                raise StoreLocked(f"the tool set {name!r} is encrypted under another key: give the store's own")
            what, salt = (f"tool set {name}", "salt") if old else (_sealed_as(name, tag), "salt_of_key")
            cipher = self._key.cipher(what, bytes.fromhex(record[salt]))
            body = cipher.open(0, 0, 0, base64.b64decode(record["sealed"])).decode()
        elif self._key is not None:
            raise ValueError("it is not encrypted, and the store is")
        else:
            body = record["versions"]
            if hashlib.sha256(body.encode()).hexdigest() != record["sha256"]:
                raise ValueError("the checksum does not match")
        return tuple(Version.from_dict(version) for version in json.loads(body))

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Allow one writer at a time, in this process and among processes."""
        with self._lock:
            if self._folder is None or self._changes:
                yield
                return
            with _writable(self._folder), writing_sets(self._folder):
                self._changes = True
                try:
                    yield
                finally:
                    self._changes = False


class _Damaged(Exception):
    """A set's file is damaged."""


def _tag(salt: str | None) -> bytes:
    return b"" if salt is None else salt_tag(salt_key(salt))


def _sealed_as(name: str, tag: bytes) -> str:
    return f"tool set {tag.hex()} {name}"


def _checked_name(name: str) -> str:
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > 200:
        raise ConfigError(f"a set's name is a printable text of at most 200 characters, got {name!r}")
    return name


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreNotWritable(f"tool sets cannot be kept in {folder}: {error.strerror or error}") from None
