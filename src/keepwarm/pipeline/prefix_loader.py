"""Stored KV in an arena for one request: link, load, link again when what was found is unusable, store what is new."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from transformers.cache_utils import Cache

from keepwarm.compiler.emit import Fresh, fresh_blocks, stored_end
from keepwarm.core.blocks import Block, PrefixNames, TokenIds, chain, token_ids
from keepwarm.core.cost import Costs
from keepwarm.core.identity import Namespace
from keepwarm.core.naming import Naming
from keepwarm.core.plan import LinkPlan
from keepwarm.core.ports import KVSource
from keepwarm.core.results import Miss
from keepwarm.core.spans import Exactness, MissReason, Reuse
from keepwarm.errors import CorruptRun
from keepwarm.linker.diagnose import Misses
from keepwarm.linker.link import NamedPrompt, link
from keepwarm.pipeline.linked import Linked
from keepwarm.pipeline.snapshots import Snapshots
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.arena.held import Held, KVCopy
from keepwarm.runtime.arena.pool import ArenaPool
from keepwarm.runtime.blend.repair import Blended
from keepwarm.runtime.blend.rope import Relocator
from keepwarm.runtime.execute import place, prefill, relocate
from keepwarm.runtime.runner import Runner
from keepwarm.store.archive import Archive

log = logging.getLogger(__name__)

_COPIED = 2048  # tokens, at most, copied for the store before an answer is handed over: 1 % of computing them
_RELINKS = 8  # corrupt runs that one request may meet before it is computed in full


@dataclass
class Placed:
    """A linked prompt whose stored KV is in an arena, or on its way there."""

    linked: Linked
    reuse: Reuse
    capacity: int
    warming: bool
    overlap: bool  # layers may arrive while earlier ones are computed with; `prefill` then meets the failures
    arena: Arena
    plan: LinkPlan = field(init=False)
    beside: TokenIds | None = None  # what an arena held that begins like the prompt
    miss: Miss | None = None  # why the plan reuses no more
    by_tier: dict[str, int] = field(default_factory=dict)
    blended_by_tier: dict[str, int] = field(default_factory=dict)  # of chunks: not part of `by_tier`
    blended: Blended | None = None  # once a prompt with chunks in it is computed
    link_ms: float = 0.0
    load_ms: float = 0.0
    failures: int = 0
    computed_to: int = 0  # position up to which the engine's own steps have computed the prompt
    generated: Sequence[int] = ()  # the answer that was decoded into the arena after it
    goes_on: bool = False  # elsewhere: what follows the prompt's last whole block is stored from there, by `answered`

    @property
    def keeps_tail(self) -> bool:
        """Whether the last step's block is stored under scheduled arithmetic."""
        return self.warming or self.reuse is Reuse.PREFIX

    def failed(self, error: CorruptRun) -> None:
        """Something stored turned out unusable."""
        log.warning("a stored run cannot be used and is recomputed: %s", error)
        self.failures += 1

    @property
    def wanted(self) -> Held | None:
        """What to look for in arenas."""
        return self.linked.held if self.reuse is not Reuse.OFF else None

    @property
    def run_tokens(self) -> TokenIds:
        """Whose KV the engine's own steps left in the arena: the prompt's as far as it was computed, then the
        answer's."""
        prompt = self.linked.prompt.tokens
        if self.computed_to < len(prompt):
            return prompt[: self.computed_to]
        answered = self.arena.length - len(prompt)
        return np.concatenate([prompt, token_ids(self.generated[:answered])]) if answered > 0 else prompt


class PrefixLoader:
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
        answers: bool,
        lossy: bool,
        relocator: Callable[[], Relocator],
        is_current: Callable[[Namespace], bool],
        snapshots: Snapshots | None = None,
    ) -> None:
        """`choosy`: the store may turn blocks down, which are then offered again; `answers`: they are stored; `lossy`:
        the store's codec is. `relocator` moves chunks. `is_current`: the model is still the one of that namespace.
        `snapshots` are kept for a model with recurrent state."""
        self._snapshots = snapshots
        self._is_current = is_current
        self.naming = Naming()
        self._pool, self._archive, self._runner, self._costs, self._misses = pool, archive, runner, costs, misses
        self._choosy, self._answers, self._lossy, self._relocator = choosy, answers, lossy, relocator

    def plan(self, linked: Linked, reuse: Reuse, resident: int, costs: Costs) -> tuple[LinkPlan, Miss | None]:
        """What of a prompt is loaded and computed, and why no more is reused: of a request that is only explained.
        Reads no KV."""
        plan = self.link(linked, reuse, resident, costs)
        return plan, self._misses.of(linked, plan, self._pool.beside(linked.held))

    def explain(self, placed: Placed) -> None:
        """Say why a request reuses no more: asked once its first token is out, and before anything of it is stored."""
        placed.miss = self._misses.of(placed.linked, placed.plan, placed.beside)

    def link(self, linked: Linked, reuse: Reuse, resident: int, costs: Costs) -> LinkPlan:
        """The plan alone."""
        prompt = NamedPrompt(linked.prompt.tokens, linked.blocks, linked.names, linked.grid, linked.stateful)
        return link(
            prompt,
            self._archive,
            reuse,
            resident=resident,
            costs=costs,
            blending=linked.blending,
            lossy=self._lossy,
            longest_part=self._pool.geometry.longest_part,
        )

    @contextmanager
    def lease(self, linked: Linked, reuse: Reuse, capacity: int, *, warming: bool, overlap: bool) -> Iterator[Placed]:
        """An arena of `capacity` positions with the prompt's stored KV in place, for as long as the block runs.

        The block computes the rest and sets `computed_to`; the blocks up to there are then stored, and what was
        `generated`. Under scheduled arithmetic the last step's is only when `warming` or when weaker reuse than `exact`
        may find it. With `overlap` KV may still be on its way: the first step is then run by `prefill`, or by a
        caller who calls `relink` after a CorruptRun.
        """
        wanted = linked.held if reuse is not Reuse.OFF else None
        beside = None if wanted is None else self._pool.beside(wanted)
        arena = self._pool.acquire(wanted, capacity)
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
        """Compute what the plan leaves to compute; the logits after the last token, `[vocab]`."""
        return self.repeated(placed, lambda: self.compute(placed))

    def repeated(self, placed: Placed, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `compute` returns; it begins anew when something stored turns out unusable on its way."""
        while True:
            try:
                return compute()
            except CorruptRun as error:
                self.relink(placed, error)

    def compute(self, placed: Placed) -> torch.Tensor:
        """The same of a plan without chunks, once. Raises CorruptRun for what turns out unusable on its way."""
        return prefill(placed.plan, placed.linked.prompt.tokens, placed.arena.cache, self._runner, self._costs)

    def relink(self, placed: Placed, error: CorruptRun) -> None:
        """Start anew with a prompt of which something stored, since taken out of use, turned out unusable."""
        placed.failed(error)
        self._fill(placed)

    def _fill(self, placed: Placed) -> None:
        """Link, and load into the arena."""
        started = time.perf_counter()
        linked, tokens, wanted = placed.linked, placed.linked.prompt.tokens, placed.wanted
        while True:
            if (lost := placed.arena).arrivals.lost:
                placed.arena = self._pool.acquire(wanted, placed.capacity)
                self._pool.release(lost)
            arena = placed.arena
            corrupt = placed.failures >= _RELINKS
            resident = arena.resident(wanted) if wanted is not None else 0
            plan = self.link(linked, Reuse.OFF if corrupt else placed.reuse, resident, self._costs)
            if not arena.gap.serves(plan.resident):  # it goes on before the end of what is resident: at a snapshot
                plan = self.link(linked, placed.reuse, arena.gap.start, self._costs)
            if corrupt:  # nothing stored is to be trusted any more
                plan = replace(plan, miss_reason=MissReason.CORRUPT)
            linked_at = time.perf_counter()
            self._pool.wait_readers(arena, plan.resident)
            try:
                placed.by_tier, placed.blended_by_tier = place(plan, tokens, arena, self._archive.load), {}
                if not placed.overlap or plan.relocates:
                    arena.arrive_all()
                if plan.relocates:
                    placed.blended_by_tier = relocate(plan, tokens, arena, self._archive.load, self._relocator())
                arena.landed()
                if self._snapshots is not None:
                    self._snapshots.restore(arena, plan, linked)
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
        """Run the last step of a batched prompt, and note what it took; the logits after its last token, `[vocab]`.

        Other requests' steps ran between the prompt's own, so this one stands for all of them.
        """
        waited = placed.arena.waited if placed is not None else 0.0
        began = time.perf_counter()
        logits = self._runner.step(tokens[start:end], cache, start)
        if placed is not None:
            logits[:1].cpu()  # waits: a device computes while its caller goes on
            self._costs.computed(end - start, time.perf_counter() - began - (placed.arena.waited - waited))
        return logits

    def last_steps(self, steps: Sequence[tuple[Placed, TokenIds, int]]) -> torch.Tensor:
        """As `last_step`, for several prompts in one pass: each one's tokens from a position on. Logits
        `[len(steps), vocab]`."""
        placed, tokens, starts = zip(*steps, strict=True)
        began = time.perf_counter()
        logits = self._runner.step_together(tokens, starts, [each.arena.sequenced() for each in placed])
        for each, part, start in steps:
            each.arena.advance(start + len(part))
        self._costs.computed(sum(map(len, tokens)), time.perf_counter() - began)
        return logits

    def _note_costs(self, placed: Placed) -> None:
        far = [tier for tier in placed.by_tier if tier not in ("device", "ram")]
        if len(far) == 1:
            self._costs.loaded(far[0], placed.by_tier[far[0]], placed.load_ms / 1e3 + placed.arena.waited)

    def _emit(self, placed: Placed, *, tail: bool, asked: bool) -> None:
        """Name what the arena holds and queue fresh blocks for the store. It stays pinned until they are copied."""
        plan, arena = placed.plan, placed.arena
        taken = dict(arena.states.taken)
        if moved := {span.ref.run_id for span in plan.relocates if span.ref.tier == "disk"}:
            self._archive.promote(sorted(moved))
        if plan.relocates:  # only what stands before the first chunk is the prompt's own
            if plan.unblended is None:
                arena.seek(plan.prefix_end)
                return
            plan = plan.unblended
        tokens, fresh = self._fresh(placed, plan, tail)
        loaded = [ref for load in plan.loads for ref in load.refs]
        loaded += [plan.state] if plan.state is not None else []
        if plan.exactness is Exactness.EXACT:  # else they are among the fresh ones
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
        self._archive.promote(ref.run_id for ref in loaded if ref.tier == "disk")

    def _store(self, placed: Placed, fresh: Fresh, asked: bool) -> None:
        """Queue fresh blocks. What is short is copied now, so that the next request has the arena as it is; else the
        arena stays pinned until it is read."""
        arena, pool = placed.arena, self._pool
        start, end = fresh.blocks[0].start, fresh.blocks[-1].end
        source: KVSource = arena
        on_copied = None
        if placed.linked.grid.inside and end - start <= _COPIED:
            source = KVCopy.of(arena, start, end)
        else:
            pool.pin(arena, end)
            on_copied = partial(pool.unpin, arena, end)
        self._archive.put(
            source,
            fresh.blocks,
            placed.linked.namespace,
            ids=fresh.ids,
            parent=fresh.parent,
            on_copied=on_copied,
            asked=asked,
            epoch=placed.linked.epoch,
            names=self._names(placed, placed.run_tokens) if placed.plan.exactness is Exactness.EXACT else None,
        )

    def answered(self, placed: Placed, source: KVSource, length: int, on_copied: Callable[[], None]) -> None:
        """Store what follows the last whole block of a prompt that `goes_on`: `source` holds `length` positions of it
        and its `generated` answer, and stays readable until `on_copied` is called."""
        linked = placed.linked
        length = length if self._answers else min(length, len(linked.prompt.tokens))
        tokens = np.concatenate([linked.prompt.tokens, token_ids(placed.generated)])[:length]
        blocks = linked.blocks_of(tokens)
        whole = linked.blocks.last_start
        fresh = [block for block in blocks if block.end > max(whole, placed.plan.prefix_end)]
        if not self._may_keep(placed):
            fresh = []
        names = self._names(placed, tokens)
        self._archive.put(source, fresh, linked.namespace, on_copied=on_copied, epoch=linked.epoch, names=names)

    @staticmethod
    def _names(placed: Placed, tokens: TokenIds) -> PrefixNames | None:
        """The names of tokens that begin with a prompt, where parts of blocks are good for something."""
        linked = placed.linked
        return PrefixNames(tokens, linked.namespace, linked.prompt.extra_keys) if linked.grid.inside else None

    def _may_keep(self, placed: Placed) -> bool:
        """Whether neither a purge nor another model or arithmetic came meanwhile: nothing of before may follow them."""
        linked = placed.linked
        return self._archive.allows(linked.epoch, linked.tags) and self._is_current(linked.namespace)

    @staticmethod
    def _keep_own(arena: Arena, fresh: Fresh) -> None:
        """Let an arena hold what it read elsewhere itself, if anything of it is stored anew; else it is found there
        again. What is encoded stays so, but for what is stored anew."""
        if arena.is_late and not fresh.blocks:
            arena.seek(0)
        elif arena.is_late:
            arena.materialize(fresh.blocks[0].start if arena.holds_encoded else 0)

    def _fresh(self, placed: Placed, plan: LinkPlan, tail: bool) -> tuple[TokenIds, Fresh]:
        """What may be found again of what the arena holds, and its blocks that are new."""
        linked = placed.linked
        prompt, tokens = linked.prompt, placed.run_tokens
        if prompt.keep is not None:
            tokens = tokens[: prompt.keep]
        if not linked.grid.inside:
            return self._fresh_steps(placed, plan, tokens[: len(prompt.tokens)], tail)
        base = None if plan.exactness is Exactness.EXACT else stored_end(plan)
        stored = tokens if self._answers else tokens[: len(prompt.tokens)]
        blocks: Sequence[Block] = linked.blocks_of(stored, base)
        if placed.goes_on and len(tokens) == len(prompt.tokens):
            blocks = blocks[:-1]
        return tokens, fresh_blocks(blocks, plan, again=self._choosy, far=self._archive.remotes.names)

    def _fresh_steps(self, placed: Placed, plan: LinkPlan, tokens: TokenIds, tail: bool) -> tuple[TokenIds, Fresh]:
        """The same under scheduled arithmetic. The last step's block is stored only with `tail`: at a position that
        is no cut of another prompt it can never match exactly."""
        linked = placed.linked
        blocks = [block for block in linked.blocks if block.end <= len(tokens)]
        whole = len(blocks) == len(linked.blocks)
        tail = tail or not whole
        far, loaded = self._archive.remotes.names, placed.arena.gap.end
        offered = blocks if tail else blocks[:-1]
        fresh = fresh_blocks(offered, plan, again=self._choosy, far=far, whole_from=loaded)
        if tail and whole and not placed.plan.relocates and len(placed.generated) > 1 and fresh.blocks:
            fresh = _with_generated(placed, fresh)
        return tokens[: blocks[-1].end if blocks else 0], fresh


def _with_generated(placed: Placed, fresh: Fresh) -> Fresh:
    """The same with what was decoded after it, found by its tokens only: it was computed row by row."""
    linked = placed.linked
    cuts = [*linked.blocks.ends, len(placed.run_tokens)]
    return fresh.followed_by(chain(placed.run_tokens, cuts, linked.namespace, linked.prompt.extra_keys)[-1])
