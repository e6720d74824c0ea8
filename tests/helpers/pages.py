"""A store of token sequences whose KV says which tokens it stands on."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from keepwarm.core.blocks import PrefixNames, TokenIds, chain, common_length, token_ids
from keepwarm.core.schedule import Pages
from keepwarm.errors import CorruptRun
from keepwarm.linker.prefix import matching_tokens
from keepwarm.store import Archive
from keepwarm.testing.kv import UNEVEN, MemoryKV, namespace

CAP = 1 << 26
GRID = Pages(1024)


PAGE = GRID.page


def kv_of(tokens: TokenIds) -> MemoryKV:
    """KV that depends on the tokens at and before each position, and on nothing else."""
    state = np.cumsum((tokens.astype(np.uint64) + 1) * (2 * np.arange(len(tokens), dtype=np.uint64) + 1)) % 65521
    made = MemoryKV(UNEVEN, len(tokens))
    for layer, pair in enumerate(made.arrays):
        for kv, array in enumerate(pair):
            heads, _, width = array.shape
            mixed = state[None, :, None] * (1 + np.arange(width, dtype=np.uint64)) + np.uint64(layer * 7 + kv * 3)
            array[...] = ((mixed + np.arange(heads, dtype=np.uint64)[:, None, None]) >> np.uint64(3)).astype(np.uint8)
    return made


class Store:
    """An archive, and what was put into it."""

    def __init__(self, folder: Path, keys: dict[int, bytes] | None = None, max_ram: int = CAP) -> None:
        self.folder, self.keys, self.max_ram = folder, keys or {}, max_ram
        self.archive = self._open()
        self.known: list[TokenIds] = []

    def _open(self) -> Archive:
        return Archive.open(self.folder, max_ram=self.max_ram, max_disk=CAP)

    def reopen(self) -> None:
        self.archive.close()
        self.archive = self._open()

    def find(self, tokens: TokenIds) -> tuple[int, dict[str, int]]:
        """How much of a prompt is found, loaded and compared; and from which tiers."""
        blocks = chain(tokens, GRID.cuts(len(tokens), regions=self.keys), namespace(), self.keys)
        refs, end = matching_tokens(blocks, self.archive, 0, self.keys)
        if not end:
            return 0, {}
        sink = MemoryKV(UNEVEN, len(tokens))
        try:
            taken = self.archive.load(refs, tokens[:end], end, sink)
        except CorruptRun:  # found out meanwhile, and taken out of use
            return self.find(tokens)
        assert sink.same(kv_of(tokens), 0, end)
        assert sum(taken.values()) == end
        return end, taken

    def put(self, tokens: TokenIds, *, shared: bool = True) -> int:
        """Store what is not found of a prompt; returns how many tokens were written."""
        before = self._tokens()
        found, _ = self.find(tokens)
        blocks = chain(tokens, GRID.cuts(len(tokens), regions=self.keys), namespace(), self.keys)
        fresh = [block for block in blocks if block.end > found]
        names = PrefixNames(tokens, namespace(), self.keys) if shared else None
        self.archive.put(kv_of(tokens), fresh, namespace(), names=names)
        self.archive.flush()
        self.known.append(tokens)
        return self._tokens() - before

    def best(self, tokens: TokenIds) -> int:
        return min(max((common_length(each, tokens) for each in self.known), default=0), len(tokens) - 1)

    def _tokens(self) -> int:
        return sum(entry.tokens for entry in self.archive.contents.entries())


def ids(count: int, seed: int) -> TokenIds:
    return token_ids(random.Random(seed).choices(range(50), k=count))


def joined(*parts: TokenIds) -> TokenIds:
    return token_ids(np.concatenate(parts))
