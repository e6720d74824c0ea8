"""Stored KV in an arena for one request: link, load, link again when what was found is unusable, store what is new."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from keepwarm.compiler.emit import Fresh, fresh_blocks
from keepwarm.compiler.segment import CompiledPrompt
from keepwarm.core.blocks import Block, PrefixNames, chain, token_ids
from keepwarm.core.cost import Costs
from keepwarm.core.identity import Namespace
from keepwarm.core.plan import LinkPlan
from keepwarm.core.ports import BlockRef
from keepwarm.core.results import Miss
from keepwarm.core.spans import Exactness, MissReason, Reuse
from keepwarm.errors import CorruptRun
from keepwarm.linker.diagnose import Misses
from keepwarm.linker.link import Blending, link
from keepwarm.runtime.arena import Arena
from keepwarm.runtime.arenas import ArenaPool
from keepwarm.runtime.execute import place, prefill, relocate
from keepwarm.runtime.repair import Blended
from keepwarm.runtime.rope import Relocator
from keepwarm.runtime.runner import Runner
from keepwarm.store.archive import Archive

log = logging.getLogger("keepwarm.engine")

_RELINKS = 8  # corrupt runs that one request may meet before it is computed in full


@dataclass(frozen=True)
class Linked:
    """A compiled prompt with its blocks and names under one namespace."""

    prompt: CompiledPrompt
    blocks: tuple[Block, ...]
    names: PrefixNames
    namespace: Namespace
    blending: Blending | None = None  # with reuse="chunks"


@dataclass
class Placed:
    """A linked prompt whose stored KV is in an arena, or on its way there."""

    linked: Linked
    reuse: Reuse
    capacity: int
    overlap: bool  # layers may arrive while earlier ones are computed with; `Placing.prefill` then meets the failures
    arena: Arena
    plan: LinkPlan = field(init=False)
    miss: Miss | None = None  # why the plan reuses no more
    by_tier: dict[str, int] = field(default_factory=dict)
    blended_by_tier: dict[str, int] = field(default_factory=dict)  # of chunks: not part of `by_tier`
    blended: Blended | None = None  # once a prompt with chunks in it is computed
    link_ms: float = 0.0
    load_ms: float = 0.0
    failures: int = 0
    forgotten: int = 0  # how often the pool had forgotten what it holds when this began
    computed_to: int = 0  # position up to which the engine's own steps have computed the prompt
    generated: Sequence[int] = ()  # the answer that was decoded into the arena after it

    @property
    def ids(self) -> list[bytes]:
        """Names to look for."""
        return [block.exact for block in self.linked.blocks] if self.reuse is not Reuse.OFF else []


class Placing:
    """Brings prompts and arenas together, over one archive."""

    def __init__(
        self,
        pool: ArenaPool,
        archive: Archive,
        runner: Runner,
        costs: Costs,
        misses: Misses,
        *,
        choosy: bool,
        lossy: bool,
        relocator: Callable[[], Relocator],
    ) -> None:
        """`choosy`: the store may turn blocks down, which are then offered again; `lossy`: its codec is. `relocator`
        moves chunks."""
        self._pool, self._archive, self._runner, self._costs, self._misses = pool, archive, runner, costs, misses
        self._choosy, self._lossy, self._relocator = choosy, lossy, relocator

    def plan(
        self, linked: Linked, reuse: Reuse, resident: Sequence[BlockRef], costs: Costs, *, corrupt: bool = False
    ) -> tuple[LinkPlan, Miss | None]:
        """What of a prompt is loaded and computed, and why no more is reused: of a request, and of one that is only
        explained. Reads no KV. `corrupt`: nothing stored is to be trusted any more."""
        plan = self.link(linked, Reuse.OFF if corrupt else reuse, resident, costs)
        if corrupt:
            plan = replace(plan, miss_reason=MissReason.CORRUPT)
        return plan, self._misses.of(linked, plan)

    def link(self, linked: Linked, reuse: Reuse, resident: Sequence[BlockRef], costs: Costs) -> LinkPlan:
        """The plan alone."""
        return link(
            linked.prompt.tokens,
            linked.blocks,
            linked.names,
            self._archive,
            reuse,
            resident,
            costs,
            linked.blending,
            lossy=self._lossy,
        )

    @contextmanager
    def lease(self, linked: Linked, reuse: Reuse, capacity: int, *, warming: bool, overlap: bool) -> Iterator[Placed]:
        """An arena of `capacity` positions with the prompt's stored KV in place, for as long as the block runs.

        The block computes the rest and sets `computed_to`; the blocks up to there are then stored, the last step's only
        when `warming` or when weaker reuse than `exact` may find it. With `overlap` KV may still be on its way: the
        first step is then run by `prefill`, or by a caller who calls `relink` after a CorruptRun.
        """
        ids = [block.exact for block in linked.blocks] if reuse is not Reuse.OFF else []
        forgotten = self._pool.forgotten
        placed = Placed(linked, reuse, capacity, overlap, self._pool.acquire(ids, capacity), forgotten=forgotten)
        try:
            self._fill(placed)
        except BaseException:
            placed.arena.seek(0)
            self._pool.release(placed.arena)
            raise
        try:
            yield placed
        finally:
            try:
                if not placed.computed_to:
                    placed.arena.seek(0 if placed.arena.is_arriving else placed.plan.prefix_end)
                else:
                    self._note_costs(placed)
                    if self._pool.forgotten != placed.forgotten:
                        placed.arena.seek(0)  # a purge came meanwhile: nothing of before it may follow it
                    elif reuse is not Reuse.OFF:
                        self._emit(placed, tail=warming or reuse is Reuse.PREFIX, asked=warming)
            finally:
                self._pool.release(placed.arena)

    def prefill(self, placed: Placed) -> torch.Tensor:
        """Compute what the plan leaves to compute; the logits after the last token, `[vocab]`."""
        while True:
            try:
                return self.compute(placed)
            except CorruptRun as error:
                self.relink(placed, error)

    def compute(self, placed: Placed) -> torch.Tensor:
        """The same of a plan without chunks, once. Raises CorruptRun for what turns out unusable on its way."""
        return prefill(placed.plan, placed.linked.prompt.tokens, placed.arena.cache, self._runner, self._costs)

    def relink(self, placed: Placed, error: CorruptRun) -> None:
        """Start anew with a prompt of which something stored, since taken out of use, turned out unusable."""
        log.warning("a stored run cannot be used and is recomputed: %s", error)
        placed.failures += 1
        self._fill(placed)

    def _fill(self, placed: Placed) -> None:
        """Link, and load into the arena."""
        started = time.perf_counter()
        linked, tokens, ids = placed.linked, placed.linked.prompt.tokens, placed.ids
        while True:
            if placed.arena.lost:
                self._pool.release(placed.arena)
                placed.arena = self._pool.acquire(ids, placed.capacity)
            arena = placed.arena
            corrupt = placed.failures >= _RELINKS
            plan, placed.miss = self.plan(linked, placed.reuse, arena.resident(ids), self._costs, corrupt=corrupt)
            linked_at = time.perf_counter()
            kept = [ref.end for load in plan.loads for ref in load.refs if ref.tier == "device"]
            self._pool.wait_readers(arena, max(kept, default=0))
            try:
                placed.by_tier, placed.blended_by_tier = place(plan, tokens, arena, self._archive.load), {}
                if not placed.overlap or plan.relocates:
                    arena.arrive_all()
                if plan.relocates:
                    placed.blended_by_tier = relocate(plan, tokens, arena, self._archive.load, self._relocator())
                arena.landed()
                break
            except CorruptRun as error:
                log.warning("a stored run cannot be used and is recomputed: %s", error)
                placed.failures += 1
        placed.plan = plan
        placed.link_ms += (linked_at - started) * 1e3
        placed.load_ms += (time.perf_counter() - linked_at) * 1e3
        if plan.miss_reason is MissReason.SLOWER:
            self._archive.contents.count("recomputed_by_choice")

    def _note_costs(self, placed: Placed) -> None:
        far = [tier for tier in placed.by_tier if tier not in ("device", "ram")]
        if len(far) == 1:
            self._costs.loaded(far[0], placed.by_tier[far[0]], placed.load_ms / 1e3 + placed.arena.waited)

    def _emit(self, placed: Placed, *, tail: bool, asked: bool) -> None:
        """Name what the arena holds and queue fresh blocks for the store. It stays pinned until they are copied."""
        plan, arena = placed.plan, placed.arena
        if moved := {span.ref.run_id for span in plan.relocates if span.ref.tier == "disk"}:
            self._archive.promote(sorted(moved))
        if plan.relocates:  # only what stands before the first chunk is the prompt's own
            if plan.unblended is None:
                arena.seek(plan.prefix_end)
                return
            plan = plan.unblended
        keep = placed.linked.prompt.keep
        end = placed.computed_to if keep is None else min(placed.computed_to, keep)
        blocks = [block for block in placed.linked.blocks if block.end <= end]
        whole = len(blocks) == len(placed.linked.blocks)
        tail = tail or not whole
        whole = whole and not placed.plan.relocates  # what follows blended KV is not stored
        fresh = fresh_blocks(blocks, plan, tail=tail, again=self._choosy, far=self._archive.remotes.names)
        if tail and whole and len(placed.generated) > 1 and fresh.blocks:
            fresh = _with_generated(placed, fresh)
        loaded = [ref for load in plan.loads for ref in load.refs]
        if plan.exactness is not Exactness.EXACT:  # else they are among the fresh ones
            self._archive.pull(loaded)
        if arena.is_late and not fresh.blocks:  # a pure hit of what is read elsewhere: it is found there again
            arena.seek(0)
        else:
            if arena.is_late:  # what is encoded stays so, but for what is stored anew
                arena.settle(fresh.blocks[0].start if arena.holds_encoded else 0)
            if plan.exactness is Exactness.EXACT:
                arena.set_resident(blocks, [block.exact for block in blocks])
            else:
                exact = [ref.id for load in plan.loads if load.exactness is Exactness.EXACT for ref in load.refs]
                exact = exact[: len(blocks)]  # those behind `keep` are not named
                arena.set_resident(blocks[: len(exact)], exact)
        if fresh.blocks:
            end = fresh.blocks[-1].end
            self._pool.pin(arena, end)
            self._archive.put(
                arena,
                fresh.blocks,
                placed.linked.namespace,
                ids=fresh.ids,
                parent=fresh.parent,
                on_copied=lambda: self._pool.unpin(arena, end),
                asked=asked,
            )
        self._archive.promote(ref.run_id for ref in loaded if ref.tier == "disk")


def _with_generated(placed: Placed, fresh: Fresh) -> Fresh:
    """The same with what was decoded after it, found by its tokens only: it was computed row by row."""
    linked = placed.linked
    tokens = np.concatenate([linked.prompt.tokens, token_ids(placed.generated[:-1])])  # the last one was not run
    cuts = [*(block.end for block in linked.blocks), len(tokens)]
    return fresh.followed_by(chain(tokens, cuts, linked.namespace, linked.prompt.extra_keys)[-1])
