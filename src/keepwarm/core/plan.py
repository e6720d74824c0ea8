"""The link plan: what one request loads, moves, repairs and computes. Linking decides; nothing here moves a tensor."""

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
    """Positions `[start, end)` come from a stored chunk at another place: keys re-rotated by `start - source_start`.

    `source_start` lies in the block `ref`; what stands before it there is not wanted, `before` are its token ids.
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
    """What is stored of the recurrent state along a prompt."""

    stored: Mapping[int, BlockRef] = field(default_factory=dict)  # by position, of those that stand on what is found
    reached: int = 0  # up to where tokens are found; the plan loads no more than up to the last snapshot before

    @property
    def last(self) -> int:
        """The position of the last one; 0: there is none."""
        return max(self.stored, default=0)


NO_SNAPSHOTS = Snapshots()
PlanSpan = Load | Relocate | Repair | Compute


@dataclass(frozen=True)
class LinkPlan:
    """Spans in order of execution, covering `[0, length)`; the last is a Compute, so a token is always recomputed.

    `miss_at` is the position where reuse ended and `miss_reason` why. `reusable` is how many tokens the same request
    reuses when it comes again; None: those before its last step. `snapshots` are of a model with recurrent state.
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
        """Up to where what it loads is in device memory; such blocks lead."""
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
        """The snapshot that computing goes on from, of a model with recurrent state."""
        return self.snapshots.stored.get(self.prefix_end)

    @property
    def blended_from(self) -> int:
        """The first position that comes from another context, or stands on it; the prompt's length when none does."""
        return min((span.start for span in self.relocates), default=self.length)

    @property
    def unblended(self) -> LinkPlan | None:
        """The plan of everything before `blended_from`; None when nothing of that is computed."""
        before = tuple(span for span in self.spans if not isinstance(span, Repair) and span.end <= self.blended_from)
        computed = before and isinstance(before[-1], Compute)
        return LinkPlan(self.blended_from, before, self.miss_at, self.miss_reason) if computed else None

    @property
    def blended_tokens(self) -> int:
        """Tokens that come from another context, those that are repaired afterwards included."""
        return sum(span.end - span.start for span in self.relocates)

    @property
    def computes(self) -> tuple[Compute, ...]:
        return tuple(span for span in self.spans if isinstance(span, Compute))

    @property
    def cached_tokens(self) -> int:
        return sum(span.end - span.start for span in self.spans if isinstance(span, Load | Relocate))
