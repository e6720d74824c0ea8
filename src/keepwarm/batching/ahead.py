"""Steps of a batch that begin before the host knows their tokens: a device then computes while the host hands them out.

If a token turns out to be the last one of its answer, its row is forgotten. What the row wrote lies behind the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from keepwarm.batching.request import Running
from keepwarm.core.blocks import token_ids
from keepwarm.core.drafts import Draft
from keepwarm.errors import Overloaded
from keepwarm.runtime.arena.pool import ArenaPool
from keepwarm.runtime.runner import Runner

log = logging.getLogger(__name__)

_UNKNOWN = token_ids([0])  # stands for a token that only the device knows


@dataclass(frozen=True)
class Ahead:
    """A step that was begun: the requests, the positions of their tokens, and the logits after them."""

    jobs: Sequence[Running]
    positions: Sequence[int]
    rows: torch.Tensor

    def of(self, running: Sequence[Running]) -> tuple[list[Running], list[int], torch.Tensor | None]:
        """Return the same of the requests that have not ended meanwhile; no logits if all have."""
        left = [number for number, job in enumerate(self.jobs) if job in running]
        rows: torch.Tensor | None = self.rows if left else None
        if 0 < len(left) < len(self.jobs):
            rows = torch.cat([self.rows[number : number + 1] for number in left])
        return [self.jobs[number] for number in left], [self.positions[number] for number in left], rows


def run_together(
    runner: Runner, pool: ArenaPool, jobs: Sequence[Running], positions: Sequence[int], drafted: Sequence[Draft]
) -> torch.Tensor:
    """Run the newest token of each request, at these positions, and behind it what was drafted. Return the logits after
    each. If the device has no memory, idle arenas make way."""
    largest = all(job.answer.largest for job in jobs)
    tokens = [token_ids([job.last[0], *draft.tokens]) for job, draft in zip(jobs, drafted, strict=True)]

    def run() -> torch.Tensor:
        sequences = [job.room.sequence.sequenced for job in jobs if job.room.sequence is not None]
        return runner.step_together(tokens, positions, sequences, each=True, largest=largest)

    try:
        return run()
    except Overloaded:
        if not pool.evict():
            raise
    return run()


def chosen_there(
    jobs: Sequence[Running], rows: torch.Tensor, guarding: Callable[[Running], AbstractContextManager[None]]
) -> dict[Running, torch.Tensor]:
    """Choose the next token of each request on the device, `[1]` each, from its row of logits. An error ends only the
    request that is `guarding` then, and it is not in the result."""
    if all(job.answer.sampler.is_plain for job in jobs):
        return dict(zip(jobs, rows.argmax(dim=-1, keepdim=True), strict=True))
    chosen = {}
    for job, logits in zip(jobs, rows, strict=True):
        with guarding(job):
            found = job.answer.sampler.choose(logits)
            assert isinstance(found, torch.Tensor)  # on the host they are numbers
            chosen[job] = found
    return chosen


def begun_ahead(runner: Runner, jobs: Sequence[Running], chosen: Mapping[Running, torch.Tensor]) -> Ahead | None:
    """Begin a step over the newest tokens of some requests: those just `chosen`, `[1]` each, which the host does not
    know yet, or the last ones of requests that got none now. Return None if some request has to wait for the host, or
    if there is no room: the step then runs in its turn."""
    tokens, positions, sequences, members = [], [], [], []
    for job in jobs:
        sequence, there, answer = job.room.sequence, chosen.get(job, job.answer.there), job.answer
        count = len(answer.token_ids) + (job in chosen)
        if sequence is None or count >= answer.max_new_tokens:
            continue
        if there is None or not answer.sampler.needs_no_host or not sequence.has_no_state or sequence.lora:
            return None
        tokens.append(there)
        positions.append(len(job.tokens) + count - 1)
        sequences.append(sequence)
        members.append(job)
    if not members:
        return None
    try:
        for sequence, position in zip(sequences, positions, strict=True):
            sequence.grow(position + 1)
        places = [sequence.sequenced for sequence in sequences]
        there = torch.cat(tokens).clamp(min=0)
        return Ahead(members, positions, runner.step_together([_UNKNOWN] * len(members), positions, places, there))
    except Exception as error:
        log.debug("a step does not begin ahead: %s", error)
        return None
