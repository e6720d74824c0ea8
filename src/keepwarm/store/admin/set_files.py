"""The folder of registered tool sets: where a set lies, who writes there, how sets go from it for good.

`toolsets.registry` says what is in a file. Here only whose it is is read, so that a purge needs neither key nor model.
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
WITHOUT_SALT = 1  # the format that did not say whose a set is
_LOCK = ".lock"
_NAME_HEX = 32


def set_file(name: str, tag: bytes = b"") -> str:
    """Of a set under the salt with this tag (empty: none), in the folder of sets."""
    return f"{hashlib.sha256(tag + name.encode()).hexdigest()[:_NAME_HEX]}.json"


def writing_sets(folder: Path) -> AbstractContextManager[None]:
    """Held by who writes sets, and by who removes some: one thread of one process. Raises OSError."""
    return locked(folder / _LOCK)


def set_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Names of the sets in a folder, each with its salt's tag. Raises OSError."""
    for path in folder.glob("*.json"):
        if (found := _whose(path)) is not None:
            yield found


def purge_sets(store: Path, tags: Collection[bytes]) -> int:
    """Remove every set under salts with these tags from a store's folder; returns how many. What was set aside as
    damaged, what cannot be read and what was half written goes, too: nobody knows whose it is. Raises OSError."""
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
    """Name and salt's tag of a set; None when the file is damaged, or does not say. Raises OSError."""
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
