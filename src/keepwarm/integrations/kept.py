"""Finds, loads and stores the KV of prompts for engines that hand over a whole prompt's state at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from keepwarm.core.blocks import Chain, PrefixNames, TokenIds, chain, exact_name
from keepwarm.core.identity import Namespace, salt_key
from keepwarm.core.ports import BlockRef, Bytes, KVSink, KVSource
from keepwarm.core.schedule import PAGE_TOKENS
from keepwarm.core.snapshots import PURPOSE, snapshot_block, snapshot_id
from keepwarm.errors import CorruptRun
from keepwarm.integrations.tails import Tail, TailSink
from keepwarm.linker.prefix import matching_tokens
from keepwarm.store.archive import Archive

log = logging.getLogger(__name__)

_ATTEMPTS = 3  # lookups in all, as a run may turn out to be damaged or gone
_AT_ONCE = 512  # positions whose snapshots are looked up in one call
_WRITES = 2  # states that may wait to be copied
_NOTHING = np.empty(0, np.uint8)


class FillingSink(KVSink, Protocol):
    """A sink that makes what the engine takes."""

    def finish(self) -> Any:
        """Return the state in the engine's form, once all bytes are in place. Raises CorruptRun."""
        ...


class Place(Protocol):
    """Where an engine takes the state of a prompt's beginning."""

    def sink(self, tokens: int, tail: Bytes) -> FillingSink:
        """Return a sink for the state of `tokens` tokens. `tail` is the part that cannot be cut. Raises CorruptRun."""
        ...

    def put(self, whole: Any, tokens: TokenIds) -> bool:
        """Give the engine a finished state. False: it is refused."""
        ...


class Kept:
    """Pages of a prompt's keys and values, and snapshots of what cannot be cut, under one namespace and salt."""

    def __init__(self, archive: Archive, namespace: Namespace, place: Place, salt: str | None) -> None:
        self._archive = archive
        self._namespace = namespace
        self._snapshots = replace(namespace, purpose=PURPOSE)
        self._place = place
        self._keys = {0: salt_key(salt)} if salt is not None else {}
        self._room = threading.BoundedSemaphore(_WRITES)

    def _chain(self, tokens: TokenIds) -> Chain:
        return chain(tokens, [*range(PAGE_TOKENS, len(tokens), PAGE_TOKENS), len(tokens)], self._namespace, self._keys)

    # ---- keys and values of tokens ----

    def find(self, tokens: TokenIds) -> tuple[tuple[BlockRef, ...], int]:
        """Return the stored beginning of a prompt, and where it ends. At least the last token is left out."""
        return matching_tokens(self._chain(tokens), self._archive, 0, self._keys)

    def restore(self, tokens: TokenIds, above: int) -> dict[str, int]:
        """Put the stored beginning of a prompt into place if it is longer than `above` tokens. Return its tokens by
        tier; empty if nothing was put there."""
        return self._again(partial(self._restore, tokens, above))

    def _restore(self, tokens: TokenIds, above: int) -> dict[str, int]:
        refs, end = self.find(tokens)
        return self._load(tokens, refs, end, _NOTHING) if end > above else {}

    def _load(self, tokens: TokenIds, refs: Sequence[BlockRef], end: int, tail: Bytes) -> dict[str, int]:
        """Load keys and values up to `end`, and put them into place with the `tail`. Raises CorruptRun."""
        sink = self._place.sink(end, tail)
        taken = self._archive.load(refs, tokens[:end], end, sink)
        return taken if self._place.put(sink.finish(), tokens[:end]) else {}

    def _again(self, attempt: Callable[[], dict[str, int]]) -> dict[str, int]:
        """Attempt a restore. A run that turns out damaged or gone is out of use then, and another attempt finds what is
        left."""
        for _ in range(_ATTEMPTS):
            try:
                return attempt()
            except CorruptRun as error:
                log.warning("a stored prompt could not be loaded: %s", error)
        return {}

    # ---- states that cannot be cut ----

    def restore_whole(self, tokens: TokenIds, above: int) -> dict[str, int]:
        """Put the longest stored state of a beginning of a prompt into place, as `restore` does. The last token is left
        to compute."""
        return self._again(partial(self._restore_whole, tokens, above))

    def _restore_whole(self, tokens: TokenIds, above: int) -> dict[str, int]:
        for end, ref in self._states(tokens, above):
            refs, reached = self.find(tokens[: end + 1])
            if reached == end:
                sink = TailSink()
                self._archive.load([ref], tokens[end - 1 : end], end, sink)
                return self._load(tokens, refs, end, sink.data)
        return {}

    def _states(self, tokens: TokenIds, above: int) -> list[tuple[int, BlockRef]]:
        """Return stored snapshots after the first `above` tokens. Of each batch of positions, the last comes first."""
        names = self._names(tokens)
        for last in range(len(tokens) - 1, above, -_AT_ONCE):
            ids = {at: snapshot_id(names[at - 1]) for at in range(last, max(above, last - _AT_ONCE), -1)}
            found = self._archive.find([*ids.values()], far=True)
            if there := [(at, found[name]) for at, name in ids.items() if name in found]:
                return there
        return []

    def _names(self, tokens: TokenIds) -> list[bytes]:
        """Return the exact name of the block that would end after each token except the last."""
        above, raw, names = self._namespace.exact_root, tokens.tobytes(), list[bytes]()
        for start in range(0, len(tokens) - 1, PAGE_TOKENS):
            key = self._keys.get(start, b"")
            ends = range(start + 1, min(start + PAGE_TOKENS, len(tokens) - 1) + 1)
            names += [exact_name(above, raw[4 * start : 4 * end], key) for end in ends]
            above = names[-1]
        return names

    # ---- storing ----

    def put(
        self, source: KVSource, tail: Bytes, tokens: TokenIds, epoch: int, done: Callable[[], None] = lambda: None
    ) -> None:
        """Store the state after `tokens` in the background, unless it is stored: keys and values by token, and the
        `tail` that cannot be cut. A state that is waiting is not copied here, so its bytes must not change until `done`
        is called."""
        blocks = self._chain(tokens)
        self._room.acquire()

        def copied() -> None:
            self._room.release()
            done()

        names = PrefixNames(tokens, self._namespace, self._keys)
        self._archive.put(source, blocks[:], self._namespace, on_copied=copied, epoch=epoch, names=names)
        if len(tail):
            self._room.acquire()
            last = snapshot_block(blocks[-1])
            self._archive.put(Tail(tail), [last], self._snapshots, on_copied=self._room.release, epoch=epoch)
