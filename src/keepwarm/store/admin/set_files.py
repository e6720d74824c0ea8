"""The folder of registered tool sets: where a set's file is, the lock for writers, how to purge sets.

`toolsets.registry` says what is in a file. This module reads only its owner, so a purge needs neither key nor model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from keepwarm.store.admin.purge_epochs import EVERYTHING
from keepwarm.store.disk.files import locked
from keepwarm.store.disk.room import TOOL_SETS

FOLDER = TOOL_SETS  # in the store's
FORMAT = 2
WITHOUT_SALT = 1  # the format that did not record a set's salt
_LOCK = ".lock"
_NAME_HEX = 32


def set_file(name: str, tag: bytes = b"") -> str:
    """Return the file name of a set under the salt with this tag (empty: none)."""
    return f"{hashlib.sha256(tag + name.encode()).hexdigest()[:_NAME_HEX]}.json"


def writing_sets(folder: Path) -> AbstractContextManager[None]:
    """Return the lock for writing and removing sets; one thread of one process may hold it. Raises OSError."""
    return locked(folder / _LOCK)


def set_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Names of the sets in a folder, each with its salt's tag. Raises OSError."""
    for path in folder.glob("*.json"):
        if (found := _whose(path)) is not None:
            yield found


def purge_sets(store: Path, tags: Collection[bytes]) -> int:
    """Remove every set under salts with these tags from a store's folder. Return how many. Files that were set aside as
    damaged, cannot be read or are half written are removed, too: their owner is unknown. Raises OSError."""
    folder = store / FOLDER
    if not folder.is_dir():
        return 0
    gone = 0
    with writing_sets(folder):
        for path in folder.iterdir():
            if path.name == _LOCK:
                continue
            whose = _whose(path) if path.suffix == ".json" else None
            if whose is None or EVERYTHING in tags or whose[1] in tags:
                path.unlink(missing_ok=True)
                gone += whose is not None
    return gone


def _whose(path: Path) -> tuple[str, bytes] | None:
    """Name and salt's tag of a set; None when the file is damaged or does not state them. Raises OSError."""
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
        name = record["name"]
        tag = bytes.fromhex(record["salt"]) if record["format"] == FORMAT else b""
        known = record["format"] == FORMAT or (record["format"] == WITHOUT_SALT and ":" not in name)  # no tenant's
        return (name, tag) if known and path.name == set_file(name, tag) else None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
