"""`python -m papers`: quality and speed on real tasks, written down as JSON lines and reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepwarm.checks import need
from keepwarm.cli import output
from keepwarm.cli.app import main, program
from keepwarm.cli.options import (
    Device,
    Dtype,
    Json,
    MaxNewTokens,
    Model,
    chosen_model,
    grouped,
    measured,
    open_engine,
    refuse,
)
from keepwarm.errors import ConfigError

if TYPE_CHECKING:
    from keepwarm.engine import Engine

app = program("papers", "Measure quality and speed on real tasks.")


@dataclass(frozen=True)
class ModelOptions:
    """Which model is measured, on which data, for how long."""

    model: Model = None
    dtype: Dtype = None
    device: Device = None
    seed: Annotated[int, typer.Option("--seed", help="Chooses tools and questions.")] = 0
    minutes: Annotated[
        float | None, typer.Option("--minutes", help="Begin nothing new after so long; run again to go on.")
    ] = None

    @property
    def source(self) -> str:
        return chosen_model(self.model)

    def check(self) -> None:
        """Refuse what can be refused before anything is loaded."""
        refuse(self.source, self._settings())

    def engine(self) -> Engine:
        return open_engine(self.source, self._settings())

    def _settings(self) -> dict[str, Any]:
        return measured(dtype=self.dtype, device=self.device)

    def clock(self) -> Callable[[], bool]:
        """Whether there is time left, counted from now."""
        end = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        return lambda: end is None or time.monotonic() < end


@app.command()
@grouped
def tools(
    options: ModelOptions,
    out: Annotated[Path, typer.Option("--out", help="Folder of answers, reports and plots.")] = Path("tools-eval"),
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Examples of each split. [default: all]")] = None,
    splits: Annotated[str, typer.Option("--splits", help="Which, separated by commas.")] = "seen,held-out,unseen",
    conditions: Annotated[str, typer.Option("--conditions", help="Which, separated by commas.")] = "full,group,nope",
    parts: Annotated[
        str, typer.Option("--parts", help="What to do, separated by commas: quality, queries, report.")
    ] = "quality,queries,report",
    economics: Annotated[
        list[Path] | None, typer.Option("--economics", help="A file of `keepwarm bench tools`, for the report.")
    ] = None,
    note: Annotated[str, typer.Option("--note", help="A sentence that goes into the report.")] = "",
    max_new_tokens: MaxNewTokens = 96,
    as_json: Json = False,
) -> None:
    """Tool calls over sets of 20 tools: full prefill, the cached set, and tools composed one by one.

    Goes on where an earlier run into the same folder stopped. The questions are Berkeley's: pip install --no-deps
    bfcl-eval.
    """
    options.check()
    from papers import bfcl, queries
    from papers.journal import Journal
    from papers.report import identical, report, results
    from papers.run import ANSWERS, KEYS

    wanted = _listed(parts, ("quality", "queries", "report"))
    chosen, named_splits = _listed(conditions, ("full", "group", "nope")), _listed(splits, bfcl.SPLITS)
    if "report" in wanted:
        need("matplotlib", "plot", "the report")
    benchmark = bfcl.load(seed=options.seed)
    answers = Journal(out / ANSWERS, KEYS)
    if "quality" in wanted:
        with output.resumable(answers.told):
            _answer(options, answers, benchmark, named_splits, chosen, limit, max_new_tokens)
    times = Journal(out / queries.TIMES, queries.KEYS)
    if "queries" in wanted:
        with output.resumable(times.told):
            _time(options, times, benchmark.sets["catalogue-1"])
    files: list[Path] = []
    if "report" in wanted and answers.rows:
        files = report(out, benchmark, answers, times=times, economics=economics or (), note=note)
    same = identical(results(benchmark, answers))
    if as_json:
        written = [str(path) for path in files]
        output.print_json({"answers": len(answers.rows), "compared": same.n, "identical": same.value, "files": written})
        return
    print(f"{output.counted(len(answers.rows), 'answer')} in {answers.path}")
    if same.n and same.value is not None:
        print(f"group cache and full prefill: {round(same.value * same.n)} of {same.n} answers identical")
    for path in files:
        print(path)


def _answer(
    options: ModelOptions,
    answers: Any,
    benchmark: Any,
    splits: list[str],
    conditions: list[str],
    limit: int | None,
    max_new_tokens: int,
) -> None:
    from papers.conditions import Conditions, named
    from papers.run import chosen_examples, machine, run, settings

    examples = chosen_examples(benchmark, splits, limit)
    wanted = [named(name) for name in conditions]
    left = {(e.split, e.id, name) for e in examples for name in wanted} - answers.done
    if not left:
        return
    with options.engine() as engine:
        asked = Conditions(engine, max_new_tokens)
        given = {"seed": options.seed, "max_new_tokens": max_new_tokens, "system": asked.system}
        answers.begin(settings(engine, options.source, **given), machine())
        with output.working(f"answering with {options.source}", total=len(left)) as work:
            for _ in run(asked, benchmark, examples, answers, wanted, options.clock()):
                work.step()


def _time(options: ModelOptions, times: Any, tools: Any) -> None:
    from papers import bfcl, queries
    from papers.run import machine, settings

    questions = bfcl.some_questions(queries.QUESTIONS, seed=options.seed)
    if len(times.rows) == len(questions):
        return
    with options.engine() as engine:
        times.begin(settings(engine, options.source, seed=options.seed), machine())
        with output.working(f"timing {options.source}", total=len(questions) - len(times.rows)) as work:
            for _ in queries.measure(engine, tools, questions, times, time_left=options.clock()):
                work.step()


@app.command()
@grouped
def nope(
    options: ModelOptions,
    out: Annotated[Path, typer.Option("--out", help="Folder of points, report and plot.")] = Path("nope-eval"),
    count: Annotated[int, typer.Option("--tools", min=2, help="Tools per prompt.")] = 20,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Questions.")] = 12,
    starts: Annotated[str, typer.Option("--starts", help="What a tool is computed after.")] = "alone,header",
    strategies: Annotated[str, typer.Option("--strategies", help="Which tokens are repaired.")] = "leading,deviation",
    ratios: Annotated[
        str, typer.Option("--ratios", help="Shares of the tools' tokens that are recomputed, in percent.")
    ] = "0,5,10,15,25,50,75,100",
    max_new_tokens: MaxNewTokens = 16,
    as_json: Json = False,
) -> None:
    """The negative result: tools computed alone and composed without positions, and what repair brings.

    Goes on where an earlier run into the same folder stopped. The questions are Berkeley's: pip install --no-deps
    bfcl-eval.
    """
    options.check()
    need("matplotlib", "plot", "the report")
    from papers import bfcl
    from papers import nope as experiment
    from papers.conditions import Conditions
    from papers.journal import Journal
    from papers.nope_report import report
    from papers.run import chosen_examples, machine, settings

    benchmark = bfcl.load(seed=options.seed)
    every = chosen_examples(benchmark, bfcl.SPLITS, None)
    examples = [example for example in every if example.tool is not None][:limit]
    points = Journal(out / experiment.POINTS, experiment.KEYS)
    grid = experiment.Grid(
        _listed(starts, experiment.STARTS),
        _listed(strategies, experiment.STRATEGIES),
        [_whole(part) / 100 for part in _listed(ratios)],
    )
    with output.resumable(points.told), options.engine() as engine:
        asked = Conditions(engine, max_new_tokens)
        given = {"seed": options.seed, "max_new_tokens": max_new_tokens, "system": asked.system, "tools": count}
        layers = points.machine.get("rotation_differences")
        if layers is None:
            few = experiment.some_tools(benchmark.sets[examples[0].set_name], examples[0].tool, min(count, 5))
            layers = experiment.rotation_differences(asked, few, examples[0].question)
        points.begin(settings(engine, options.source, **given), machine() | {"rotation_differences": layers})
        left = grid.left(examples, points)
        with output.working(f"composing with {options.source}", total=left) as work:
            for _ in experiment.measure(
                asked, benchmark, examples, points, tools=count, grid=grid, time_left=options.clock()
            ):
                work.step()
    files = report(out, points) if points.rows else []
    if as_json:
        output.print_json({"points": len(points.rows), "rotation": max(layers), "files": [str(path) for path in files]})
        return
    print(f"largest difference of deferred rotation in {len(layers)} layers: {max(layers):.6g}")
    print(f"{output.counted(len(points.rows), 'point')} in {points.path}")
    for path in files:
        print(path)


@app.command()
@grouped
def chunks(
    options: ModelOptions,
    out: Annotated[Path, typer.Option("--output", "--out", help="Folder of points, report and plots.")] = Path(
        "chunks-eval"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases and shorter ones.")] = False,
    names: Annotated[
        str, typer.Option("--experiments", help="Which, by number or name, separated by commas. [default: all ten]")
    ] = "",
    runs: Annotated[
        int | None, typer.Option("--runs", min=2, help="Runs of what is timed. [default: 10, quick 3]")
    ] = None,
    peers: Annotated[
        Path | None, typer.Option("--peers", help="A file of benchmarks/peers/chunks.py, for the report.")
    ] = None,
    note: Annotated[str, typer.Option("--note", help="A sentence that goes into the report.")] = "",
    as_json: Json = False,
) -> None:
    """Chunk reuse: KVBoost's ten experiments with the engine's own modes, beside its published figures.

    Goes on where an earlier run into the same folder stopped.
    """
    options.check()
    need("matplotlib", "plot", "the report")
    from papers.chunks import experiments
    from papers.chunks.bench import Bench, Extent
    from papers.chunks.report import report
    from papers.journal import Journal
    from papers.run import machine, settings

    chosen = experiments.chosen(_listed(names) if names else [each.name for each in experiments.EXPERIMENTS])
    extent = Extent(runs or (3 if quick else 10), quick)
    points = Journal(out / experiments.POINTS, experiments.KEYS)
    left = experiments.left(chosen, extent, points)
    if left:
        with output.resumable(points.told), options.engine() as engine:
            given = {"seed": options.seed, "runs": extent.runs, "quick": quick}
            points.begin(settings(engine, options.source, **given) | {"data": "handbook"}, machine())
            bench = Bench(engine, extent, options.seed)
            with output.working(f"measuring {options.source}", total=len(left)) as work:
                for _ in experiments.measure(bench, left, points, options.clock()):
                    work.step()
    files = report(out, points, peers=peers, note=note) if points.rows else []
    if as_json:
        output.print_json({"points": len(points.rows), "files": [str(path) for path in files]})
        return
    print(f"{output.counted(len(points.rows), 'point')} in {points.path}")
    for path in files:
        print(path)


def _listed(text: str, known: tuple[str, ...] = ()) -> list[str]:
    """The parts of a comma-separated text. Raises ConfigError for one that is not known."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError(f"an empty list; choose from {', '.join(known)}")
    if known and (unknown := sorted(set(parts) - set(known))):
        raise ConfigError(f"unknown {', '.join(unknown)}; known are {', '.join(known)}")
    return parts


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"expected whole numbers separated by commas, got {text!r}")
    return int(text)


if __name__ == "__main__":
    main(commands=app, name="python -m papers")
