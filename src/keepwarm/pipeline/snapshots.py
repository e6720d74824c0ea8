"""Snapshots of recurrent state along a prompt: restored when a request begins, taken as it runs, stored, thinned."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace

from keepwarm.compiler.emit import Fresh
from keepwarm.core.plan import LinkPlan
from keepwarm.core.schedule import Breakpoint
from keepwarm.core.snapshots import PURPOSE, affordable, shared_end, snapshot_block, snapshot_id, superfluous, wanted
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
        found = wanted(ends, _reachable(linked), parted, plan.prefix_end, most, whole=whole)
        arena.states.wanted = frozenset(found)

    def keep(self, taken: Mapping[int, Snapshot], plan: LinkPlan, linked: Linked, fresh: Fresh, *, asked: bool) -> None:
        """Store the snapshots taken at the ends of fresh blocks, and drop those that the prompt has too many of.
        `asked`: see `Archive.put`."""
        names = {block.end: (block, name) for block, name in zip(fresh.blocks, fresh.ids, strict=True)}
        new = {at: snapshot for at, snapshot in taken.items() if at in names}
        if not new:
            return
        stored, nbytes = plan.snapshots.stored, max(snapshot.nbytes for snapshot in new.values())
        most = affordable(max(names), self.bytes_per_token, nbytes, self.budget)
        every = {*stored, *new}
        gone = superfluous(every, shared_end(_reachable(linked), every), most)
        space = replace(linked.namespace, purpose=PURPOSE)
        for at in sorted(new.keys() - set(gone), reverse=True):  # the last first: a full queue drops the rest
            block, name = names[at]
            self.archive.put(
                new[at],
                [snapshot_block(block)],
                space,
                ids=[snapshot_id(name)],
                parent=name,
                asked=asked,
                epoch=linked.epoch,
            )
        self.archive.contents.count("snapshots_taken", len(new))
        if dropped := [stored[at].id for at in gone if at in stored]:
            self.archive.discard(dropped)


def _reachable(linked: Linked) -> list[Breakpoint]:
    """Return a prompt's breakpoints, each at the last block's end up to it. Only there can another prompt continue.
    Under scheduled arithmetic every breakpoint that counts is a block's end."""
    points, ends = linked.prompt.breakpoints, linked.blocks.ends
    if not linked.grid.inside:
        return list(points)
    places = [bisect_right(ends, point.position) for point in points]
    return [point._replace(position=ends[at - 1]) for point, at in zip(points, places, strict=True) if at]
