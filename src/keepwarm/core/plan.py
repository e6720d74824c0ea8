"""The link plan: what one request loads, moves, repairs and computes. The linker decides; no tensor is moved here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from keepwarm.core.ports import BlockRef
from keepwarm.core.repair import RepairRule
from keepwarm.core.spans import Exactness, MissReason, weakest


@dataclass(frozen=True)
class Load:
    """Positions `[start, end)` come from stored blocks of the same prefix."""

    start: int
    end: int
    refs: tuple[BlockRef, ...]  # consecutive; the last may be taken in part
    exactness: Exactness


@dataclass(frozen=True)
class Relocate:
    """Positions `[start, end)` come from a stored chunk elsewhere. Its keys are re-rotated by `start - source_start`.

    `source_start` lies in the block `ref`. The tokens before it in that block are not used; `before` are their ids.
    """

    start: int
    end: int
    ref: BlockRef
    source_start: int
    before: tuple[int, ...] = ()
    exactness: Exactness = Exactness.BLENDED


@dataclass(frozen=True)
class Repair:
    """Some relocated tokens of `[start, end)` are recomputed; the runtime chooses which, by the rule."""

    start: int
    end: int
    rule: RepairRule
    exactness: Exactness = Exactness.BLENDED


@dataclass(frozen=True)
class Compute:
    """Positions `[start, end)` are computed in one prefill step."""

    start: int
    end: int
    exactness: Exactness = Exactness.EXACT


@dataclass(frozen=True)
class Snapshots:
    """The stored snapshots of recurrent state along a prompt."""

    stored: Mapping[int, BlockRef] = field(default_factory=dict)  # by position, those that stand on found blocks
    reached: int = 0  # position up to which tokens are found; the plan loads only up to the last snapshot before it

    @property
    def last(self) -> int:
        """The position of the last snapshot; 0 when there is none."""
        return max(self.stored, default=0)


NO_SNAPSHOTS = Snapshots()
PlanSpan = Load | Relocate | Repair | Compute


@dataclass(frozen=True)
class LinkPlan:
    """Spans in order of execution, covering `[0, length)`; the last is a Compute, so a token is always recomputed.

    `miss_at` is the position where reuse ended, and `miss_reason` why. `reusable` is how many tokens the same request
    reuses when it comes again; None: those before its last step. `snapshots` are for a model with recurrent state.
    """

    length: int
    spans: tuple[PlanSpan, ...]
    miss_at: int = 0
    miss_reason: MissReason = MissReason.NONE
    reusable: int | None = None
    snapshots: Snapshots = NO_SNAPSHOTS

    def __post_init__(self) -> None:
        position = 0
        for span in self.spans:
            if isinstance(span, Repair):
                if span.end > position:
                    raise ValueError(f"repair of [{span.start}, {span.end}) before its KV is placed")
                continue
            if span.start != position or span.end <= span.start:
                raise ValueError(f"span [{span.start}, {span.end}) does not continue at {position}")
            position = span.end
        if position != self.length:
            raise ValueError(f"plan ends at {position}, prompt at {self.length}")
        if not self.spans or not isinstance(self.spans[-1], Compute):
            raise ValueError("a plan must end with a computed span: at least one token is always recomputed")

    @property
    def last_cut(self) -> int:
        """How many tokens the same request reuses when it comes again."""
        return self.computes[-1].start if self.reusable is None else self.reusable

    @property
    def exactness(self) -> Exactness:
        return weakest(span.exactness for span in self.spans)

    @property
    def resident(self) -> int:
        """Position up to which the loaded blocks are in device memory; these blocks come first."""
        return max((ref.end for load in self.loads for ref in load.refs if ref.tier == "device"), default=0)

    @property
    def loads(self) -> tuple[Load, ...]:
        return tuple(span for span in self.spans if isinstance(span, Load))

    @property
    def relocates(self) -> tuple[Relocate, ...]:
        return tuple(span for span in self.spans if isinstance(span, Relocate))

    @property
    def repair(self) -> Repair | None:
        return next((span for span in self.spans if isinstance(span, Repair)), None)

    @property
    def prefix_end(self) -> int:
        """Where the loaded beginning ends."""
        return self.loads[-1].end if self.loads else 0

    @property
    def state(self) -> BlockRef | None:
        """The snapshot from which computing continues, for a model with recurrent state."""
        return self.snapshots.stored.get(self.prefix_end)

    @property
    def blended_from(self) -> int:
        """The first position whose KV comes from another context or depends on it; the prompt's length if none does."""
        return min((span.start for span in self.relocates), default=self.length)

    @property
    def unblended(self) -> LinkPlan | None:
        """The plan for everything before `blended_from`; None when its last span is not computed."""
        before = tuple(span for span in self.spans if not isinstance(span, Repair) and span.end <= self.blended_from)
        computed = before and isinstance(before[-1], Compute)
        return LinkPlan(self.blended_from, before, self.miss_at, self.miss_reason) if computed else None

    @property
    def blended_tokens(self) -> int:
        """Tokens whose KV comes from another context, including those that are repaired afterwards."""
        return sum(span.end - span.start for span in self.relocates)

    @property
    def computes(self) -> tuple[Compute, ...]:
        return tuple(span for span in self.spans if isinstance(span, Compute))

    @property
    def cached_tokens(self) -> int:
        return sum(span.end - span.start for span in self.spans if isinstance(span, Load | Relocate))
