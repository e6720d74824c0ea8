"""Archives with a remote tier, what lies in it, and damage to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any

from keepwarm.core.blocks import chain
from keepwarm.core.identity import salt_key
from keepwarm.errors import CorruptRun
from keepwarm.store import Archive
from keepwarm.store.remote.limits import Limits
from keepwarm.store.remote.write_behind import Behind
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, namespace, prompt

LENGTH = 64


PATIENT = Limits(timeout=20.0, load_timeout=20.0)


NUMBERS = count()


class Prompt:
    """A made-up prompt and its KV."""

    def __init__(self, seed: int = 0, length: int = LENGTH, step: int = 8, salt: str | None = None) -> None:
        self.tokens = prompt(length, seed)
        self.blocks = blocks_of(self.tokens, step)
        if salt is not None:
            cuts = [block.end for block in self.blocks]
            self.blocks = chain(self.tokens, cuts, namespace(), {0: salt_key(salt)})
        self.ids = [block.exact for block in self.blocks]
        self.kv = MemoryKV.random(UNEVEN, length, seed)

    def put(self, archive: Archive, first: int = 0, last: int | None = None) -> None:
        archive.put(self.kv, self.blocks[first:last], namespace())
        archive.flush()

    def loads(self, archive: Archive) -> dict[str, int]:
        """Load what is found, looking up again as the engine does; it must be equal to the bit."""
        for _ in range(8):
            refs = archive.lookup(self.ids)
            if not refs:
                return {}
            end = refs[-1].end
            sink = MemoryKV(UNEVEN, len(self.tokens))
            try:
                taken = archive.load(refs, self.tokens[:end], end, sink)
            except CorruptRun:
                continue
            assert sink.same(self.kv, 0, end)
            return taken
        raise AssertionError("looked up again and again")


def behind(archive: Archive) -> Behind:
    return next(iter(archive.remotes))


def eventually(what: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def damage(archive: Archive) -> None:
    """Change one byte of every run's KV in the remote tier."""
    one = behind(archive)
    for mark in one.books.marks():
        head = one.books._head_now(mark.run_id)
        assert head is not None
        key = f"v1/r/{mark.run_id}/body"
        body = bytearray(one.tier.blobs.body(key, head.body_bytes, 20.0, whole=True).read(head.body_bytes, 0))
        body[len(body) // 2] ^= 1
        one.tier.blobs.put_body(key, memoryview(bytes(body)), 20.0)


class Watched:
    """Passes everything on to a service, after telling of it."""

    def __init__(self, blobs: Any, tell: Callable[[str, Any], None]) -> None:
        self._blobs = blobs
        self._tell = tell

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._blobs, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            self._tell(name, arguments[0] if arguments else None)
            return found(*arguments, **named)

        return call


def watch(archive: Archive, tell: Callable[[str, Any], None]) -> None:
    books = behind(archive).books
    books._blobs = Watched(books._blobs, tell)  # type: ignore[assignment]
