"""Where registered sets are remembered: one file per name under the store's folder, or in memory without a store."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from keepwarm.core.identity import canonical_json, json_text
from keepwarm.errors import ConfigError, CorruptRun, PromptError, StoreLocked, StoreNotWritable
from keepwarm.models.schemas import checked_tools
from keepwarm.store.crypto import StoreKey, new_salt
from keepwarm.toolsets.versions import Version, next_version

log = logging.getLogger("keepwarm.toolsets")

FOLDER = "toolsets"
_FORMAT = 1
_VERSIONS_KEPT = 16


class Registry:
    """Sets by name, each with its latest versions. Threads and processes may share a folder."""

    def __init__(self, store: Path | None = None, key: StoreKey | None = None) -> None:
        """`key` encrypts what is written, as it does the store. Raises StoreNotWritable."""
        self._folder = None if store is None else store / FOLDER
        self._key = key
        self._memory: dict[str, tuple[Version, ...]] = {}
        self._lock = threading.RLock()
        self.corrupt = 0  # files that could not be used and were moved aside
        if self._folder is not None:
            with _writable(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)

    def register(
        self,
        tools: Sequence[Any] | Mapping[str, Any] = (),
        *,
        system: str | None = None,
        documents: Sequence[Any] = (),
        name: str | None = None,
        based_on: str | None = None,
    ) -> tuple[str, Version, Version | None]:
        """Remember a set; returns its name, its version, and the version it continues (None for a new one).

        The same content under the same name, in whatever order of tools and keys, is the same version, in the order in
        which it was registered first. Other content is a new version that keeps the order of the last one, or of the
        set `based_on` (see `next_version`). Without a name the content
        gives one. Raises PromptError for tools or documents that cannot be used, ConfigError for names.
        """
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
            versions = self.versions(name)
            last = versions[-1] if versions else None
            if last is not None and last.hash == wanted.hash:
                return name, last, last
            base = last
            if based_on is not None and last is None:
                base = self.get(based_on)
            number = last.number + 1 if last else 1
            earlier = next((version for version in reversed(versions) if version.hash == wanted.hash), None)
            if earlier is not None:  # gone back to: its KV may still be there
                version = Version(
                    number, earlier.tools, earlier.system, earlier.documents, earlier.ends, created=wanted.created
                )
            else:
                version = next_version(schemas, system, documents, base, number)
            self._save(name, (*versions, version)[-_VERSIONS_KEPT:])
            return name, version, base

    def adopt(self, name: str, version: Version) -> Version:
        """Take a version that another registry made as the newest of a name, with its order and cuts; nothing changes
        when it is that already. Raises ConfigError for a bad name, StoreNotWritable."""
        name = _checked_name(name)
        with self._changing():
            versions = self.versions(name)
            last = versions[-1] if versions else None
            if last is not None and (last.hash, last.text, last.ends) == (version.hash, version.text, version.ends):
                return last
            adopted = replace(version, number=last.number + 1 if last else 1)
            self._save(name, (*versions, adopted)[-_VERSIONS_KEPT:])
            return adopted

    def get(self, name: str, version: int | None = None) -> Version:
        """A set's last version, or that number. Raises ConfigError naming what there is."""
        versions = self.versions(name)
        if not versions:
            known = ", ".join(self.names()) or "none"
            raise ConfigError(f"no tool set is called {name!r}; registered are: {known}")
        if version is None:
            return versions[-1]
        found = next((v for v in versions if v.number == version), None)
        if found is None:
            raise ConfigError(f"{name!r} has versions {', '.join(str(v.number) for v in versions)}, not {version}")
        return found

    def versions(self, name: str) -> tuple[Version, ...]:
        """All kept versions of a set, oldest first; none for an unknown name. Raises StoreLocked without the key."""
        if self._folder is None:
            with self._lock:
                return self._memory.get(name, ())
        path = self._path(name)
        try:
            return self._read(path.read_bytes(), name)
        except FileNotFoundError:
            return ()
        except (CorruptRun, ValueError, KeyError, TypeError) as error:
            aside = path.with_suffix(".corrupt")
            log.warning("the tool set %r cannot be read (%s); it is moved to %s", name, error, aside)
            self.corrupt += 1
            path.replace(aside)
            return ()

    def names(self) -> tuple[str, ...]:
        """Names of all sets, sorted."""
        if self._folder is None:
            with self._lock:
                return tuple(sorted(self._memory))
        names = []
        for path in self._folder.glob("*.json"):
            try:
                names.append(str(json.loads(path.read_bytes())["name"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # `versions` says what is wrong with it
        return tuple(sorted(names))

    def remove(self, name: str) -> bool:
        """Forget a set; whether there was one. Its KV stays in the store until it is given up there."""
        with self._changing():
            if self._folder is None:
                return self._memory.pop(name, None) is not None
            try:
                self._path(name).unlink()
            except FileNotFoundError:
                return False
            return True

    # ---- files ----

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"

    def _save(self, name: str, versions: tuple[Version, ...]) -> None:
        if self._folder is None:
            self._memory[name] = versions
            return
        body = json_text([version.to_dict() for version in versions])  # in its order, which is what a set is for
        record: dict[str, Any] = {"format": _FORMAT, "name": name}
        if self._key is None:
            record |= {"sha256": hashlib.sha256(body.encode()).hexdigest(), "versions": body}
        else:
            salt = new_salt()
            sealed = self._key.cipher(f"tool set {name}", salt).seal(0, 0, 0, body.encode())
            record |= {"key": self._key.id, "salt": salt.hex(), "sealed": base64.b64encode(sealed).decode()}
        path = self._path(name)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        with _writable(self._folder):
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(record, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _read(self, data: bytes, name: str) -> tuple[Version, ...]:
        record = json.loads(data)
        if record["format"] != _FORMAT or record["name"] != name:
            raise ValueError(f"format {record['format']}, name {record['name']!r}")
        if "sealed" in record:
            if self._key is None or record["key"] != self._key.id:
                raise StoreLocked(f"the tool set {name!r} is encrypted under another key: give the store's own")
            cipher = self._key.cipher(f"tool set {name}", bytes.fromhex(record["salt"]))
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
        """One writer at a time, in this process and among processes."""
        with self._lock:
            if self._folder is None:
                yield
                return
            with _writable(self._folder), (self._folder / ".lock").open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield


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
