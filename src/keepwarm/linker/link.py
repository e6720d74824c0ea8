"""Links one prompt: applies the policies in order and makes one plan. It decides, but moves no tensor."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from keepwarm.core.blocks import Chain, PrefixNames, TokenIds
from keepwarm.core.cost import Costs
from keepwarm.core.plan import NO_SNAPSHOTS, Compute, LinkPlan, Load, PlanSpan, Relocate, Repair, Snapshots
from keepwarm.core.ports import BlockIndex, BlockRef
from keepwarm.core.repair import RepairRule
from keepwarm.core.schedule import PAGE_TOKENS, Breakpoint, Grid
from keepwarm.core.snapshots import last_place, snapshot_block, snapshot_id
from keepwarm.core.spans import Exactness, MissReason, Reuse
from keepwarm.linker.chunk import Chunk, relocations
from keepwarm.linker.prefix import loads as loads_of
from keepwarm.linker.prefix import matching_tokens, token_prefix, whole_blocks

_LONG_REST = 128  # tokens of the last step of scheduled arithmetic; computing fewer again is expected and no miss
_SINKS = 4  # first tokens of a prompt, which are never taken from a chunk: all others attend to them (arXiv 2309.17453)


@dataclass(frozen=True)
class Blending:
    """What may be reused away from the prefix: named chunks in order of preference, repair rule, least length."""

    chunks: tuple[Chunk, ...]
    rule: RepairRule
    least: int


@dataclass(frozen=True, eq=False, slots=True)
class NamedPrompt:
    """A prompt to look up: its tokens, the blocks that end where `grid` says, and the names of its beginnings."""

    tokens: TokenIds
    blocks: Chain
    names: PrefixNames
    grid: Grid
    stateful: bool = False  # whether the model has recurrent state
    own_states: bool = False  # whether it continues only from states behind exact KV: others have another form
    breakpoints: tuple[Breakpoint, ...] = ()  # where snapshots of the state may stand inside a page


def link(
    prompt: NamedPrompt,
    index: BlockIndex,
    reuse: Reuse,
    *,
    resident: int = 0,
    costs: Costs | None = None,
    blending: Blending | None = None,
    lossy: bool = False,
    longest_part: int | None = None,
) -> LinkPlan:
    """Make the plan for a prompt: what is loaded and which steps are computed.

    The first `resident` tokens are in device memory, exact. With `costs`, KV on disk or in a remote tier is loaded only
    if that is not slower than computing it. `blending` is for `reuse="chunks"`: its chunks are looked up in the rest
    after the longest exact beginning. With `lossy`, the stored KV went through a lossy codec: under `exact` it is a
    miss, under weaker modes it is labelled `quantized`. A match may end inside a stored block only if the block is no
    longer than `longest_part`.
    """
    tokens, blocks, names, grid = prompt.tokens, prompt.blocks, prompt.names, prompt.grid
    reusable = None
    if grid.inside:
        reusable = last_place(len(tokens), prompt.breakpoints) if prompt.stateful else len(tokens) - 1
    if reuse is Reuse.OFF:
        return LinkPlan(len(tokens), _computes(grid, blocks, 0), 0, MissReason.OFF, reusable)
    if grid.inside:
        exact, end = matching_tokens(blocks, index, resident, names.keys)
    else:
        exact = whole_blocks(blocks, index, resident)
        end = exact[-1].end if exact else 0
    if lossy and reuse is not Reuse.PREFIX:
        exact = tuple(ref for ref in exact if ref.tier == "device")
        end = min(end, exact[-1].end) if exact else 0
    loads = loads_of(exact, end, frozenset(ref.id for ref in exact))
    snapshots = snapshots_of(loads, prompt, index) if prompt.stateful else NO_SNAPSHOTS
    if reuse is Reuse.PREFIX:
        longer = token_prefix(tokens, names, index, exact, end, longest_part)
        others = snapshots_of(longer, prompt, index) if prompt.stateful else NO_SNAPSHOTS
        if not prompt.stateful or others.last > snapshots.last:
            loads, snapshots = longer, others
        elif others.reached > snapshots.reached:
            snapshots = replace(snapshots, reached=others.reached)
    if prompt.stateful:
        loads = _up_to(loads, snapshots.last, prompt)
    if costs is not None and (kept := _worth_loading(loads, costs)) != loads:
        if prompt.stateful:
            reached = kept[-1].end if kept else 0
            kept = _up_to(kept, max((at for at in snapshots.stored if at <= reached), default=0), prompt)
        reached = kept[-1].end if kept else 0
        spans: tuple[PlanSpan, ...] = (*_labelled(kept, lossy), *_computes(grid, blocks, reached))
        return LinkPlan(len(tokens), spans, reached, MissReason.SLOWER, reusable, snapshots)
    reached = loads[-1].end if loads else 0
    if reuse is Reuse.CHUNKS and blending is not None:
        found = relocations(blending.chunks, index, max(reached, _SINKS), len(tokens) - 1, blending.least)
        if found:
            return _blended(grid, blocks, loads, found, blending.rule)
    last = blocks.last_start if reusable is None else reusable
    whole = reached >= (len(tokens) - 1 if reuse is Reuse.PREFIX else last)
    rest = 0 if grid.inside or reuse is Reuse.PREFIX else len(tokens) - reached
    told = rest >= (_LONG_REST if reached else 2)
    reason = MissReason.NEW if not whole else MissReason.STEP if told else MissReason.NONE
    if snapshots.reached - reached >= (PAGE_TOKENS if grid.inside else 1):
        reason = MissReason.STATE
    spans = (*_labelled(loads, lossy), *_computes(grid, blocks, reached))
    return LinkPlan(len(tokens), spans, reached, reason, reusable, snapshots)


def _blended(
    grid: Grid, blocks: Chain, loads: tuple[Load, ...], found: Sequence[Relocate], rule: RepairRule
) -> LinkPlan:
    """Plan the steps up to the first chunk as in a cold run, then the chunks; the gaps and the rest are computed."""
    length, at = blocks.ends[-1], found[0].start
    spans: list[PlanSpan] = [*loads]
    for step in _computes(grid, blocks, loads[-1].end if loads else 0):
        if step.start < at:
            spans.append(Compute(step.start, min(step.end, at)))
    for span in found:
        if span.start > at:
            spans.append(Compute(at, span.start))
        spans.append(span)
        at = span.end
    if not rule.is_none:
        spans.append(Repair(found[0].start, at, rule))
    return LinkPlan(length, (*spans, Compute(at, length)), at, MissReason.NEW)


def without_chunks(plan: LinkPlan, grid: Grid, blocks: Chain) -> LinkPlan:
    """Return a plan that loads the same beginning and computes everything else in the prompt's own steps."""
    spans: tuple[PlanSpan, ...] = (*plan.loads, *_computes(grid, blocks, plan.prefix_end))
    reusable = plan.length - 1 if grid.inside else None
    return LinkPlan(plan.length, spans, plan.prefix_end, MissReason.DIVERGED, reusable)


def _labelled(loads: tuple[Load, ...], lossy: bool) -> tuple[Load, ...]:
    return tuple(part for load in loads for part in _quantized(load)) if lossy else loads


def _quantized(load: Load) -> Iterator[Load]:
    """Split a load: blocks in device memory, as they were computed, and blocks that went through the codec."""
    there = tuple(ref for ref in load.refs if ref.tier == "device")  # they come first
    if there:
        yield Load(load.start, min(there[-1].end, load.end), there, load.exactness)
    if rest := load.refs[len(there) :]:
        yield Load(rest[0].start, load.end, rest, max(load.exactness, Exactness.QUANTIZED))


def snapshots_of(loads: Sequence[Load], prompt: NamedPrompt, index: BlockIndex) -> Snapshots:
    """Find the stored snapshots of recurrent state at the ends of whole blocks of these loads; under invariant
    arithmetic inside of blocks, too."""
    names = {at: snapshot_id(name) for load in loads for at, name in _whole(load, prompt)}
    end = max(names, default=0)
    if prompt.grid.inside:
        names |= {at: snapshot_id(prompt.blocks.up_to(at).exact) for at in _inside(loads, prompt)}
        end = max([end, *(load.end for load in loads if load.exactness is Exactness.EXACT)])
    if not names:
        return NO_SNAPSHOTS
    found = index.find([*names.values()])
    if names.get(end) not in found and _arrive(end, {at for at in names if names[at] not in found}, prompt, index):
        found = index.find([*names.values()])
    if names.get(end) not in found:  # otherwise a round trip could find nothing better
        found = index.find([*names.values()], far=True)
    return Snapshots({at: found[name] for at, name in names.items() if name in found}, end)


def _arrive(end: int, missing: Collection[int], prompt: NamedPrompt, index: BlockIndex) -> bool:
    """Wait for snapshots that the last request took, which may be on their way or just stored. Return whether some
    arrived."""
    blocks = prompt.blocks
    if not prompt.grid.inside:
        return end in blocks.ends and index.arrives(snapshot_block(blocks.up_to(end)), 0)
    latest = sorted(missing, reverse=True)[: 2 * PAGE_TOKENS]
    return any(index.arrives(snapshot_block(blocks.up_to(at)), 0) for at in latest)


def _inside(loads: Sequence[Load], prompt: NamedPrompt) -> set[int]:
    """Return the positions inside blocks where snapshots may stand: where the prompt's own parts end, and any in the
    page in which the loads with exact KV end. There, an earlier prompt may have ended, or parted from another one."""
    end = max((load.end for load in loads if load.exactness is Exactness.EXACT), default=0)
    ends = prompt.blocks.ends
    last = prompt.blocks.start(bisect_left(ends, end)) if end else 0
    known = (point.position for point in prompt.breakpoints)
    return {at for at in (*range(last + 1, end + 1), *known) if 1 < at <= end and ends[bisect_left(ends, at)] != at}


def _whole(load: Load, prompt: NamedPrompt) -> Iterator[tuple[int, bytes]]:
    """Yield end and name of each whole block of a load behind which a state may be used. A reference may be to part of
    a block, or under invariant arithmetic to several blocks on the device."""
    blocks, exact = prompt.blocks, load.exactness is Exactness.EXACT
    if exact and prompt.grid.inside:
        numbers = range(bisect_right(blocks.ends, load.start), bisect_right(blocks.ends, load.end))
        yield from ((blocks.ends[number], blocks.exact[number]) for number in numbers)
        return
    for ref in load.refs if exact or not prompt.own_states else ():
        if ref.id and ref.end <= load.end and (exact or prompt.names.at(ref.end) == ref.prefix):
            yield ref.end, ref.id


def _up_to(loads: Sequence[Load], end: int, prompt: NamedPrompt | None = None) -> tuple[Load, ...]:
    """Return the loads up to a position where one of their blocks ends. With the `prompt`, it may lie inside a block
    with exact KV under invariant arithmetic."""
    kept = []
    for load in loads:
        parted = prompt is not None and prompt.grid.inside and load.exactness is Exactness.EXACT
        refs = tuple(ref for ref in load.refs if (ref.start < end if parted else ref.end <= end))
        if refs and parted and prompt is not None:
            refs = (*refs[:-1], *_cut(refs[-1], end, prompt.blocks))
        if refs:
            kept.append(Load(load.start, min(refs[-1].end, load.end, end), refs, load.exactness))
    return tuple(kept)


def _cut(ref: BlockRef, end: int, blocks: Chain) -> tuple[BlockRef, ...]:
    """Return the part of a reference up to a position. Others than to device memory stay whole, and are used in part.
    Of one to device memory, what follows its last whole block has no name."""
    if ref.tier != "device" or ref.end <= end:
        return (ref,)
    number = bisect_right(blocks.ends, end) - 1
    at = max(ref.start, blocks.ends[number] if number >= 0 else 0)
    parts = []
    if at > ref.start:
        block = blocks[number]
        parts.append(ref._replace(id=block.exact, prefix=block.prefix, length=at - ref.start))
    if end > at:
        parts.append(ref._replace(id=b"", prefix=b"", start=at, length=end - at))
    return tuple(parts)


def _worth_loading(loads: tuple[Load, ...], costs: Costs) -> tuple[Load, ...]:
    """Return the leading part of the loads after which computing the rest is cheaper; usually all of them."""
    flat = [(ref.tier, min(ref.end, load.end) - ref.start, ref) for load in loads for ref in load.refs]
    groups = [(tier, list(members)) for tier, members in groupby(flat, key=lambda each: each[0])]
    parts = [(tier, sum(tokens for _, tokens, _ in members)) for tier, members in groups]
    count = costs.worth_loading(parts)
    if count == len(parts):
        return loads
    return _up_to(loads, groups[count - 1][1][-1][2].end if count else 0)


def _computes(grid: Grid, blocks: Chain, reached: int) -> tuple[Compute, ...]:
    return tuple(Compute(*step) for step in grid.steps(blocks.ends, reached))
