"""Messages from the scheduler's half to the workers' halves in one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from keepwarm.core.blocks import TokenIds
from keepwarm.core.ports import BlockRef
from keepwarm.store.admin.purge_epochs import Began


@dataclass(frozen=True)
class Prefix:
    """The beginning of a request whose KV is in vLLM's pages, or is to be loaded into them: whole pages only."""

    request_id: str
    tokens: TokenIds  # [n]
    pages: tuple[int, ...]  # vLLM's block ids, of all n tokens in order
    extra_keys: Mapping[int, bytes]  # by position, for `core.blocks.chain`
    variant: str  # digest of the adapter and of images on the first page; "none" without any
    began: Began  # when the request arrived: what was purged since then is not stored

    def until(self, end: int) -> Prefix:
        """Return the beginning of it that ends at `end`, between two pages."""
        return replace(
            self,
            tokens=self.tokens[:end],
            pages=self.pages[: len(self.pages) * end // len(self.tokens)],
            extra_keys={at: key for at, key in self.extra_keys.items() if at < end},
        )


@dataclass(frozen=True)
class Load:
    """Load positions `[start, len(prefix.tokens))` from the store into their pages.

    With `apart` no step waits for the load; its end is reported. `found` tells for each rank where the blocks of these
    positions are.
    """

    prefix: Prefix
    start: int
    found: tuple[tuple[BlockRef, ...], ...]
    apart: bool = False

    def part(self, start: int, end: int) -> Load:
        """Return the load of `[start, end)` alone, both between two pages."""
        size = len(self.prefix.tokens) // len(self.prefix.pages)
        first, last = (start - self.start) // size, (end - self.start) // size
        return replace(
            self, prefix=self.prefix.until(end), start=start, found=tuple(refs[first:last] for refs in self.found)
        )


@dataclass(frozen=True)
class Save:
    """Store a prefix, whose KV is computed up to its end, from `start` on; all before `start` is stored already.

    `last` is true for a request that ended: its pages are held until all its saves are reported. Nothing may be left
    to store then.
    """

    prefix: Prefix
    start: int
    last: bool = False

    def of_nothing(self) -> Save:
        """Return the same save where another rank stores the KV: only the pages' release is told."""
        return replace(self, start=len(self.prefix.tokens))


@dataclass
class Step:
    """The work of one scheduler step. `names` are the roots of the names that the scheduler looks up, by rank; none
    while the workers have not told theirs.

    `preempted` are requests whose pages may be given to others in this step.
    """

    names: tuple[bytes, ...] = ()
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    preempted: frozenset[str] = frozenset()
