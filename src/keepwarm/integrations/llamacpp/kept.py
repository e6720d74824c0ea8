"""Finds, loads and stores the KV of prompts in the form of one context, or of a server's slots."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from keepwarm.core.blocks import Chain, PrefixNames, TokenIds, chain, exact_name
from keepwarm.core.identity import Namespace, salt_key
from keepwarm.core.ports import BlockRef, Bytes
from keepwarm.core.schedule import PAGE_TOKENS
from keepwarm.core.snapshots import PURPOSE, snapshot_block, snapshot_id
from keepwarm.errors import CorruptRun
from keepwarm.integrations.llamacpp.form import State
from keepwarm.integrations.llamacpp.memory import StateSink, StateSource, Tail, TailSink
from keepwarm.linker.prefix import matching_tokens
from keepwarm.store.archive import Archive

log = logging.getLogger(__name__)

_ATTEMPTS = 3  # lookups in all, as a run may turn out to be damaged or gone
_AT_ONCE = 512  # positions whose snapshots are looked up in one call
_WRITES = 2  # states that may wait to be copied
_NOTHING = np.empty(0, np.uint8)


class Place(Protocol):
    """Where a state goes: a context, or a slot of a server."""

    def sink(self, tokens: int, tail: Bytes) -> StateSink:
        """Return an empty state to fill, for `put`."""
        ...

    def put(self, data: Bytes, tokens: TokenIds) -> bool:
        """Replace the place's state by that of `tokens`. Return False if it is refused."""
        ...


class Kept:
    """Pages of a prompt's keys and values, and snapshots of what cannot be cut, under one namespace and salt."""

    def __init__(self, archive: Archive, namespace: Namespace, place: Place, salt: str | None) -> None:
        self._archive = archive
        self._namespace = namespace
        self._snapshots = replace(namespace, purpose=PURPOSE)
        self._target = place
        self._keys = {0: salt_key(salt)} if salt is not None else {}
        self._room = threading.BoundedSemaphore(_WRITES)

    def _chain(self, tokens: TokenIds) -> Chain:
        return chain(tokens, [*range(PAGE_TOKENS, len(tokens), PAGE_TOKENS), len(tokens)], self._namespace, self._keys)

    # ---- keys and values of tokens ----

    def find(self, tokens: TokenIds) -> tuple[tuple[BlockRef, ...], int]:
        """Return the stored beginning of a prompt, and where it ends. At least the last token is left out."""
        return matching_tokens(self._chain(tokens), self._archive, 0, self._keys)

    def restore(self, tokens: TokenIds, above: int) -> dict[str, int]:
        """Put the stored beginning of a prompt into the context if it is longer than `above` tokens. Return its tokens
        by tier; empty if nothing was put there."""
        return self._again(partial(self._restore, tokens, above))

    def _restore(self, tokens: TokenIds, above: int) -> dict[str, int]:
        refs, end = self.find(tokens)
        return self._place(tokens, refs, end, _NOTHING) if end > above else {}

    def _place(self, tokens: TokenIds, refs: Sequence[BlockRef], end: int, tail: Bytes) -> dict[str, int]:
        """Load keys and values up to `end`, and replace the context's state. Raises CorruptRun."""
        sink = self._target.sink(end, tail)
        taken = self._archive.load(refs, tokens[:end], end, sink)
        return taken if self._target.put(sink.finish(), tokens[:end]) else {}

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
        """Put the longest stored state of a beginning of a prompt into the context, as `restore` does. Its last token
        is left to compute."""
        return self._again(partial(self._restore_whole, tokens, above))

    def _restore_whole(self, tokens: TokenIds, above: int) -> dict[str, int]:
        for end, ref in self._states(tokens, above):
            refs, reached = self.find(tokens[: end + 1])
            if reached == end:
                sink = TailSink()
                self._archive.load([ref], tokens[end - 1 : end], end, sink)
                return self._place(tokens, refs, end, sink.data)
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

    def put(self, state: State, tokens: TokenIds, epoch: int, done: Callable[[], None] = lambda: None) -> None:
        """Store a context's state after `tokens` in the background, unless it is stored. A state that is waiting is not
        copied here, so its bytes must not change until `done` is called."""
        blocks = self._chain(tokens)
        self._room.acquire()

        def copied() -> None:
            self._room.release()
            done()

        names = PrefixNames(tokens, self._namespace, self._keys)
        taken = (StateSource(state), blocks[:], self._namespace)
        self._archive.put(*taken, on_copied=copied, epoch=epoch, names=names)
        if len(state.tail):
            self._room.acquire()
            last = snapshot_block(blocks[-1])
            self._archive.put(Tail(state.tail), [last], self._snapshots, on_copied=self._room.release, epoch=epoch)
