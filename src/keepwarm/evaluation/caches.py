"""Caches of the simulator: the RAM tier's own code, with runs that have names and sizes but no KV.

`TokenCache` matches as the engine does under invariant arithmetic, with the engine's `Pages` and `matching_tokens`.
`BlockCache` takes the trace's blocks whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from operator import eq
from typing import ClassVar, NamedTuple, Protocol, cast

from keepwarm.core.blocks import Block, Chain, TokenIds, token_ids
from keepwarm.core.ports import BlockIndex, BlockRef
from keepwarm.core.schedule import Pages
from keepwarm.linker.prefix import matching_tokens
from keepwarm.store.eviction import PolicyName, policy
from keepwarm.store.ram.tier import RamTier
from keepwarm.store.runfile.layout import Run

_ROOT = -1
_NO_TOKENS = token_ids([])


class Cache(Protocol):
    """One replica's cache."""

    def serve(self, nodes: Sequence[int], length: int) -> int:
        """Answer a prompt of `length` tokens: note the use, store what was not found, and return how many tokens
        were found."""
        ...


class _Block(NamedTuple):
    """The fields of a stored block that the RAM tier's index reads."""

    id: int
    ordinal: int
    parent_prefix: int
    start: int = 0
    length: int = 1
    prefix: int = 0
    salts: tuple[bytes, ...] = ()
    shared: bytes = b""

    @property
    def content(self) -> int:
        return self.id

    @property
    def parent(self) -> int:
        return self.parent_prefix

    @property
    def behind(self) -> int:
        return self.parent_prefix

    @property
    def end(self) -> int:
        return self.start + self.length


class _Run:
    """The fields of a `store.runfile.layout.Run` that the RAM tier reads."""

    __slots__ = ("blocks", "id", "nbytes", "parent", "start")
    tokens: ClassVar[TokenIds] = _NO_TOKENS

    def __init__(self, run_id: str, parent: int, blocks: Iterable[tuple[int, int, int]]) -> None:
        """`blocks`: id, first position and tokens of each."""
        self.id = run_id
        self.parent = above = parent
        self.blocks: list[_Block] = []
        for ordinal, (block_id, start, length) in enumerate(blocks):
            self.blocks.append(_Block(block_id, ordinal, above, start, length))
            above = block_id
        self.start = self.blocks[0].start
        self.nbytes = sum(block.length for block in self.blocks)


class _Tier:
    """The RAM tier, with numbers as names."""

    def __init__(self, name: PolicyName, capacity: int) -> None:
        self._tier = RamTier(capacity, policy=policy(name, capacity))
        self._made = 0

    def holds(self, name: int) -> bool:
        return self._tier.find(cast("bytes", name)) is not None

    def lookup(self, names: Sequence[int]) -> tuple[BlockRef, ...]:
        return self._tier.lookup(cast("Sequence[bytes]", names))

    def touch(self, name: int) -> None:
        """Note a use of a block, then of each block before it, back to the first, which is therefore evicted last."""
        while (held := self._tier.find(cast("bytes", name))) is not None:
            self._tier.touch(held[0].id)
            name = cast("int", held[0].parent)

    def store(self, parent: int, blocks: Iterable[tuple[int, int, int]]) -> None:
        self._made += 1
        self._tier.put(cast("Run", _Run(str(self._made), parent, blocks)))


class BlockCache:
    """Finds a prompt's blocks whole or not at all. Its last, incomplete block counts as found with its tokens."""

    def __init__(self, name: PolicyName, blocks: int, block: int) -> None:
        self._block = block
        self._tier = _Tier(name, blocks)  # each counts as one

    def serve(self, nodes: Sequence[int], length: int) -> int:
        """See `Cache`."""
        known = leading(self._tier.holds, nodes)
        above = nodes[known - 1] if known else _ROOT
        self._tier.touch(above)
        if known < len(nodes):
            self._tier.store(above, [(node, known + at, 1) for at, node in enumerate(nodes[known:])])
        return min(known * self._block, length)


class TokenCache:
    """Matches pages to the first token that differs, as the engine does where a row's bits depend only on the tokens
    before it.

    A trace says only of whole blocks whether they are equal. So its blocks are the pages, and inside a page two prompts
    agree on as much of a block as both hold. Capacity is given in blocks and counted in tokens.
    """

    def __init__(self, name: PolicyName, blocks: int, block: int) -> None:
        self._tier = _Tier(name, blocks * block)
        self._grid = Pages(block, page=block)
        self._parts: dict[int, dict[int, int]] = {}  # node -> tokens of it that a prompt ended with -> their name
        self._named = _ROOT

    def serve(self, nodes: Sequence[int], length: int) -> int:
        """See `Cache`. A last node that is not known (`traces.UNKNOWN`) equals no other."""
        blocks = self._blocks(nodes, length)
        refs, reached = matching_tokens(blocks, cast("BlockIndex", self), 0, {})
        if refs:
            self._tier.touch(cast("int", refs[-1].id))
        whole = sum(takewhile(bool, map(eq, blocks.exact, [ref.id for ref in refs])))
        if whole < len(blocks):
            above = cast("int", blocks[whole - 1].exact) if whole else _ROOT
            self._tier.store(above, [(cast("int", each.exact), each.start, each.length) for each in blocks[whole:]])
        return reached

    def _blocks(self, nodes: Sequence[int], length: int) -> Chain:
        """Return the prompt's pages. Real pages are named by hashes, these by numbers, and `prefix` is the node."""
        ends = self._grid.cuts(length)
        starts = (0, *ends[:-1])
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        named = zip(nodes, lengths, strict=True)
        names = [node if length == self._grid.page else self._part(node, length) for node, length in named]

        def block(number: int) -> Block:
            above = names[number - 1] if number else _ROOT
            numbers = cast("tuple[bytes, bytes, bytes, bytes]", (names[number], nodes[number], above, above))
            return Block(starts[number], ends[number], _NO_TOKENS, *numbers)

        return Chain(ends, cast("list[bytes]", names), block)

    def _part(self, node: int, length: int) -> int:
        """Return the name of the first `length` tokens of a node."""
        parts = self._parts.setdefault(node, {}) if node >= 0 else {}
        if length not in parts:
            self._named -= 1
            parts[length] = self._named
        return parts[length]

    # the part of core.ports.BlockIndex that a match to the token uses

    def lookup(self, ids: Sequence[bytes]) -> tuple[BlockRef, ...]:
        """See `core.ports.BlockIndex`."""
        return self._tier.lookup(cast("Sequence[int]", ids))

    def continuing(self, block: Block, key: bytes) -> tuple[tuple[BlockRef, ...], int] | None:
        """See `core.ports.BlockIndex`."""
        node = cast("int", block.prefix)
        held = self._tier.lookup([node])
        for length in sorted(self._parts.get(node, ()), reverse=True):
            held = held or self._tier.lookup([self._parts[node][length]])
        return ((held[0],), min(held[0].length, block.length)) if held else None

    def beginnings(self, rests: Sequence[tuple[Block, BlockRef, bytes]]) -> list[tuple[BlockRef, ...] | None]:
        """See `core.ports.BlockIndex`: pages are whole here."""
        return [None] * len(rests)

    def arrivals(self) -> int:
        """See `core.ports.BlockIndex`."""
        return 0

    def arrives(self, block: Block, common: int, since: int | None = None) -> bool:
        """See `core.ports.BlockIndex`."""
        return False


def leading(holds: Callable[[int], object], nodes: Sequence[int]) -> int:
    """Count the leading nodes that are held, with few calls: a child is never held without its parent."""
    known, limit, middle = 0, len(nodes), len(nodes) - 1
    while known < limit:
        if holds(nodes[middle]):
            known = middle + 1
        else:
            limit = middle
        middle = (known + limit) // 2
    return known
