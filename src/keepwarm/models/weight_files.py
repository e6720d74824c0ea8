"""Digests of weight files, for those who need a model's identity without loading it, and without torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from keepwarm.core.identity import json_digest
from keepwarm.errors import ModelNotFound
from keepwarm.models.places import gguf_parts

_FILES, _BYTES = "keepwarm weight files 1", "keepwarm weight bytes 1"
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.pt")


def folder_digest(folder: Path, cache: Path) -> str:
    """Return a digest of the bytes of a folder's weight files, for callers that do not load them with transformers.

    It is cached in the file `cache` for the same files (path, size, modification time, inode). Raises ModelNotFound
    when there are none, and OSError.
    """
    files = weight_files(folder)
    if not files:
        raise ModelNotFound(f"{folder} holds no weights; expected one of {', '.join(_WEIGHT_FILES)}")
    return files_digest(files, cache)


def files_digest(files: Sequence[Path], cache: Path, *, named: bool = True) -> str:
    """Return a digest of files' bytes, and if `named` of their names, cached as `folder_digest` does. Without names the
    order of the files counts. Raises OSError."""
    tag = _FILES if named else _BYTES
    key = json_digest(tag, file_stats(files))
    if known := read_cache(cache).get(key):
        return str(known)

    with ThreadPoolExecutor() as workers:
        found = [*workers.map(_sha256, files)]
    parts = sorted([path.name, each] for path, each in zip(files, found, strict=True)) if named else found
    value = json_digest(tag, parts)
    write_cache(cache, key, value)
    return value


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """Return a folder's weight files, sorted; of a GGUF file, that one and then those that are called its other parts.
    It may be whole by itself whatever it is called, so it is always there, and first."""
    if folder.is_file():
        return [folder, *(part for part in gguf_parts(folder) if part != folder and part.is_file())]
    return sorted({path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)})


def missing_weights(folder: Path) -> str:
    """Return what lacks of a folder's weights, by its indexes of several files; empty when nothing does.

    Reads no weights. A link to a file that is not there is no file. Raises OSError and ValueError for a bad index.
    """
    shards: set[str] = set()
    lacking = ""
    for index in sorted(folder.glob("*.index.json")):
        named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        absent = [name for name in named if not (folder / name).exists()]
        if not absent:
            return ""
        shards.update(named)
        lacking = f"{len(absent)} of {len(named)} files of weights are missing ({absent[0]})"
    if any(path.exists() and path.name not in shards for path in weight_files(folder)):
        return ""  # one file has it all
    return lacking or "there are no files of weights"


def file_stats(files: Sequence[Path]) -> list[tuple[str, int, int, int]]:
    """Return path, size, modification time and inode of each file: while they are the same, so are the bytes."""
    return [(str(f.resolve()), s.st_size, s.st_mtime_ns, s.st_ino) for f in files for s in (f.stat(),)]


def read_cache(cache: Path) -> dict[str, str]:
    """Return the cached findings about models, by digest; empty when the file is missing or damaged."""
    try:
        known = json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def write_cache(cache: Path, key: str, value: str) -> None:
    """Add one entry, completely or not at all."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        partial = cache.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps(read_cache(cache) | {key: value}))
        partial.replace(cache)
    except OSError:
        pass  # with a read-only cache folder it is only computed again
