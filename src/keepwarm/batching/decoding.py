"""Steps that add tokens to running answers: one pass for those in pages, with what was drafted for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise

import torch

from keepwarm.batching.admission import UnderWay
from keepwarm.batching.ahead import Ahead, begun_ahead, chosen_there, run_together
from keepwarm.batching.request import Running
from keepwarm.batching.turns import Turns
from keepwarm.core.blocks import token_ids
from keepwarm.core.drafts import Draft, Pace
from keepwarm.core.results import Piece
from keepwarm.pipeline.pipeline import Pipeline
from keepwarm.runtime.pages import PagedSequence
from keepwarm.runtime.sampling import Choice


class Decoding:
    """Decodes tokens of the answers that are under way. Only the batch's thread uses it."""

    def __init__(
        self,
        pipeline: Pipeline,
        under_way: UnderWay,
        turns: Turns,
        guarding: Callable[[Running], AbstractContextManager[None]],
        grow: Callable[[Running, Piece], bool],
        fail_all: Callable[[Sequence[Running], Exception], None],
    ) -> None:
        """`guarding` lets an error end only one request, `grow` hands out a piece and returns whether it was the last
        one, and `fail_all` ends the requests of a step that failed."""
        self._pipeline, self._runner = pipeline, pipeline.model.runner
        self._under_way, self._turns = under_way, turns
        self._guarding, self._grow, self._fail_all = guarding, grow, fail_all
        self._ahead: Ahead | None = None
        self._pace = Pace(pipeline.step_costs)

    def drop(self) -> None:
        """Forget the step that was begun ahead."""
        self._ahead = None

    def run(self) -> bool:
        """Decode tokens of every running request, or of as many as fit into the time that others may wait. Return
        whether any in pages got one."""
        ahead, self._ahead = self._ahead, None
        jobs, positions, rows = ([], [], None) if ahead is None else ahead.of(self._under_way.running)
        drafted: list[Draft] = [Draft()] * len(jobs)
        together: list[Running] = []
        for job in self._turns.decoded(self._under_way.running):
            with self._guarding(job):
                token, position = job.last
                if job.room.sequence is None:
                    started = time.perf_counter()
                    cache, answer = job.opened.cache, job.answer
                    logits = self._runner.step(
                        token_ids([token]), cache, position, answer.there, largest=answer.largest
                    )
                    self._grow(job, answer.take(logits))
                    self._turns.took_decode([job], time.perf_counter() - started, [0.0])
                elif rows is None:
                    together.append(job)
        started = time.perf_counter()
        if rows is None:
            jobs, drafted = self._drafted(together)
            positions = [job.last[1] for job in jobs]
            try:
                if jobs:
                    began = time.perf_counter()
                    rows = run_together(self._runner, self._pipeline.pool, jobs, positions, drafted)
                    self._pace.took(len(jobs), len(rows), time.perf_counter() - began)
            except Exception as error:
                self._fail_all(jobs, error)
                return False
        return rows is not None and self._hand_out(jobs, positions, drafted, rows, started)

    def _drafted(self, together: Sequence[Running]) -> tuple[list[Running], list[Draft]]:
        """Draft tokens of the requests that run in one step, and make room for them. Return those that have room."""
        jobs, drafted = [], []
        found = self._pace.drafts([job.answer.drafter for job in together])
        for job, draft in zip(together, found, strict=True):
            with self._guarding(job):
                if job.room.sequence is not None:
                    job.room.sequence.grow(job.last[1] + 1 + len(draft.tokens))
                    jobs.append(job)
                    drafted.append(draft)
        return jobs, drafted

    def _hand_out(
        self,
        jobs: Sequence[Running],
        positions: Sequence[int],
        drafted: Sequence[Draft],
        rows: torch.Tensor,
        started: float,
    ) -> bool:
        """Choose tokens for each request from the logits after its newest one, which stands at its position, and after
        what was drafted behind it. Return False if nobody got any."""
        try:
            choices = self._choices(jobs, rows)  # waits for a device
        except Exception as error:
            self._fail_all(jobs, error)
            return False
        ends = [time.perf_counter()]
        parts = rows.split([1 + len(draft.tokens) for draft in drafted])
        for job, position, draft, logits in zip(jobs, positions, drafted, parts, strict=True):
            with self._guarding(job):
                if job in choices and job.room.sequence is not None:
                    job.room.sequence.length = position + 1
                    self._grow_by(job, job.room.sequence, draft, logits, choices[job])
            ends.append(time.perf_counter())
        choosing = [end - began for began, end in pairwise(ends)]
        if self._ahead is not None and not any(job in self._under_way.running for job in self._ahead.jobs):
            self._ahead = None
        self._turns.took_decode(jobs, ends[0] - started, choosing)
        return True

    def _grow_by(
        self, job: Running, sequence: PagedSequence, draft: Draft, logits: torch.Tensor, choice: Choice | None
    ) -> None:
        """Hand out the tokens that a step yields, whose first `choice` may have been made on a device."""
        if choice is not None:
            self._grow(job, job.answer.take(logits[0], choice))
            return
        for number, piece in enumerate(job.answer.take_each(logits, draft)):
            sequence.length += number > 0
            if self._grow(job, piece):
                return

    def _choices(self, jobs: Sequence[Running], rows: torch.Tensor) -> dict[Running, Choice | None]:
        """Choose the next tokens on a device, and begin the step over them; the host waits once for the tokens. On the
        host each is chosen in its turn: None. A request that fails is not in the result."""
        port = self._runner.port
        if port.is_host:
            return dict.fromkeys(jobs)
        chosen = chosen_there(jobs, rows, self._guarding)
        if not chosen:
            return {}
        arrived = port.fetch(torch.cat([*chosen.values()]))
        following = self._turns.decoded(self._under_way.running)
        if port.goes_ahead and len(following) == len(self._under_way.running):  # nobody has to wait for a turn
            self._ahead = begun_ahead(self._runner, following, chosen)
        return {job: Choice(token, chosen[job]) for job, token in zip(chosen, arrived().tolist(), strict=True)}
