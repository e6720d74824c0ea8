"""The same requests in phases: without the cache, with it, again, and again in a new process.

`prove` and `demo` compare what the phases computed. Answers are the dicts of `Generation.to_dict`, with every step's
logits hashed, so that answers of another process can be compared, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from keepwarm.cli.options import open_engine
from keepwarm.config import DEFAULT_MIN_STEP

if TYPE_CHECKING:
    from keepwarm.engine import Engine

COLD, FIRST, AGAIN, RESTARTED = "cold", "first", "again", "restarted"
PHASES = {
    COLD: "cold, cache off",
    FIRST: "first, storing",
    AGAIN: "again, same process",
    RESTARTED: "again, new process",
}
PROOF_FAILED = 5
_PARTS = 4  # steps in a prompt that is too short for the usual ones

Answer = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What every phase runs. JSON-ready."""

    model: str
    settings: dict[str, Any]
    requests: list[dict[str, Any]]
    max_new_tokens: int

    def finer(self, answers: Sequence[tuple[str, int, Answer]]) -> Job | None:
        """Return the job with steps that cut its prompts, if they were too short for any reuse; else None."""
        given = [answer for _, _, answer in answers]
        shortest = min(answer["prompt_tokens"] for answer in given)
        if any(answer["cached_tokens"] or answer["uncached_reason"] for answer in given) or shortest < _PARTS:
            return None
        step = shortest // _PARTS
        return replace(self, settings=self.settings | {"step": step, "min_step": min(step, DEFAULT_MIN_STEP)})

    def answers(self, engine: Engine, reuse: str | None = None) -> Iterator[Answer]:
        """Each request answered by this engine; `reuse` overrides the engine's own."""
        for request in self.requests:
            yield engine.generate(**request, max_new_tokens=self.max_new_tokens, reuse=reuse, trace=True).to_dict()


def run_here(job: Job) -> Iterator[tuple[str, int, Answer]]:
    """Run this process's phases. Yield phase, request number and answer. The store is flushed at the end."""
    with open_engine(job.model, job.settings) as engine:
        # The first pass of a process pays for allocations and kernel set-up. Paid here, it does not flatter the cache.
        engine.generate(**job.requests[0], max_new_tokens=2, reuse="off")
        # Question by question, so that the first warm answer is soon there.
        passes = {phase: job.answers(engine, reuse) for phase, reuse in ((COLD, "off"), (FIRST, None), (AGAIN, None))}
        for number in range(len(job.requests)):
            for phase, answers in passes.items():
                yield phase, number, next(answers)


def run_restarted(job: Job) -> Iterator[tuple[str, int, Answer]]:
    """Run the last phase in a new process over the same store, and yield the same. If the process fails, the command
    ends with its message and code."""
    command = [sys.executable, "-P", "-m", "keepwarm.cli", "replay"]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8"
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it ended before it read the job, and its exit code says why
                child.stdin.write(json.dumps(asdict(job)))
                child.stdin.close()
            number = -1
            for number, line in enumerate(child.stdout):
                yield RESTARTED, number, json.loads(line)
            code = child.wait()
        finally:
            child.kill()
        if code or number + 1 != len(job.requests):
            errors.seek(0)
            sys.stderr.write(errors.read())
            print(f"keepwarm: the new process ended with code {code}", file=sys.stderr)
            raise typer.Exit(code if code > 0 else 1)


def replay_job(text: str) -> None:
    """Run a job in the new process, and print one answer per line."""
    job = Job(**json.loads(text))
    with open_engine(job.model, job.settings) as engine:
        for answer in job.answers(engine):
            print(json.dumps(answer), flush=True)


def identical(answer: Answer, cold: Answer) -> bool:
    """Whether two answers came from the same logits, bit for bit, at every step, by the digests of both."""
    return answer["logits_digest"] is not None and answer["logits_digest"] == cold["logits_digest"]


def compared(answers: Sequence[tuple[str, int, Answer]]) -> list[dict[str, Any]]:
    """One row per answer, request by request: what it reused, how fast it was, and whether it equals the cold one."""
    cold = {number: answer for phase, number, answer in answers if phase == COLD}
    rows = []
    for phase, number, answer in sorted(answers, key=lambda item: (item[1], list(PHASES).index(item[0]))):
        rows.append({
            "request": number,
            "phase": phase,
            "prompt_tokens": answer["prompt_tokens"],
            "cached_tokens": answer["cached_tokens"],
            "cached_by_tier": answer["cached_by_tier"],
            "ttft_ms": answer["ttft_ms"],
            "total_ms": answer["total_ms"],
            "speedup": cold[number]["ttft_ms"] / answer["ttft_ms"],
            "exactness": answer["exactness"],
            "logits_digest": answer["logits_digest"],
            "bit_identical": identical(answer, cold[number]),
            "steps": len(answer["token_ids"]),
            "uncached_reason": answer["uncached_reason"],
            "text": answer["text"],
        })
    return rows


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """One line: what the digests prove, and what they cannot."""
    compared_with_cold = [row for row in rows if row["phase"] != COLD]
    different = sum(not row["bit_identical"] for row in compared_with_cold)
    if different:
        return f"bit-identical: no ({different} of {len(compared_with_cold)} answers differ from their cold run)"
    warm = [row for row in compared_with_cold if row["cached_tokens"]]
    if not warm:
        reason = rows[0]["uncached_reason"] or "the prompt ends before its first cut"
        return f"bit-identical: yes, but nothing was reused: {reason}"
    if any(row["phase"] == AGAIN for row in warm) and not any(row["phase"] == RESTARTED for row in warm):
        return "bit-identical: yes, but the new process reused nothing: is it the same installation and machine?"
    steps = sum(row["steps"] for row in warm)
    return (
        f"bit-identical: yes (logits of {steps:,} steps in {len(warm)} answers from reused KV, against their cold runs)"
    )
