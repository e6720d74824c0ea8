"""Store pages as blocks, for engines that name pages by their own hashes and hand over only bytes.

A page is a block of one token, which is made from the hash and compared on load like any token. Its bytes are one
layer's keys (the first half) and values (the second). Pages form no chain: a run holds pages that were stored together.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import numpy as np

from keepwarm.core.blocks import Block, token_ids
from keepwarm.core.geometry import KVGeometry, LayerGeometry
from keepwarm.core.identity import Namespace, digest
from keepwarm.core.ports import BlockRef, Bytes
from keepwarm.core.sinks import PlainSink
from keepwarm.errors import CorruptRun
from keepwarm.store.archive import Archive

_THREADS = 4  # loads of runs at a time
_WRITES = 4  # writes that may wait to be copied


class HashedPages:
    """Pages of `nbytes` bytes each under one namespace, by the engine's hashes. Safe for use from several threads."""

    def __init__(self, archive: Archive, namespace: Namespace, nbytes: int) -> None:
        self._archive = archive
        self._namespace = namespace
        self.nbytes = nbytes
        half = nbytes // 2
        self._geometry = KVGeometry((LayerGeometry(1, half, nbytes - half),), "float8_e4m3fn")
        self._loaders = ThreadPoolExecutor(_THREADS, thread_name_prefix="keepwarm-hashed-pages")
        self._room = threading.BoundedSemaphore(_WRITES)

    def close(self) -> None:
        """End the loaders. The archive's owner closes the archive."""
        self._loaders.shutdown(wait=True, cancel_futures=True)

    def find(self, keys: Sequence[bytes]) -> list[BlockRef | None]:
        """Return where each page is, in its fastest tier; None for a page that is not stored."""
        ids = [self._name(key) for key in keys]
        found = self._archive.find(ids)
        if far := [name for name in ids if name not in found]:
            found = found | self._archive.remotes.find(far)
        return [found.get(name) for name in ids]

    def load(self, keys: Sequence[bytes], targets: Sequence[Bytes]) -> list[bool]:
        """Load pages into `targets`, `[nbytes]` each. Return for each whether it arrived. Targets of others stay
        unchanged."""
        places = [(at, ref) for at, ref in enumerate(self.find(keys)) if ref is not None]
        # Adjacent pages of one run are read at once.
        near = groupby(enumerate(places), lambda each: (each[1][1].run_id, each[1][1].ordinal - each[0]))
        groups = [[place for _, place in group] for _, group in near]
        arrived = [False] * len(keys)
        for good, group in zip(
            self._loaders.map(lambda group: self._load(keys, targets, group), groups), groups, strict=True
        ):
            for at, _ in group:
                arrived[at] = good
        return arrived

    def _load(self, keys: Sequence[bytes], targets: Sequence[Bytes], group: list[tuple[int, BlockRef]]) -> bool:
        refs = [ref for _, ref in group]
        tokens = token_ids([_token(keys[at]) for at, _ in group])
        sink = _Buffer(self._geometry, np.empty((len(group), self.nbytes), np.uint8), refs[0].start)
        try:
            self._archive.load(refs, tokens, refs[-1].end, sink)
        except CorruptRun:  # it was logged, counted and taken out of use already; a run that vanished is a miss
            return False
        for (at, _), page in zip(group, sink.memory, strict=True):
            targets[at][...] = page
        return True

    def store(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        """Copy pages, `[nbytes]` each, and store them in the background. Skip those that are stored already."""
        missing = [at for at, ref in enumerate(self.find(keys)) if ref is None]
        for _, group in groupby(enumerate(missing), lambda each: each[1] - each[0]):
            places = [at for _, at in group]
            memory = np.stack([pages[at] for at in places])
            self._room.acquire()
            self._archive.put(
                _Buffer(self._geometry, memory, 0),
                self._blocks([keys[at] for at in places]),
                self._namespace,
                on_copied=self._room.release,
            )

    def _name(self, key: bytes) -> bytes:
        return digest("keepwarm page 1", self._namespace.exact_root, key)

    def _blocks(self, keys: Sequence[bytes]) -> list[Block]:
        blocks: list[Block] = []
        exact, prefix = self._namespace.exact_root, self._namespace.prefix_root
        for at, key in enumerate(keys):
            blocks.append(
                Block(
                    start=at,
                    end=at + 1,
                    tokens=token_ids([_token(key)]),
                    exact=self._name(key),
                    prefix=digest("keepwarm page prefix 1", self._namespace.prefix_root, key),
                    parent_exact=exact,
                    parent_prefix=prefix,
                )
            )
            exact, prefix = blocks[-1].exact, blocks[-1].prefix
        return blocks


def _token(key: bytes) -> int:
    return int.from_bytes(key[:4], "little")


class _Buffer(PlainSink):
    """The bytes of pages, `[pages, nbytes]`, for positions from `start` on: a `KVSource` and a `KVSink`."""

    def __init__(self, geometry: KVGeometry, memory: Bytes, start: int) -> None:
        self.geometry = geometry
        self.memory = memory
        self._start = start

    def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        return self.view(layer, kv, start, end)

    def view(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        half = self.geometry.layers[0].key_dim
        rows = self.memory[start - self._start : end - self._start]
        return (rows[:, half:] if kv else rows[:, :half])[None]
