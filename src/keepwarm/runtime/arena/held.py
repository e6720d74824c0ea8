"""What an arena holds, by its tokens, and how much of it a prompt can use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

from keepwarm.core.blocks import TokenIds, common_length
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.ports import Bytes, KVSource
from keepwarm.core.schedule import PAGE_TOKENS
from keepwarm.runtime.arena.gap import NO_GAP, Gap


@dataclass(frozen=True, eq=False)
class Held:
    """Tokens whose exact KV an arena holds, or a prompt that looks for it."""

    root: bytes  # `Namespace.exact_root`
    keys: Mapping[int, bytes]  # extra keys of regions, by position
    tokens: TokenIds
    cuts: tuple[int, ...] | None = None  # where its steps ended; None: this does not affect any bits
    gap: Gap = NO_GAP  # of an arena whose windowed layers do not hold every position

    def common(self, other: Held) -> int:
        """Return how many leading tokens of one serve the other: up to the last common step's end, if steps matter."""
        if self.root != other.root:
            return 0
        length = min(common_length(self.tokens, other.tokens), self._foreign(other))
        if self.cuts is None or other.cuts is None:
            return length if self.gap.serves(length) else self.gap.start
        ends = zip(self.cuts, other.cuts, strict=False)
        same = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1] and pair[0] <= length, ends)]
        return max((end for end in same if self.gap.serves(end)), default=0)

    def beside(self, prompt: Held) -> TokenIds:
        """Return its tokens, to explain where a prompt differs: up to where salts differ; none if steps matter."""
        if self.cuts is not None or self.root != prompt.root:
            return self.tokens[:0]
        return self.tokens[: self._foreign(prompt)]

    def _foreign(self, other: Held) -> int:
        """Return where the first region with different keys begins, or else the end of this one."""
        differ = [start for start in {*self.keys, *other.keys} if self.keys.get(start) != other.keys.get(start)]
        return min(*differ, len(self.tokens)) if differ else len(self.tokens)

    @property
    def blocks(self) -> int:
        return -(-len(self.tokens) // PAGE_TOKENS) if self.cuts is None else len(self.cuts)

    def cut(self, length: int) -> Held:
        """Return what is held up to a position."""
        cuts = None if self.cuts is None else tuple(end for end in self.cuts if end <= length)
        length = length if cuts is None else max(cuts, default=0)
        return self if len(self.tokens) <= length else replace(self, tokens=self.tokens[:length], cuts=cuts)


@dataclass(frozen=True, eq=False)
class KVCopy:
    """A copy of the KV of some positions, to be stored. Implements `KVSource`."""

    geometry: KVGeometry
    start: int
    planes: tuple[tuple[Bytes, Bytes], ...]  # keys and values of each layer

    @classmethod
    def of(cls, source: KVSource, start: int, end: int) -> KVCopy:
        layers = range(len(source.geometry.layers))
        planes = (tuple(source.read(layer, kv, start, end).copy() for kv in (0, 1)) for layer in layers)
        return cls(source.geometry, start, tuple((keys, values) for keys, values in planes))

    def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        return self.planes[layer][kv][:, start - self.start : end - self.start]
