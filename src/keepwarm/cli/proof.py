"""`keepwarm prove`: the logits of a cold, a warm and a restarted run, side by side; or, of a server, its answers."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import typer

from keepwarm.cli import output
from keepwarm.cli.options import EngineOptions, Json, MaxNewTokens, grouped
from keepwarm.cli.phases import COLD, PHASES, PROOF_FAILED, Job, compared, replay_job, run_here, run_restarted, verdict
from keepwarm.cli.proof_url import ServerOptions, prove_server
from keepwarm.cli.request import RequestOptions


@grouped
def prove(
    request: RequestOptions,
    engine: EngineOptions,
    server: ServerOptions,
    max_new_tokens: MaxNewTokens = 16,
    as_json: Json = False,
) -> None:
    """Prove that reuse does not change the answer: compare the logits of a cold, a warm and a restarted run.

    Uses a store of its own, which is deleted afterwards, unless --store names one. With --url, compares the answers of
    any OpenAI-compatible server: cold, warm, alone, at once, decoded, prefilled. Exit code 5: they differ.
    """
    server.refuse_without_url()
    if server.url is not None:
        prove_server(server, request, engine, max_new_tokens, as_json)
        return
    asked = request.build()
    with tempfile.TemporaryDirectory(prefix="keepwarm-prove-") as folder:
        settings = engine.settings(store=engine.store or Path(folder))
        job = Job(engine.source, settings, [asked], max_new_tokens)
        with output.working(f"running {engine.source}"):
            answers = list(run_here(job))
            finer = None if engine.reuse == "off" else job.finer(answers)
            if finer is not None:
                answers = list(run_here(finer))
            answers += run_restarted(finer or job)
    rows = compared(answers)
    proved = all(row["bit_identical"] for row in rows)
    step = None if finer is None else finer.settings["step"]
    if as_json:
        report = {"model": engine.source, "bit_identical": proved, "verdict": verdict(rows), "step": step, "runs": rows}
        output.print_json(report)
    else:
        _print(rows)
        if step is not None:
            print(f"The prompt is too short for Keepwarm to store any of it; proved with steps of {step} tokens.")
    if not proved:
        raise typer.Exit(PROOF_FAILED)


def _print(rows: list[dict[str, Any]]) -> None:
    cells = [
        (
            PHASES[row["phase"]],
            f"{row['prompt_tokens']:,}",
            output.in_tiers(row["cached_by_tier"]),
            output.in_ms(row["ttft_ms"]),
            row["exactness"],
            "-" if row["phase"] == COLD else "yes" if row["bit_identical"] else "NO",
        )
        for row in rows
    ]
    headers = ("run", "tokens", "cached", "TTFT", "label", "bit-identical")
    output.print_table(headers, cells, right=(1, 3))
    print(f"\nSHA-256 over the logits of {rows[0]['steps']} steps:")
    output.print_fields([(PHASES[row["phase"]], row["logits_digest"] or "-") for row in rows])
    print(f"\n{verdict(rows)}")


def replay() -> None:
    """The new process of `prove` and `demo`: reads a job from standard input, prints one answer per line."""
    replay_job(sys.stdin.read())
