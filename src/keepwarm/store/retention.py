"""How long runs stay, and what is stored at all: the rules of one archive."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from keepwarm.store.eviction import DEFAULT_POLICY, PolicyName

Admission = Literal["always", "second_use"]
SIGHTINGS = 1 << 16  # blocks remembered as seen, with 32 bytes each
NOTED_EVICTIONS = 1 << 10  # blocks for which the reason of their eviction is remembered
EVICTED, EXPIRED, CORRUPT = "evicted", "expired", "corrupt"  # why


@dataclass(frozen=True)
class Rules:
    """What is stored, and what is evicted first. `EngineConfig` has a setting for each."""

    ram_policy: PolicyName = DEFAULT_POLICY
    disk_policy: PolicyName = DEFAULT_POLICY
    admit: Admission = "always"
    min_tokens: int = 0  # shorter prefixes are not stored
    min_write: int = 0  # fewer unwritten tokens are not written to disk yet
    ttl: float | None = None  # seconds without a use after which a run is evicted before all others
    writes_per_day: int | None = None  # bytes that all processes together may write to disk on one (UTC) day


@dataclass(frozen=True)
class Retention:
    """What was asked for a run. With a `priority` above 0 it is pinned until `expires`: evicted last (the lowest
    priority first), not never. With 0 it has a time to live: `ttl` seconds after its last use it is evicted first.
    """

    priority: int
    ttl: float  # seconds
    expires: float  # seconds since the epoch

    @classmethod
    def beginning(cls, now: float, ttl: float, priority: int) -> Retention:
        """Raises ValueError for a time that is not positive and finite, or a negative priority."""
        if not 0 < ttl < float("inf"):
            raise ValueError(f"a retention lasts for a positive, finite number of seconds, got {ttl}")
        if priority < 0:
            raise ValueError(f"a retention's priority is 0 (a time to live) or more (a pin), got {priority}")
        return cls(priority, ttl, now + ttl)

    def renewed(self, now: float) -> Retention:
        """Return the retention after a use."""
        return replace(self, expires=now + self.ttl)

    def clamped(self, now: float) -> Retention:
        """Return the retention, not longer than was asked, after the clock was set back."""
        return replace(self, expires=min(self.expires, now + self.ttl))


class Sightings:
    """Blocks that were seen, for an archive without a disk tier; at most `SIGHTINGS`, the oldest are forgotten.
    `store.catalog.ranking` does this in the catalogue, where all processes share them."""

    def __init__(self, limit: int = SIGHTINGS) -> None:
        self._limit = limit
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def note(self, ids: Iterable[bytes]) -> set[bytes]:
        """Return the blocks that were seen before, and note all of them as seen."""
        before: set[bytes] = set()
        for block_id in ids:
            if block_id in self._seen:
                before.add(block_id)
            self._seen[block_id] = None
            self._seen.move_to_end(block_id)
        while len(self._seen) > self._limit:
            self._seen.popitem(last=False)
        return before
