"""Stored KV in an arena for one request: link, load, link again when a stored run is unusable, store what is new."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from transformers.cache_utils import Cache

from keepwarm.compiler.emit import Fresh, fresh_blocks, stored_end
from keepwarm.core.blocks import PrefixNames, TokenIds, chain, token_ids
from keepwarm.core.cost import Costs
from keepwarm.core.identity import Namespace
from keepwarm.core.naming import Naming
from keepwarm.core.plan import LinkPlan
from keepwarm.core.ports import KVSource
from keepwarm.core.results import Miss
from keepwarm.core.spans import Exactness, MissReason, Reuse
from keepwarm.errors import CorruptRun, Overloaded
from keepwarm.linker.diagnose import Misses
from keepwarm.linker.link import NamedPrompt, link
from keepwarm.pipeline.linked import Linked
from keepwarm.pipeline.placed import Placed
from keepwarm.pipeline.snapshots import Snapshots
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.arena.for_store import for_store
from keepwarm.runtime.arena.pool import ArenaPool
from keepwarm.runtime.blend.rope import Relocator
from keepwarm.runtime.execute import place, prefill, relocate
from keepwarm.runtime.runner import Runner
from keepwarm.store.archive import Archive

_RELINKS = 8  # a request that meets this many corrupt runs is computed in full


@dataclass(frozen=True)
class StoreRules:
    """What an engine's store does with what it is offered."""

    choosy: bool  # it may turn blocks down, which are then offered again
    answers: bool  # answers are stored
    lossy: bool  # its codec is lossy
    twice: bool = False  # it takes blocks only when they are offered a second time


class PrefixLoader:
    """Fills arenas with the KV of prompts, from one archive, and stores what is new."""

    def __init__(
        self,
        pool: ArenaPool,
        archive: Archive,
        runner: Runner,
        costs: Costs,
        misses: Misses,
        rules: StoreRules,
        *,
        relocator: Callable[[], Relocator],
        is_current: Callable[[Namespace], bool],
        snapshots: Snapshots | None = None,
    ) -> None:
        """`relocator` moves chunks. `is_current` tells whether a namespace still describes the model. `snapshots` is
        for a model with recurrent state."""
        self._snapshots = snapshots
        self._is_current = is_current
        self.naming = Naming()
        self._pool, self._archive, self._runner, self._costs, self._misses = pool, archive, runner, costs, misses
        self._rules, self._relocator = rules, relocator

    def plan(self, linked: Linked, reuse: Reuse, resident: int, costs: Costs) -> tuple[LinkPlan, Miss | None]:
        """Return the plan of a request that is only explained, and why it reuses no more. Reads no KV."""
        plan = self.link(linked, reuse, resident, costs)
        return plan, self._misses.of(linked, plan, self._pool.beside(linked.held))

    def explain(self, placed: Placed) -> None:
        """Set why a request reuses no more. Call it after its first token, before anything of it is stored."""
        placed.miss = self._misses.of(placed.linked, placed.plan, placed.beside)

    def link(self, linked: Linked, reuse: Reuse, resident: int, costs: Costs, *, own_states: bool = False) -> LinkPlan:
        """Return the plan: what of the prompt is loaded and what is computed."""
        named = linked.prompt.tokens, linked.blocks, linked.names, linked.grid
        prompt = NamedPrompt(*named, linked.stateful, own_states, tuple(linked.prompt.breakpoints))
        return link(
            prompt,
            self._archive,
            reuse,
            resident=resident,
            costs=costs,
            blending=linked.blending,
            lossy=self._rules.lossy,
            longest_part=self._pool.geometry.longest_part,
        )

    @contextmanager
    def lease(
        self, linked: Linked, reuse: Reuse, capacity: int, *, warming: bool, overlap: bool, wait: float
    ) -> Iterator[Placed]:
        """Lend an arena of `capacity` positions with the prompt's stored KV, while the `with` block runs.

        The `with` block computes the rest and sets `computed_to`; KV up to there, and what was `generated`, is then
        stored. Under scheduled arithmetic the last step's block is stored only when `warming`, or when weaker reuse
        than `exact` may find it. With `overlap`, KV may still be on its way: then run the first step with `prefill`, or
        call `relink` after a CorruptRun. `wait`: see `ArenaPool.acquire`.
        """
        wanted = linked.held if reuse is not Reuse.OFF else None
        beside = None if wanted is None else self._pool.beside(wanted)
        arena = self._pool.acquire(wanted, capacity, linked.prompt.lora, wait=wait)
        placed = Placed(linked, reuse, capacity, warming, overlap, arena, beside=beside)
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
                    placed.arena.seek(0 if placed.arena.arrivals else placed.plan.prefix_end)
                else:
                    self._note_costs(placed)
                    if not self._may_keep(placed):
                        placed.arena.seek(0)
                    elif reuse is not Reuse.OFF:
                        self._emit(placed, tail=placed.keeps_tail, asked=warming)
            finally:
                self._pool.release(placed.arena)

    def prefill(self, placed: Placed) -> torch.Tensor:
        """Compute the rest of the prompt. Return the logits after its last token, `[vocab]`."""
        return self.repeated(placed, lambda: self.compute(placed))

    def repeated(self, placed: Placed, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the result of `compute`. Relink and call it again when a stored run turns out unusable, or once KV
        that nobody uses has made way for a step without memory."""
        while True:
            try:
                return compute()
            except CorruptRun as error:
                self.relink(placed, error)
            except Overloaded:
                if not self.made_way(placed):
                    raise

    def compute(self, placed: Placed) -> torch.Tensor:
        """Compute the rest of a prompt without chunks, in one attempt. Return the logits after its last token,
        `[vocab]`. Raises CorruptRun when a stored run turns out unusable."""
        tokens, cache = placed.linked.prompt.tokens, placed.arena.cache
        return prefill(placed.plan, tokens, cache, self._runner, self._costs, largest=placed.largest)

    def relink(self, placed: Placed, error: CorruptRun) -> None:
        """Link and load again after a stored run turned out unusable; it is out of use by now."""
        placed.failed(error)
        self._fill(placed)

    def made_way(self, placed: Placed) -> bool:
        """Evict what is kept on the device for later, since a step of this prompt had no memory, then link and load
        again. Return False if nothing was kept."""
        if not self._pool.evict():
            return False
        self._fill(placed)
        return True

    def again(self, placed: Placed) -> None:
        """Link and load again after a step that failed may have moved the recurrent state."""
        self._fill(placed)

    def _fill(self, placed: Placed) -> None:
        """Link, and load into the arena."""
        started = time.perf_counter()
        linked, tokens, wanted = placed.linked, placed.linked.prompt.tokens, placed.wanted
        placed.computed_to = 0
        while True:
            if (lost := placed.arena).arrivals.lost:
                placed.arena = self._pool.acquire(wanted, placed.capacity, linked.prompt.lora)
                self._pool.release(lost)
            arena = placed.arena
            corrupt = placed.failures >= _RELINKS
            resident = arena.resident(wanted) if wanted is not None else 0
            plan_of = partial(self.link, linked, own_states=placed.own_states)
            plan = plan_of(Reuse.OFF if corrupt else placed.reuse, resident, self._costs)
            if not arena.gap.serves(plan.resident):  # it continues at a snapshot, before the end of the resident KV
                plan = plan_of(placed.reuse, arena.gap.start, self._costs)
            if corrupt:  # too many failures: use nothing that is stored
                plan = replace(plan, miss_reason=MissReason.CORRUPT)
            linked_at = time.perf_counter()
            self._pool.wait_readers(arena, plan.resident)
            try:
                placed.by_tier, placed.blended_by_tier = place(plan, tokens, arena, self._archive.load), {}
                if not placed.overlap or plan.relocates:
                    arena.arrive_all()
                if plan.relocates:
                    placed.blended_by_tier = relocate(plan, tokens, arena, self._archive.load, self._relocator())
                if self._snapshots is not None:
                    if not self._snapshots.restore(arena, plan, linked, own=placed.own_states):
                        placed.own_states = True
                        continue
                    self._snapshots.ask(arena, plan, linked, whole=placed.keeps_tail)
                break
            except CorruptRun as error:
                placed.failed(error)
        placed.plan = plan
        placed.link_ms += (linked_at - started) * 1e3
        placed.load_ms += (time.perf_counter() - linked_at) * 1e3
        if plan.miss_reason is MissReason.SLOWER:
            self._archive.contents.count("recomputed_by_choice")

    def last_step(self, placed: Placed | None, tokens: TokenIds, start: int, end: int, cache: Cache) -> torch.Tensor:
        """Run the last step of a batched prompt and note its cost. Return the logits after its last token, `[vocab]`.

        Only the last one is measured, for others' steps ran between this prompt's; and not if it may wait for copies.
        """
        if placed is None or placed.arena.is_copying:
            largest = placed is not None and placed.largest
            return self._runner.step(tokens[start:end], cache, start, largest=largest)
        waited = placed.arena.waited
        began = time.perf_counter()
        logits = self._runner.step(tokens[start:end], cache, start, largest=placed.largest)
        logits[:1].cpu()  # waits for the device, which computes asynchronously
        self._costs.computed(end - start, time.perf_counter() - began - (placed.arena.waited - waited))
        return logits

    def last_steps(self, steps: Sequence[tuple[Placed, TokenIds, int]]) -> torch.Tensor:
        """Run the last steps of several prompts in one pass and note their cost. A step is a prompt, its tokens and
        the position of their first. Return the logits after each last token, `[len(steps), vocab]`. If it fails,
        recurrent states are lost."""
        placed, tokens, starts = zip(*steps, strict=True)
        began = time.perf_counter()
        ends = [start + len(part) for part, start in zip(tokens, starts, strict=True)]
        for each, start in zip(placed, starts, strict=True):
            each.arena.check(start)
            each.arena.in_turn()
        sequences = [each.arena.sequenced(end) for each, end in zip(placed, ends, strict=True)]
        try:
            largest = all(each.largest for each in placed)
            logits = self._runner.step_together(tokens, starts, sequences, largest=largest)
            logits[:1, :1].cpu()  # waits for the device, which computes asynchronously
            for each, end in zip(placed, ends, strict=True):
                each.arena.advance(end)
        except BaseException:
            for each in placed:
                each.arena.states.lose()
            raise
        if not any(each.arena.is_copying for each in placed):
            self._costs.computed(sum(map(len, tokens)), time.perf_counter() - began)
        return logits

    def _note_costs(self, placed: Placed) -> None:
        far = [tier for tier in placed.by_tier if tier not in ("device", "ram")]
        beside = "ram" in placed.by_tier and not placed.arena.port.is_host  # its copies to the device are in the time
        if len(far) == 1 and not beside:
            self._costs.loaded(far[0], placed.by_tier[far[0]], placed.load_ms / 1e3 + placed.arena.waited)

    def _emit(self, placed: Placed, *, tail: bool, asked: bool) -> None:
        """Name the arena's content and queue fresh blocks for the store. It stays pinned until they are copied."""
        plan, arena = placed.plan, placed.arena
        taken = dict(arena.states.taken)
        if moved := {span.ref.run_id for span in plan.relocates if span.ref.tier == "disk"}:
            self._archive.promote(sorted(moved))
        if plan.relocates:  # only KV before the first chunk is the prompt's own
            if plan.unblended is None:
                arena.seek(plan.prefix_end)
                return
            plan = plan.unblended
        tokens, fresh = self._fresh(placed, plan, tail)
        loaded = [ref for load in plan.loads for ref in load.refs]
        loaded += [plan.state] if plan.state is not None else []
        if plan.exactness is Exactness.EXACT:  # otherwise they are among the fresh ones
            self._archive.pull(loaded, placed.linked.epoch)
        if arena.holds_encoded or not placed.linked.grid.inside:
            self._keep_own(arena, fresh)
        elif fresh.blocks:
            arena.bring(fresh.blocks[0].start)
        if plan.exactness is not Exactness.EXACT:
            exact = [load.end for load in plan.loads if load.exactness is Exactness.EXACT]
            tokens = tokens[: max(exact, default=0)]
        arena.hold(placed.linked.held_of(tokens[: arena.length]))
        if fresh.blocks:
            self._store(placed, fresh, asked)
        if self._snapshots is not None:
            self._snapshots.keep(taken, plan, placed.linked, fresh, asked=asked)
            placed.behind = taken if placed.goes_on else {}
        self._archive.promote(ref.run_id for ref in loaded if ref.tier == "disk")

    def _store(self, placed: Placed, fresh: Fresh, asked: bool) -> None:
        """Queue fresh blocks for the store. What it reads from the arena stays pinned until it is read."""
        arena, pool = placed.arena, self._pool
        names = self._names(placed, placed.run_tokens) if placed.plan.exactness is Exactness.EXACT else None
        source: KVSource = arena
        end = fresh.blocks[-1].end
        if placed.linked.grid.inside:
            source, end = for_store(arena, fresh.blocks[0].start, end, len(placed.linked.prompt.tokens) - 1)
        if end:
            pool.pin(arena, end)
        self._archive.put(
            source,
            fresh.blocks,
            placed.linked.namespace,
            ids=fresh.ids,
            parent=fresh.parent,
            on_copied=partial(pool.unpin, arena, end) if end else None,
            asked=asked,
            epoch=placed.linked.epoch,
            names=names,
        )

    def share(self, placed: Placed) -> bool:
        """Offer a prompt's blocks to the store now, since another request waits for them. Otherwise that is done once
        the answer is there. Return False if they cannot be had before."""
        plan = placed.plan
        if placed.reuse is Reuse.OFF or plan.relocates or plan.exactness is not Exactness.EXACT or self._rules.twice:
            return False
        _, fresh = self._fresh(placed, plan, tail=False)
        if not fresh.blocks or not self._may_keep(placed):
            return False
        self._store(placed, fresh, asked=False)
        if self._snapshots is not None:
            taken = dict(placed.arena.states.taken)
            self._snapshots.keep(taken, plan, placed.linked, fresh, asked=False, counted=False)
        return True

    def answered(self, placed: Placed, source: KVSource, length: int, on_copied: Callable[[], None]) -> None:
        """Store what follows the last whole block of a prompt that `goes_on`. `source` holds `length` positions of the
        prompt and its `generated` answer. It must stay readable until `on_copied` is called."""
        linked = placed.linked
        length = length if self._rules.answers else min(length, len(linked.prompt.tokens))
        tokens = np.concatenate([linked.prompt.tokens, token_ids(placed.generated)])[:length]
        blocks = linked.blocks_of(tokens)
        known = bisect_right(blocks.ends, max(linked.blocks.last_start, placed.plan.prefix_end))
        fresh = blocks[known:] if self._may_keep(placed) else ()
        names = self._names(placed, tokens)
        self._archive.put(source, fresh, linked.namespace, on_copied=on_copied, epoch=linked.epoch, names=names)
        if self._snapshots is not None:
            new = Fresh(fresh, tuple(block.exact for block in fresh))
            self._snapshots.keep(placed.behind, placed.plan, linked, new, asked=False)

    @staticmethod
    def _names(placed: Placed, tokens: TokenIds) -> PrefixNames | None:
        """Return the names of tokens that begin with a prompt; None if parts of blocks cannot be reused."""
        linked = placed.linked
        return linked.names_of(tokens) if linked.grid.inside else None

    def _may_keep(self, placed: Placed) -> bool:
        """Whether the request's KV may be kept: no purge and no change of model or arithmetic came since it began."""
        linked = placed.linked
        return self._archive.allows(linked.epoch, linked.tags) and self._is_current(linked.namespace)

    @staticmethod
    def _keep_own(arena: Arena, fresh: Fresh) -> None:
        """Copy into the arena what it reads from elsewhere, if there are blocks to store; otherwise empty it, for that
        KV can be found elsewhere again. Encoded KV stays encoded, except for the blocks to store."""
        if arena.is_late and not fresh.blocks:
            arena.seek(0)
        elif arena.is_late:
            arena.materialize(fresh.blocks[0].start if arena.holds_encoded else 0)

    def _fresh(self, placed: Placed, plan: LinkPlan, tail: bool) -> tuple[TokenIds, Fresh]:
        """Return the arena's tokens that later requests may find, and its blocks that are new to the store."""
        linked = placed.linked
        prompt, tokens = linked.prompt, placed.run_tokens
        if prompt.keep is not None:
            tokens = tokens[: prompt.keep]
        if not linked.grid.inside:
            return self._fresh_steps(placed, plan, tokens[: len(prompt.tokens)], tail)
        base = None if plan.exactness is Exactness.EXACT else stored_end(plan)
        stored = tokens if self._rules.answers else tokens[: len(prompt.tokens)]
        blocks = linked.blocks_of(stored, base)
        count = len(blocks) - (placed.goes_on and len(tokens) == len(prompt.tokens))
        far, loaded = self._archive.remotes.names, placed.arena.gap.end
        return tokens, fresh_blocks(blocks, plan, count, again=self._rules.choosy, far=far, whole_from=loaded)

    def _fresh_steps(self, placed: Placed, plan: LinkPlan, tokens: TokenIds, tail: bool) -> tuple[TokenIds, Fresh]:
        """Do what `_fresh` does, under scheduled arithmetic. Without `tail` the last step's block is not stored: where
        no other prompt has a cut, it can never match exactly."""
        linked = placed.linked
        blocks = [block for block in linked.blocks if block.end <= len(tokens)]
        whole = len(blocks) == len(linked.blocks)
        tail = tail or not whole
        far, loaded = self._archive.remotes.names, placed.arena.gap.end
        offered = blocks if tail else blocks[:-1]
        fresh = fresh_blocks(offered, plan, again=self._rules.choosy, far=far, whole_from=loaded)
        if tail and whole and not placed.plan.relocates and len(placed.generated) > 1 and fresh.blocks:
            fresh = _with_generated(placed, fresh)
        return tokens[: blocks[-1].end if blocks else 0], fresh


def _with_generated(placed: Placed, fresh: Fresh) -> Fresh:
    """Add the block of the decoded answer. It was computed row by row, so only its tokens name it."""
    linked = placed.linked
    cuts = [*linked.blocks.ends, len(placed.run_tokens)]
    return fresh.followed_by(chain(placed.run_tokens, cuts, linked.namespace, linked.prompt.extra_keys)[-1])
