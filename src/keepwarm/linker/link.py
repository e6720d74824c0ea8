"""Links one prompt: applies the policies in order and makes one plan. It decides, but moves no tensor."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from keepwarm.core.blocks import Chain, PrefixNames, TokenIds
from keepwarm.core.cost import Costs
from keepwarm.core.plan import NO_SNAPSHOTS, Compute, LinkPlan, Load, PlanSpan, Relocate, Repair, Snapshots
from keepwarm.core.ports import BlockIndex, BlockRef
from keepwarm.core.repair import RepairRule
from keepwarm.core.schedule import Grid
from keepwarm.core.snapshots import snapshot_block, snapshot_id
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
    reusable = None if not grid.inside else blocks.last_start if prompt.stateful else len(tokens) - 1
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
        if lossy:
            loads = tuple(part for load in loads for part in _quantized(load))
    if prompt.stateful:
        loads = _up_to(loads, snapshots.last, blocks)
    if costs is not None and (kept := _worth_loading(loads, costs)) != loads:
        if prompt.stateful:
            reached = kept[-1].end if kept else 0
            kept = _up_to(kept, max((at for at in snapshots.stored if at <= reached), default=0), blocks)
        reached = kept[-1].end if kept else 0
        spans: tuple[PlanSpan, ...] = (*kept, *_computes(grid, blocks, reached))
        return LinkPlan(len(tokens), spans, reached, MissReason.SLOWER, reusable, snapshots)
    reached = loads[-1].end if loads else 0
    if reuse is Reuse.CHUNKS and blending is not None:
        found = relocations(blending.chunks, index, max(reached, _SINKS), len(tokens) - 1, blending.least)
        if found:
            return _blended(grid, blocks, loads, found, blending.rule)
    inside = (grid.inside and not prompt.stateful) or reuse is Reuse.PREFIX
    whole = reached >= (len(tokens) - 1 if inside else blocks.last_start)
    rest = 0 if grid.inside or reuse is Reuse.PREFIX else len(tokens) - reached
    told = rest >= (_LONG_REST if reached else 2)
    reason = MissReason.NEW if not whole else MissReason.STEP if told else MissReason.NONE
    if reached < snapshots.reached:
        reason = MissReason.STATE
    return LinkPlan(len(tokens), (*loads, *_computes(grid, blocks, reached)), reached, reason, reusable, snapshots)


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
    return LinkPlan(
        plan.length, (*plan.loads, *_computes(grid, blocks, plan.prefix_end)), plan.prefix_end, MissReason.DIVERGED
    )


def _quantized(load: Load) -> Iterator[Load]:
    """Split a load: blocks in device memory, as they were computed, and blocks that went through the codec."""
    there = tuple(ref for ref in load.refs if ref.tier == "device")  # they come first
    if there:
        yield Load(load.start, min(there[-1].end, load.end), there, load.exactness)
    if rest := load.refs[len(there) :]:
        yield Load(rest[0].start, load.end, rest, max(load.exactness, Exactness.QUANTIZED))


def snapshots_of(loads: Sequence[Load], prompt: NamedPrompt, index: BlockIndex) -> Snapshots:
    """Find the stored snapshots of recurrent state at the ends of whole blocks of these loads."""
    blocks = prompt.blocks
    whole = {at: snapshot_id(name) for load in loads for at, name in _whole(load, prompt)}
    if not whole:
        return NO_SNAPSHOTS
    end, found = max(whole), index.find([*whole.values()])
    if whole[end] not in found and end in blocks.ends:
        following = snapshot_block(blocks[blocks.ends.index(end)])
        if following.exact == whole[end]:  # the last request's snapshot may be on its way, or just stored
            index.arrives(following, 0)
            found = index.find([*whole.values()])
    if whole[end] not in found:  # otherwise a round trip could find nothing better
        found = index.find([*whole.values()], far=True)
    return Snapshots({at: found[name] for at, name in whole.items() if name in found}, end)


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


def _up_to(loads: Sequence[Load], end: int, blocks: Chain | None = None) -> tuple[Load, ...]:
    """Return the loads up to a position where one of their blocks ends. With `blocks`, it may be one of several that a
    reference to device memory names."""
    kept = []
    for load in loads:
        parts = [_cut(ref, end, blocks) if blocks else ref for ref in load.refs if ref.start < end]
        refs = tuple(ref for ref in parts if ref.end <= end)
        if refs:
            kept.append(Load(load.start, min(refs[-1].end, load.end), refs, load.exactness))
    return tuple(kept)


def _cut(ref: BlockRef, end: int, blocks: Chain) -> BlockRef:
    """Return the part of a reference to device memory that ends at a block's end."""
    if ref.tier != "device" or ref.end <= end:
        return ref
    block = blocks[bisect_right(blocks.ends, end) - 1]
    return ref._replace(id=block.exact, prefix=block.prefix, length=end - ref.start)


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
