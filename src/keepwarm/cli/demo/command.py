"""`keepwarm demo`: 20 tool schemas and some questions, cold, warm, and warm again in a new process."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from keepwarm.cli import output
from keepwarm.cli.options import EngineOptions, Json, MaxNewTokens, grouped
from keepwarm.cli.phases import COLD, PHASES, PROOF_FAILED, Answer, Job, compared, run_here, run_restarted, verdict
from keepwarm.cli.stored import open_store
from keepwarm.config import cache_dir
from keepwarm.errors import ConfigError, StoreNotWritable

SYSTEM = "You are the assistant of a small company. Use the tools when they help, and answer briefly."


def tools() -> list[dict[str, Any]]:
    """The 20 tool schemas, about 3,000 tokens."""
    loaded: list[dict[str, Any]] = _load("tools.json")
    return loaded


def questions() -> list[str]:
    loaded: list[str] = _load("questions.json")
    return loaded


def _load(name: str) -> Any:
    return json.loads(resources.files("keepwarm.cli.demo").joinpath(name).read_text(encoding="utf-8"))


@grouped
def demo(
    engine: EngineOptions,
    asked: Annotated[int, typer.Option("--questions", min=1, max=4, help="How many of the questions to ask.")] = 4,
    max_new_tokens: MaxNewTokens = 32,
    keep: Annotated[bool, typer.Option("--keep", help="Start from what an earlier demo stored.")] = False,
    salt: Annotated[
        str | None, typer.Option("--salt", help="Keeps the demo's KV apart from that of other salts.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask questions over 20 tool schemas: cold, with the cache, again, and again in a new process.

    Compares the logits of every step with the cold run's. Exit code 5: they differ.
    """
    store = engine.store.expanduser() if engine.store else cache_dir() / "demo-store"
    if engine.store and not keep:
        _refuse_a_full(store)
    job = Job(engine.source, engine.settings(store=store), requests(questions()[:asked], salt), max_new_tokens)
    with nullcontext() if engine.store else _our_own(store, keep):
        rows = compared(_answers(job))
        with open_store(store, engine.store_key_file) as archive:
            size, runs = archive.contents.size_on_disk(), len(archive.contents.entries())
    proved = all(row["bit_identical"] for row in rows)
    disk = {"bytes": size, "runs": runs, "path": str(store)}
    if as_json:
        report = {
            "model": engine.source,
            "tools": len(tools()),
            "questions": questions()[:asked],
            "bit_identical": proved,
            "verdict": verdict(rows),
            "rows": rows,
            "disk": disk,
        }
        output.print_json(report)
    else:
        _print(rows, disk, engine.source)
    if not proved:
        raise typer.Exit(PROOF_FAILED)


def _answers(job: Job) -> list[tuple[str, int, Answer]]:
    """Run all phases, and show each answer as soon as it is there."""
    asked = len(job.requests)
    with output.working(f"asking {job.model} {asked} questions in 4 phases", total=4 * asked) as work:
        answers = []
        for run in (run_here, run_restarted):
            for item in run(job):
                answers.append(item)
                work.step(_answered(*item))
    return answers


def _answered(phase: str, number: int, answer: dict[str, Any]) -> str:
    """One answer in a line."""
    reused = f"{answer['cached_tokens']:,} of {answer['prompt_tokens']:,} tokens reused"
    return f"question {number + 1}, {PHASES[phase]}: first token after {output.in_ms(answer['ttft_ms'])}, {reused}"


def requests(asked: list[str], salt: str | None = None) -> list[dict[str, Any]]:
    """One request per question, all over the same tools and system prompt."""
    salted = {} if salt is None else {"salt": salt}
    return [
        {
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
            "tools": tools(),
            **salted,
        }
        for question in asked
    ]


def _refuse_a_full(store: Path) -> None:
    """Raise ConfigError for a folder that holds anything: the first run must find none, and it is not ours to empty."""
    if store.exists() and (not store.is_dir() or any(store.iterdir())):
        raise ConfigError(f"{store} is not an empty folder: name another with --store, or use it as it is with --keep")


@contextmanager
def _our_own(store: Path, keep: bool) -> Iterator[None]:
    """Hold the demo's own folder, which is emptied unless `keep`: two demos at once would empty each other's.

    Raises StoreNotWritable when another demo holds it, or it cannot be made or emptied.
    """
    try:
        store.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = os.open(store, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise StoreNotWritable(f"cannot make the demo's store at {store}: {error}; --store names another") from None
    try:
        _lock(folder, store)
        if not keep:
            _empty(store)
        yield
    finally:
        os.close(folder)


def _lock(folder: int, store: Path) -> None:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the end of the process gives it up, too
    except BlockingIOError:
        raise StoreNotWritable(
            f"another `keepwarm demo` is using {store}: wait for its end, or name another folder with --store"
        ) from None


def _empty(store: Path) -> None:
    """Remove what is in the folder. The folder itself stays, since it carries the lock."""
    try:
        for each in store.iterdir():
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            else:
                each.unlink()
    except OSError as error:
        raise StoreNotWritable(f"cannot empty the demo's store at {store}: {error}; --store names another") from None


def _print(rows: list[dict[str, Any]], disk: dict[str, Any], model: str) -> None:
    cells = []
    for row in rows:
        first = row["phase"] == COLD
        cells.append((
            str(row["request"] + 1) if first else "",
            PHASES[row["phase"]],
            f"{row['prompt_tokens']:,}",
            output.in_tiers(row["cached_by_tier"]),
            output.in_ms(row["ttft_ms"]),
            "1" if first else f"{row['speedup']:.1f}x",
            "-" if first else "yes" if row["bit_identical"] else "NO",
        ))
    headers = ("#", "run", "tokens", "cached", "TTFT", "speed-up", "bit-identical")
    output.print_table(headers, cells, right=(2, 4, 5))
    print("TTFT: time from the call to the first token. Speed-up: against the cold run of the same question.")
    print(verdict(rows))
    print()
    if model == "demo":
        print("The answers (SmolLM2-135M has no skill with tools: these are just its words):")
    else:
        print("The answers:")
    for number, question in enumerate(questions()):
        said = {row["phase"]: " ".join(row["text"].split()) for row in rows if row["request"] == number}
        if said:
            print(f"{number + 1}. {question}\n   {said[COLD]}")
        for phase in said:
            if said[phase] != said[COLD]:
                print(f"   {PHASES[phase]}, it said: {said[phase]}")
    print(f"\nOn disk: {output.in_bytes(disk['bytes'])} in {output.counted(disk['runs'], 'run')}, in {disk['path']}")
    _next(disk["path"])


def _next(store: str) -> None:
    """Say what to try, by the command's own name: in a checkout it is not on the path."""
    here = Path(sys.argv[0])
    command = str(here) if here.name == "keepwarm" and shutil.which("keepwarm") is None else "keepwarm"
    print("\nTo try next:")
    for arguments, what in (
        (f"ls --store {store}", "what the demo stored"),
        ("chat", "a conversation that is still there tomorrow"),
        ("serve", "a server for OpenAI's and Anthropic's clients, with a page that shows the cache at work"),
    ):
        print(f"  {command} {arguments}\n      {what}")
