"""A batch's rounds: compute steps of prompts, add a token to each running answer, and end requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from itertools import pairwise
from threading import Condition

import torch

from keepwarm.batching.admission import Admission, UnderWay
from keepwarm.batching.decoding import Decoding
from keepwarm.batching.request import Prefilling, Running, Waiting, begun
from keepwarm.batching.turns import LEAST_ROWS, TOGETHER, Turns
from keepwarm.core.results import Piece
from keepwarm.core.schedule import next_part
from keepwarm.core.spans import Exactness, Reuse
from keepwarm.errors import CorruptRun, Overloaded
from keepwarm.pipeline.pipeline import Pipeline
from keepwarm.runtime.native.places import PAGE
from keepwarm.runtime.pages import KVPages, PagedSequence, page_names
from keepwarm.store.page_pool import PagePool

log = logging.getLogger(__name__)

_ALIKE = 1024  # prompts of one pass differ at most by this many tokens: attention pads all to the longest


class Rounds:
    """The work of a batch's thread. Other threads add requests and read the state, under the lock `changed`."""

    def __init__(
        self, pipeline: Pipeline, memory: KVPages | None, pool: PagePool, changed: Condition, most: int, rows: int
    ) -> None:
        """At most `most` requests run at once, and at most `rows` rows of prompts are computed per round."""
        self.changed = changed
        self.cancelling = False
        self.peak = 0
        self._pipeline, self._pool = pipeline, pool
        self._runner = pipeline.model.runner
        self._most_rows = rows
        self._turns = Turns(rows)
        self._under_way = UnderWay()
        self.admission = Admission(pipeline, memory, pool, changed, self._turns, self._under_way, most, rows)
        self._slots = self._held = 0
        self._decoding = Decoding(pipeline, self._under_way, self._turns, self._guarding, self._grow, self._fail_all)

    @property
    def under_way(self) -> tuple[int, int]:
        """How many requests are being prefilled, and how many run."""
        return len(self._under_way.prefilling), len(self._under_way.running)

    @property
    def slots_used(self) -> float:
        """The share of token slots, in pages in use, that held tokens, over all rounds."""
        return self._held / self._slots if self._slots else 1.0

    def drop_memory(self) -> None:
        """Release the pages' memory; no request may run afterwards."""
        self.admission.memory = None
        self._decoding.drop()

    def jobs(self) -> list[Waiting]:
        return [*self.admission.waiting, *self._under_way.all]

    # ---- in the batch's thread ----

    def run(self) -> bool:
        """Run one round. Return whether anything could be done."""
        for job in self.jobs():
            if job.ticket.cancelled or self.cancelling:
                self._fail(job, CancelledError("the request was cancelled"))
        self._turns.round += 1
        ran = self._prefill_some() or bool(self._under_way.running)
        if self._decoding.run():
            self._measure()
        return ran

    def _prefill_some(self) -> bool:
        """Run steps of prompts, for at most as long as others may have to wait. Return whether any ran."""
        left, ran = self._most_rows, False
        while left > 0:
            self._admit()
            self._turns.look(self._under_way.all)
            job = self._turns.due(self._under_way.prefilling)
            if job is None:
                break
            group = self._beside(job)
            rows = self._prefill_together(group) if len(group) > 1 else self._prefill(job)
            left = min(left, self._turns.rows) - max(rows, LEAST_ROWS * len(group))
            ran = True
        return ran

    def _beside(self, job: Prefilling) -> list[Prefilling]:
        """Return the prompts whose last steps run in one pass with this one's. The pass reads the weights only once."""
        group, rows = [job], self._last_rows(job)
        if rows is None:
            return group
        room = min(TOGETHER, self._turns.rows) - rows
        for other in self._under_way.prefilling:
            rows, apart = self._last_rows(other), abs(len(other.tokens) - len(job.tokens))
            if other is not job and rows is not None and rows <= room and apart <= _ALIKE:
                group.append(other)
                room -= rows
        return group

    def _last_rows(self, job: Prefilling) -> int | None:
        """Return the rows of a prompt's last step if it may share a pass, which needs all its KV in place; or None."""
        lean = self._runner.lean is not None and not self._runner.model.training
        return job.rows_left if lean and job.is_in_place else None

    def _admit(self) -> None:
        """Admit waiting requests while there is room, each owner's in order."""
        held_up: set[str] = set()
        while (waiting := self.admission.next(held_up)) is not None:
            job = None
            with self._guarding(waiting):
                job = self.admission.let_in(waiting)
                if job is None:
                    held_up.add(waiting.owner)
            if job is not None:
                with self._guarding(job):
                    self._plan_steps(job)

    def _plan_steps(self, job: Prefilling) -> None:
        """Plan the steps, run in rounds, that compute the rest of the prompt."""
        job.ticket.plan, job.ticket.by_tier = job.opened.plan, job.opened.by_tier
        job.steps.clear()
        if job.opened.plan.relocates:  # repaired chunks and the tokens between them are computed in one pass
            job.steps.append((job.opened.plan.prefix_end, len(job.tokens)))
            return
        for span in job.opened.plan.computes:
            job.steps.append((span.start, span.end))

    def _prefill(self, job: Prefilling) -> int:
        """Run a prompt's next step; another prompt has the next turn. Return the number of rows run."""
        start, end = job.steps.popleft()
        placed = job.opened.placed
        if self._runner.lean is not None and placed is not None and not placed.plan.relocates:
            whole = end
            end = start + next_part(whole - start, self._turns.rows)  # rows are independent, so a step may be split
            if end < whole:
                job.steps.appendleft((end, whole))
        started = time.perf_counter()
        with self._guarding(job):
            try:
                self._run_step(job, start, end)
            except CorruptRun as error:
                if placed is None:
                    raise
                self._pipeline.loader.relink(placed, error)
                self._plan_steps(job)
            except Overloaded:
                if placed is None or not self._pipeline.loader.made_way(placed):
                    raise
                self._plan_steps(job)
        self._turns.took_prefill({job: end - start}, time.perf_counter() - started, [0.0])
        return end - start

    def _prefill_together(self, group: list[Prefilling]) -> int:
        """Run several prompts' last steps in one pass, or one by one if that fails. Return the number of rows run."""
        steps = {job: job.steps.popleft() for job in group}
        began = time.perf_counter()
        try:
            logits = self._pipeline.loader.last_steps([
                (placed, job.tokens[start:end], start)
                for job, (start, end) in steps.items()
                if (placed := job.opened.placed) is not None
            ])
        except Exception:
            log.exception("a step of %d prompts failed; each is run alone", len(group))
            for job, step in steps.items():
                job.steps.append(step)
                with self._guarding(job):
                    self._reload(job)
            return sum(self._prefill(job) for job in group if job in self._under_way.prefilling)
        ends = [time.perf_counter()]
        for job, row in zip(group, logits, strict=True):
            with self._guarding(job):
                self._begin(job, row)
            ends.append(time.perf_counter())
        rows = {job: end - start for job, (start, end) in steps.items()}
        self._turns.took_prefill(rows, ends[0] - began, [later - earlier for earlier, later in pairwise(ends)])
        return sum(rows.values())

    def _reload(self, job: Prefilling) -> None:
        """Begin a prompt anew if a step that failed has moved its recurrent state."""
        placed = job.opened.placed
        if placed is not None and placed.arena.states.is_lost:
            self._pipeline.loader.again(placed)
            self._plan_steps(job)

    def _run_step(self, job: Prefilling, start: int, end: int) -> None:
        placed = job.opened.placed
        if job.steps:
            self._runner.extend(job.tokens[start:end], job.opened.cache, start)
            if placed:
                placed.computed_to = end
            self._under_way.prefilling.remove(job)
            self._under_way.prefilling.append(job)
        elif job.opened.plan.relocates:
            logits = self._pipeline.first_logits(job.prepared, job.opened)
            job.ticket.plan = job.opened.plan  # a new plan if chunks diverged too far
            self._begin(job, logits)
        else:
            self._begin(job, self._pipeline.loader.last_step(placed, job.tokens, start, end, job.opened.cache))

    def _begin(self, prefilled: Prefilling, logits: torch.Tensor) -> None:
        """Choose the first token of a prompt's answer. From now on the request is running."""
        job = begun(prefilled, self._pipeline.begin_answer(prefilled.prepared, prefilled.opened))
        with self.changed:
            self._under_way.prefilling.remove(prefilled)
            self._under_way.running.append(job)
        with self._guarding(job):
            if not self._grow(job, job.answer.take(logits)):
                self._move_to_pages(job)
                self._share(job)

    def _move_to_pages(self, job: Running) -> None:
        """Copy a computed prompt's KV into its pages, if it has any, and free its arena for the next prompt."""
        sequence, placed = job.room.sequence, job.opened.placed
        if sequence is None or placed is None:
            return
        named = job.prepared.reuse is not Reuse.OFF and placed.plan.exactness is Exactness.EXACT
        names = page_names(placed.linked.blocks, len(job.tokens)) if named else []
        placed.arena.in_turn()
        sequence.fill(placed.arena.sequenced(), len(job.tokens), names, placed.arena.gap)
        if not self._pipeline.archive.allows(placed.linked.epoch, placed.linked.tags):
            for name in names:  # a purge came meanwhile, and may have removed all names before these were added
                self._pool.forget(name)
        self._pipeline.chunks.keep(placed)
        placed.goes_on = named and sequence.is_plain and placed.linked.prompt.keep is None
        job.room.stack.close()
        self._under_way.storing.append(job)

    def _share(self, job: Running) -> None:
        """Let a waiting request have the blocks of a prompt that has no pages. In pages they are shared already."""
        placed = job.opened.placed
        if job.room.sequence is not None or placed is None or not self.admission.is_awaited(job):
            return
        if self._pipeline.loader.share(placed):
            self._under_way.storing.append(job)

    def _fail_all(self, jobs: Sequence[Running], error: Exception) -> None:
        log.exception("a step of %d requests failed", len(jobs))
        for job in jobs:
            self._fail(job, error)

    def _grow(self, job: Running, piece: Piece) -> bool:
        """Hand out a piece. If it is the last one, end the request and return True."""
        job.ticket.put(piece)
        if len(job.answer.token_ids) == 1 and job.opened.placed is not None:
            self._pipeline.loader.explain(job.opened.placed)
        if job.answer.done:
            self._finish(job)
        return job.answer.done

    def _measure(self) -> None:
        pages = self._pool.counts.referenced
        paged = [job.room.sequence for job in self._under_way.running if job.room.sequence is not None]
        with self.changed:
            self.peak = max(self.peak, pages)
            self._slots += pages * PAGE
            self._held += pages * PAGE - sum(sequence.unused for sequence in paged)

    @contextmanager
    def _guarding(self, job: Waiting) -> Iterator[None]:
        """Let an error end only the request that raised it."""
        try:
            yield
        except Exception as error:
            log.warning("a request failed: %s", error)
            self._fail(job, error)

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _finish(self, job: Running) -> None:
        """End a request that has its whole answer."""
        failed = self._leave(job)
        if failed is not None:
            job.ticket.end(failed)
            return
        placed = job.opened.placed
        if placed is not None:
            self._pipeline.chunks.answered(placed.linked, placed, job.answer.token_ids)
        blended = placed.blended if placed else None
        last = job.answer.result(job.opened.plan, job.opened.all_by_tier, job.opened.miss, blended)
        assert last.result is not None
        job.ticket.put(last)
        job.ticket.end(last.result)

    def _fail(self, job: Waiting, error: BaseException) -> None:
        """End a request without an answer."""
        self._leave(job)
        job.ticket.end(error)

    def _leave(self, job: Waiting) -> Exception | None:
        """Give back all that a request holds, before its caller is told of the end. Return the error, if any."""
        with self.changed:
            for group in (self.admission.waiting, self._under_way.prefilling, self._under_way.running):
                if job in group:
                    group.remove(job)  # type: ignore[arg-type]
        failed: Exception | None = None
        try:
            job.room.stack.close()
        except Exception as error:
            failed = error
        if job.room.sequence is not None:
            self._release(job, job.room.sequence)
            job.room.sequence = None
        self._pool.unreserve(job.room.promised)
        job.room.promised = 0
        return failed

    def _release(self, job: Waiting, sequence: PagedSequence) -> None:
        """Give back a sequence's pages once its part of the answer is stored."""
        placed = job.opened.placed if isinstance(job, Running) else None
        if not isinstance(job, Running) or placed is None or not placed.goes_on:
            sequence.release()
            return
        placed.generated = job.answer.token_ids

        def copied() -> None:
            sequence.release()
            self._wake()

        self._pipeline.loader.answered(placed, sequence, sequence.length, copied)
