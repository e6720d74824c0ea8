"""KV in plain numpy arrays, and small made-up prompts, for tests that need no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keepwarm.core.blocks import Block, Chain, TokenIds, chain, token_ids
from keepwarm.core.geometry import KVGeometry, LayerGeometry
from keepwarm.core.identity import ArithmeticIdentity, ModelIdentity, Namespace
from keepwarm.core.ports import Bytes
from keepwarm.core.sinks import PlainSink
from keepwarm.store.runfile.layout import Run, stored_blocks

# Key and value widths differ, and so do layers: what holds for this shape holds for simpler ones.
UNEVEN = KVGeometry((LayerGeometry(2, 8, 4), LayerGeometry(1, 16, 16), LayerGeometry(3, 4, 8)), "bfloat16")


class MemoryKV(PlainSink):
    """The KV of one sequence of `length` tokens: a `KVSource` and a `KVSink`. Starts as zeros.

    `commits` lists the `(layer, start, end)` of every commit, in order.
    """

    def __init__(self, geometry: KVGeometry, length: int) -> None:
        self._geometry = geometry
        self.commits: list[tuple[int, int, int]] = []
        self.arrays: list[tuple[Bytes, Bytes]] = []
        for layer, shape in enumerate(geometry.layers):
            keys, values = (
                np.zeros((shape.kv_heads, length, geometry.head_bytes(layer, kv)), np.uint8) for kv in (0, 1)
            )
            self.arrays.append((keys, values))

    @classmethod
    def random(cls, geometry: KVGeometry, length: int, seed: int = 0) -> MemoryKV:
        """Bytes drawn at random; equal seeds give equal bytes."""
        made = cls(geometry, length)
        generator = np.random.default_rng(seed)
        for pair in made.arrays:
            for array in pair:
                array[...] = generator.integers(0, 256, array.shape, np.uint8)
        return made

    @property
    def geometry(self) -> KVGeometry:
        return self._geometry

    def view(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        """Part of `KVSink`."""
        return self.arrays[layer][kv][:, start:end]

    def commit(self, layer: int, start: int, end: int) -> None:
        """Part of `KVSink`."""
        self.commits.append((layer, start, end))

    def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        """Part of `KVSource`."""
        return self.arrays[layer][kv][:, start:end]

    def same(self, other: MemoryKV, start: int, end: int) -> bool:
        """Whether both hold the same bytes at positions `[start, end)`."""
        return all(
            np.array_equal(mine[:, start:end], theirs[:, start:end])
            for ours, others in zip(self.arrays, other.arrays, strict=True)
            for mine, theirs in zip(ours, others, strict=True)
        )


def namespace(weights: str = "weights", torch: str = "2.9") -> Namespace:
    """A made-up namespace; another argument gives another one."""
    return Namespace(
        ModelIdentity(weights, "config", "bfloat16", "none", "{}", "tokenizer"),
        ArithmeticIdentity(torch, "cpu", "avx512", 2, "eager"),
    )


def prompt(length: int, seed: int = 0) -> TokenIds:
    """Token ids drawn at random; equal seeds give equal ids, and longer ones continue shorter ones."""
    return token_ids(np.random.default_rng(seed).integers(0, 50_000, 1 << 16)[:length])


def blocks_of(tokens: TokenIds, step: int = 8, space: Namespace | None = None) -> Chain:
    """The blocks of a prompt cut every `step` tokens."""
    cuts = [*range(step, len(tokens), step), len(tokens)]
    return chain(tokens, cuts, space or namespace())


def make_run(source: MemoryKV, blocks: Sequence[Block], space: Namespace | None = None) -> Run:
    """A run of some consecutive blocks of a prompt whose KV `source` holds."""
    tokens = np.concatenate([block.tokens for block in blocks])
    return Run.copy_from(source, stored_blocks(blocks), tokens, (space or namespace()).describe())
