"""Snapshots of recurrent state along a prompt: restored when a request begins, taken as it runs, stored, thinned."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from keepwarm.compiler.emit import Fresh
from keepwarm.core.blocks import Block
from keepwarm.core.plan import LinkPlan
from keepwarm.core.snapshots import (
    PURPOSE,
    affordable,
    shared_end,
    snapshot_block,
    snapshot_id,
    superfluous,
    wanted,
    wanted_inside,
)
from keepwarm.core.spans import Exactness
from keepwarm.errors import CorruptRun
from keepwarm.pipeline.linked import Linked
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.arena.states import Snapshot, SnapshotSink
from keepwarm.store.archive import Archive


@dataclass(frozen=True)
class Snapshots:
    """The snapshots of one model with recurrent state; `nbytes` is the approximate size of one."""

    archive: Archive
    bytes_per_token: int
    nbytes: int
    budget: float

    def restore(self, arena: Arena, plan: LinkPlan, linked: Linked, *, own: bool) -> bool:
        """Restore the state at the end of what a plan loads. Raises CorruptRun when the stored snapshot is unusable.

        Behind KV of another arithmetic, the state may have the form of the code that computed it there. Return False
        then; the snapshot stays for that code. `own` says that the plan uses no such state.
        """
        end = plan.prefix_end
        if not end:
            return True  # an arena at position 0 needs no state
        sink = SnapshotSink(end)
        self.archive.load([plan.snapshots.stored[end]], linked.prompt.tokens[end - 1 : end], end, sink)
        try:
            arena.states.put(sink.snapshot)
        except CorruptRun as error:
            if not own and plan.exactness is not Exactness.EXACT:
                return False
            # its checksum is right, so it would be found again and again
            self.archive.contents.refuse(plan.snapshots.stored[end], error)
            raise
        return True

    def ask(self, arena: Arena, plan: LinkPlan, linked: Linked, *, whole: bool) -> None:
        """Set where the next steps take snapshots; with `whole`, also at the prompt's end."""
        parted = plan.snapshots.reached
        if parted > plan.prefix_end:
            self.archive.contents.count("snapshots_missed")
        prompt, ends = linked.prompt, linked.blocks.ends
        most = affordable(len(prompt.tokens), self.bytes_per_token, self.nbytes, self.budget)
        choose = wanted_inside if _is_inside(plan, linked) else wanted
        found = choose(ends, prompt.breakpoints, parted, plan.prefix_end, most, whole=whole)
        arena.states.wanted = frozenset(found)

    def keep(
        self,
        taken: Mapping[int, Snapshot],
        plan: LinkPlan,
        linked: Linked,
        fresh: Fresh,
        *,
        asked: bool,
        counted: bool = True,
    ) -> None:
        """Store the snapshots taken in fresh blocks, and drop those that the prompt has too many of. `asked`: see
        `Archive.put`. They are not `counted` if they will be offered again."""
        places = dict(_places(taken, plan, linked, fresh))
        if not places:
            return
        stored, nbytes = plan.snapshots.stored, max(taken[at].nbytes for at in places)
        most = affordable(fresh.blocks[-1].end, self.bytes_per_token, nbytes, self.budget)
        every = {*stored, *places}
        gone = superfluous(every, shared_end(linked.prompt.breakpoints, every), most)
        space = replace(linked.namespace, purpose=PURPOSE)
        for at in sorted(places.keys() - set(gone), reverse=True):  # the last first: a full queue drops the rest
            block, name, on = places[at]
            self.archive.put(
                taken[at],
                [snapshot_block(block)],
                space,
                ids=[snapshot_id(name)],
                parent=on,
                asked=asked,
                epoch=linked.epoch,
            )
        if counted:
            self.archive.contents.count("snapshots_taken", len(places))
        if dropped := [stored[at].id for at in gone if at in stored]:
            self.archive.discard(dropped)


def _is_inside(plan: LinkPlan, linked: Linked) -> bool:
    """Whether snapshots may stand inside blocks: behind exact KV, under invariant arithmetic."""
    return linked.grid.inside and plan.exactness is Exactness.EXACT


def _places(
    taken: Iterable[int], plan: LinkPlan, linked: Linked, fresh: Fresh
) -> Iterator[tuple[int, tuple[Block, bytes, bytes]]]:
    """Yield where snapshots were taken in fresh blocks: the position, the block that ends there in a prompt of this
    length, its name, and that of the stored block which contains it."""
    ends = [block.end for block in fresh.blocks]
    for at in taken:
        number = bisect_left(ends, at)
        if number == len(ends) or fresh.blocks[number].start >= at:
            continue
        name = fresh.ids[number]
        if ends[number] == at:
            yield at, (fresh.blocks[number], name, name)
        elif _is_inside(plan, linked):
            part = linked.blocks.up_to(at)
            yield at, (part, part.exact, name)
