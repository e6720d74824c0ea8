"""A run that goes into a bundle or comes out of it: described, verified, stored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from keepwarm.core.ports import Bytes
from keepwarm.errors import CorruptRun
from keepwarm.store.admin.bundle_file import Noted
from keepwarm.store.catalog.rows import Orphan
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.runfile.header import read_header
from keepwarm.store.runfile.new_run import NewRun
from keepwarm.store.runfile.reader import RunReader

_CHUNK = 1 << 20  # bytes per read


@dataclass(frozen=True, eq=False)
class Carried:
    """A run in an open bundle: its header is verified, and `layers` verifies the rest."""

    reader: RunReader
    said: bytes  # its bytes before the KV, as read
    sha256: str  # of all its bytes, as the bundle states it

    @classmethod
    def read(cls, fd: int, at: int, nbytes: int, sha256: str) -> Carried:
        """Read the run of `nbytes` bytes from byte `at` on. Raises CorruptRun."""
        source = Noted(fd, at + nbytes)
        reader = RunReader(fd, read_header(source, at=at))
        return cls(reader, source.said, sha256)

    @property
    def outline(self) -> NewRun:
        header = self.reader.header
        return NewRun(header.run_id, header.geometry, header.namespace, header.tokens, header.blocks)

    def layers(self) -> Iterator[tuple[Bytes, Bytes]]:
        """Yield the keys and values of the whole run, layer by layer. Every block's checksum is compared. Before the
        last layer is yielded, so is the digest of all bytes: those before the KV, and the KV. Raises CorruptRun."""
        header, digest = self.reader.header, hashlib.sha256(self.said)
        left = len(header.geometry.layers)
        self._compare(digest.hexdigest(), left)
        for layer in range(len(header.geometry.layers)):
            keys, values = (np.empty(self.reader.layout.shape(layer, kv), np.uint8) for kv in (0, 1))
            self.reader.load_layer(layer, header.blocks, header.blocks[-1].end, keys, values)
            digest.update(keys.data)
            digest.update(values.data)
            left -= 1
            self._compare(digest.hexdigest(), left)
            yield keys, values

    def _compare(self, found: str, left: int) -> None:
        if not left and found != self.sha256:
            raise CorruptRun("its SHA-256 is another one than its header says")

    def verify(self) -> None:
        """Read all layers, which verifies them. Raises CorruptRun."""
        for _ in self.layers():
            pass


def keep(disk: DiskTier, run: Carried, missing: Sequence[int], epoch: int) -> None:
    """Store the `missing` blocks of a run. The whole run is verified before they are published. Raises what
    `DiskTier.store` does, including CorruptRun."""
    if not missing:
        run.verify()
        return
    outline, first, last = run.outline, missing[0], missing[-1] + 1
    part, layout = outline.part(first, last), run.reader.layout
    taken = (
        tuple(plane[:, slice(*layout.rows(layer, outline.blocks[first:last]))] for plane in pair)
        for layer, pair in enumerate(run.layers())
    )
    if disk.store(part, ((keys, values) for keys, values in taken), epoch) is None:
        raise Orphan(part.id)


def sha256_of(path: Path, at: int, nbytes: int) -> bytes:
    """Return the SHA-256 of `nbytes` bytes of a file, from byte `at` on."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(at)
        while nbytes and (read := file.read(min(nbytes, _CHUNK))):
            digest.update(read)
            nbytes -= len(read)
    return digest.digest()
