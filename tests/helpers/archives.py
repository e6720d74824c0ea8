"""A made-up prompt with its KV, and what an archive keeps of it."""

from __future__ import annotations

from pathlib import Path

from keepwarm.core.blocks import Block, TokenIds
from keepwarm.store import Archive
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, namespace, prompt

LENGTH = 64


CAP = 1 << 24


def ids_of(blocks: tuple[Block, ...]) -> list[bytes]:
    return [block.exact for block in blocks]


class Prompt:
    """A made-up prompt and its KV."""

    def __init__(self, seed: int = 0, length: int = LENGTH, step: int = 8) -> None:
        self.tokens: TokenIds = prompt(length, seed)
        self.blocks = blocks_of(self.tokens, step)
        self.ids = ids_of(self.blocks)
        self.kv = MemoryKV.random(UNEVEN, length, seed)

    def put(self, archive: Archive, first: int = 0, last: int | None = None) -> None:
        archive.put(self.kv, self.blocks[first:last], namespace())

    def loads(self, archive: Archive, end: int | None = None) -> dict[str, int]:
        """Load what is found; the loaded part must be equal to the bit."""
        refs = archive.lookup(self.ids)
        if not refs:
            return {}
        end = end or refs[-1].end
        refs = tuple(ref for ref in refs if ref.start < end)
        sink = MemoryKV(UNEVEN, len(self.tokens))
        taken = archive.load(refs, self.tokens[:end], end, sink)
        assert sink.same(self.kv, 0, end)
        assert sum(taken.values()) == end
        return taken


def only_run(folder: Path) -> Path:
    (found,) = (folder / "runs").iterdir()
    return found
