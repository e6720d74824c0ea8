"""A bundle's file format: a safetensors file around a run file. `store.admin.bundle` says what a bundle is.

    8 bytes   header length, little endian
    header    JSON, padded with spaces so that the payload starts at a multiple of 4096
    payload   `run` U8 [n]: a run file (`store.runfile.header`), never encrypted; then `snapshot.000`, ... U8 [m]: one
              for each snapshot of recurrent state along the prompt

`__metadata__` holds the bundle's version, the prompt's names, a note if there is one (such as the tool set that the
prompt belongs to; version 2), the run file's SHA-256, the size and SHA-256 of each snapshot's file if there are any
(version 3), a signature (Ed25519, over all other metadata) or an empty string, and a checksum like a run's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from keepwarm.core.identity import canonical_json, json_text
from keepwarm.errors import BundleError, CorruptRun, StoreTooNew
from keepwarm.store.runfile.header import ALIGNMENT
from keepwarm.store.runfile.source import FileSource

VERSION = 3
_NOTED = 2  # version of a bundle without snapshots
_PLAIN = 1  # and without a note
MAX_HEADER = 1 << 20  # bytes


def metadata(
    names: Sequence[str],
    sha256: bytes,
    signature: bytes,
    note: Mapping[str, Any],
    snapshots: Sequence[tuple[int, bytes]] = (),
) -> dict[str, str]:
    """Return all metadata except the checksum. `snapshots`: size and SHA-256 of each one's file."""
    carried = [{"bytes": nbytes, "sha256": digest.hex()} for nbytes, digest in snapshots]
    return {
        "keepwarm_bundle": str(VERSION if carried else _NOTED if note else _PLAIN),
        "names": canonical_json(list(names)),
        **({"note": json_text(dict(note))} if note else {}),  # keeps its order: it may describe tools
        "run_sha256": sha256.hex(),
        **({"snapshots": canonical_json(carried)} if carried else {}),
        "signature": signature.hex(),
    }


def snapshots_in(meta: Mapping[str, str]) -> list[tuple[int, bytes]]:
    """Size and SHA-256 of each snapshot's file. Raises what `json.loads` does, KeyError and TypeError."""
    carried = json.loads(meta.get("snapshots", "[]"))
    return [(int(one["bytes"]), bytes.fromhex(one["sha256"])) for one in carried]


def signed_part(meta: Mapping[str, str]) -> bytes:
    """The bytes that a signature covers."""
    return canonical_json({k: v for k, v in meta.items() if k not in ("signature", "header_xxh3")}).encode()


def encode(meta: Mapping[str, str], size: int) -> bytes:
    """Return the bytes before a run of `size` bytes and the snapshots that follow it."""
    checked = {**meta, "header_xxh3": xxhash.xxh3_128(canonical_json(dict(meta)).encode()).hexdigest()}
    names = ["run", *(f"snapshot.{number:03d}" for number in range(len(snapshots_in(meta))))]
    tensors: dict[str, Any] = {"__metadata__": checked}
    at = 0
    for name, nbytes in zip(names, [size, *(nbytes for nbytes, _ in snapshots_in(meta))], strict=True):
        tensors[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(tensors, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def opened(file: Path) -> Iterator[tuple[int, dict[str, str], int, int]]:
    """Open a bundle: yields its file descriptor, its metadata, and the offset and size of its run in bytes. Raises
    BundleError, StoreTooNew and OSError."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        source = FileSource(fd)
        size = source.size
        try:
            length = int.from_bytes(source.read(8, 0), "little")
            if length > MAX_HEADER or (8 + length) % ALIGNMENT:
                raise BundleError(f"{file} is no bundle: expected a file that `keepwarm export` wrote")
            raw = source.read(length, 8)
            meta = dict(json.loads(raw)["__metadata__"])
            if "keepwarm_bundle" not in meta:
                raise BundleError(f"{file} is no bundle: expected a file that `keepwarm export` wrote")
            meta.pop("header_xxh3")
            if int(meta["keepwarm_bundle"]) > VERSION:
                raise StoreTooNew(f"{file} is a bundle of version {meta['keepwarm_bundle']}; use a newer Keepwarm")
            names = json.loads(meta["names"])
            if not all(isinstance(name, str) for name in names):
                raise CorruptRun("a name is no text")
            signature, sha256 = bytes.fromhex(meta["signature"]), bytes.fromhex(meta["run_sha256"])
            note = json.loads(meta.get("note", "{}"))
            snapshots = snapshots_in(meta)
            nbytes = size - 8 - length - sum(each for each, _ in snapshots)
            if encode(metadata(names, sha256, signature, note, snapshots), nbytes)[8:] != raw:
                raise CorruptRun("its header does not match its checksum, or its size")
        except (CorruptRun, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise damaged(file, error) from error
        yield fd, meta, 8 + length, nbytes
    finally:
        os.close(fd)


def damaged(file: Path, error: Exception) -> BundleError:
    """Return the error for a bundle whose bytes are inconsistent."""
    return BundleError(f"{file} is damaged, nothing was imported: {error}; copy or export it again")


class Noted(FileSource):
    """A file source that remembers what was read. So the bytes that were parsed are the bytes that are hashed, even if
    another process writes to the file."""

    def __init__(self, fd: int, end: int) -> None:
        """`end` is taken as the end of the file, since other runs follow in it."""
        super().__init__(fd)
        self._end = end
        self._parts: dict[int, bytes] = {}

    @property
    def size(self) -> int:
        return min(self._end, super().size)

    def read(self, count: int, offset: int) -> bytes:
        return self._parts.setdefault(offset, super().read(count, offset))

    @property
    def said(self) -> bytes:
        """Everything that was read, in the file's order."""
        return b"".join(self._parts[offset] for offset in sorted(self._parts))
