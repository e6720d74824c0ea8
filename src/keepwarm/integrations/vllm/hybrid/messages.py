"""Messages from the scheduler's half to the workers' halves in one step, for several groups of pages."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepwarm.core.ports import BlockRef
from keepwarm.integrations.vllm.messages import Prefix


@dataclass(frozen=True)
class Part:
    """One group's share: its pages of positions `[start, end)`; for a state the page that ends at `end`.

    In a load, `found` tells for each rank where the blocks are.
    """

    group: int
    start: int
    end: int
    pages: tuple[int, ...]  # vLLM's block ids
    found: tuple[tuple[BlockRef, ...], ...] = ()


@dataclass(frozen=True)
class PartsLoad:
    """Load what is needed to continue after a prefix into the pages named by the parts; `count` tokens are new."""

    prefix: Prefix
    count: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class PartsSave:
    """Store pages of a prefix. `last` is true for a request that ended: its pages are held until the save is
    reported."""

    prefix: Prefix
    parts: tuple[Part, ...]
    last: bool = False


@dataclass
class PartsStep:
    """The work of one scheduler step. `names` are the roots of the names that the scheduler looks up, by rank."""

    names: tuple[bytes, ...] = ()
    loads: list[PartsLoad] = field(default_factory=list)
    saves: list[PartsSave] = field(default_factory=list)
