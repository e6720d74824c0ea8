"""The report of `python -m papers tools`: ours beside the published figures, from the files of a run alone."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from keepwarm.core.tools import ToolCall
from papers import paper, plots, queries
from papers.bfcl import SPLITS, Benchmark
from papers.conditions import CONDITIONS, FULL, GROUP
from papers.journal import Journal, Row
from papers.metrics import Measure, Outcome, Score, proportion, score, summary
from papers.pages import Block, Heading, Paragraph, Picture, Table, write

METRICS = ("TSA", "PF1", "EM", "FPR", "FNR")
NAME = "report"


@dataclass(frozen=True)
class Results:
    """A run, scored. An example counts under a condition once that condition has answered it."""

    answers: dict[tuple[str, str], dict[str, Row]]  # by split and condition: by example
    scores: dict[tuple[str, str], dict[str, Score]]

    @property
    def splits(self) -> list[str]:
        return [split for split in SPLITS if any(key[0] == split for key in self.answers)]

    @property
    def conditions(self) -> list[str]:
        return [name for name in CONDITIONS if any(key[1] == name for key in self.answers)]

    @property
    def common(self) -> frozenset[tuple[str, str]]:
        """Split and id of the examples that every condition has answered."""
        answered = [
            {(split, key) for (split, name), rows in self.answers.items() if name == condition for key in rows}
            for condition in self.conditions
        ]
        return frozenset(set.intersection(*answered)) if answered else frozenset()

    def summary(
        self, split: str | None, condition: str, only: frozenset[tuple[str, str]] | None = None
    ) -> dict[str, Measure]:
        """The metrics of one split, or of all; of the examples in `only`, or of all."""
        splits = self.splits if split is None else [split]
        return summary([
            each
            for name in splits
            for key, each in self.scores.get((name, condition), {}).items()
            if only is None or (name, key) in only
        ])


def results(benchmark: Benchmark, answers: Journal) -> Results:
    """Score a run's answers. Those of examples that the benchmark does not have are left out."""
    examples = {(example.split, example.id): example for example in benchmark.examples}
    rows: dict[tuple[str, str], dict[str, Row]] = {}
    scores: dict[tuple[str, str], dict[str, Score]] = {}
    for row in answers.rows:
        example = examples.get((row["split"], row["id"]))
        if example is None:
            continue
        key = (example.split, row["condition"])
        tool = benchmark.schema(example, example.tool) if example.tool else None
        listed = [each["name"] for each in benchmark.sets[example.set_name]]
        calls = [ToolCall(**call) for call in row["calls"]]
        parameters = tool["parameters"] if tool else {}
        rows.setdefault(key, {})[example.id] = row
        scores.setdefault(key, {})[example.id] = score(calls, example.tool, example.accepted, parameters, listed)
    return Results(rows, scores)


def report(
    folder: Path,
    benchmark: Benchmark,
    answers: Journal,
    *,
    times: Journal | None = None,
    economics: Sequence[Path] = (),
    note: str = "",
) -> list[Path]:
    """Write report.md, report.html and the plots into `folder`; returns what was written.

    `times` holds the thirty questions, `economics` are files that `keepwarm bench tools` wrote.
    """
    found = results(benchmark, answers)
    blocks = [*_heading(found, answers, note), *_quality(found), *_identity(found)]
    pictures = [plots.quality(folder, found), plots.errors(folder, found), plots.methods(folder, found)]
    blocks.append(Picture(pictures[0].name, "Figure 1: quality, 95 % intervals; crosses are the published values"))
    for file in economics:
        blocks += _economics(folder, file, pictures)
    blocks += _queries(times) if times is not None else []
    blocks += _errors(found)
    blocks.append(Picture(pictures[1].name, "Figure 5: what became of each question"))
    blocks += _methods(found)
    blocks.append(Picture(pictures[2].name, "Figure 6: methods; the published ones as published"))
    return [*write(folder, NAME, "Tool calling with a compiled tool set", blocks), *pictures]


def _heading(found: Results, answers: Journal, note: str) -> list[Block]:
    run, machine = answers.settings, answers.machine
    counts = []
    for split in found.splits:
        rows = found.scores.get((split, FULL)) or next(s for (name, _), s in found.scores.items() if name == split)
        needed = sum(each.needed for each in rows.values())
        counts.append(f"{split} {len(rows)} ({needed} that need a tool, {len(rows) - needed} that none fits)")
    blocks: list[Block] = [
        Paragraph(
            f"Model {run['model']} ({run['dtype']}, weights {run['weights']}), greedy, at most "
            f"{run['max_new_tokens']} new tokens, seed {run['seed']}; data {run['data']}; 20 tools per prompt. "
            f"Machine: {machine['processor']}, {machine['threads']} thread(s), torch {machine['torch']}, "
            f"Keepwarm {machine['keepwarm']}."
        ),
        Paragraph(
            f"Examples answered so far, full prefill: {'; '.join(counts)}. The whole benchmark has 120 of each split; "
            "the same command goes on from the file of answers."
        ),
    ]
    return [*blocks, Paragraph(note)] if note else blocks


def _quality(found: Results) -> list[Block]:
    rows = []
    for split in [*found.splits, None]:
        for condition in found.conditions:
            measures = found.summary(split, condition)
            answers = [
                row
                for name in ([split] if split else found.splits)
                for row in found.answers.get((name, condition), {}).values()
            ]
            medians = (_median(answers, key) for key in ("link_ms", "prefill_ms", "decode_ms"))
            rows.append((split or "all", condition, *(_cell(measures[name]) for name in METRICS), *medians))
    common = found.common
    if len({len(found.scores.get((split, name), {})) for split in found.splits for name in found.conditions}) > 1:
        for condition in found.conditions:
            measures = found.summary(None, condition, common)
            rows.append(("all, the same questions", condition, *(_cell(measures[m]) for m in METRICS), "-", "-", "-"))
    headers = ("split", "condition", "TSA ↑", "PF1 ↑", "EM ↑", "FPR ↓", "FNR ↓", "link ms", "prefill ms", "decode ms")
    theirs = tuple(
        (row[0], row[1], *(f"{value:.3f}" for value in row[2:7]), *(f"{value:,}" for value in row[7:]))
        for row in paper.TABLE_1
    )
    return [
        Heading("Quality (the paper's Table 1)"),
        Paragraph(
            "TSA: the first call names the right tool. PF1: F1 of the arguments, over answers whose first call names "
            "the right tool. EM: one call, of the right tool, every argument right. FPR: a call where no tool fits. "
            "FNR: no call where one was needed. Each with its 95 % interval (Wilson; bootstrap for PF1) and "
            "denominator. Times are medians of each part."
        ),
        Table(headers, tuple(rows), "Ours"),
        Table(headers, theirs, f"Published: {paper.SOURCE}"),
    ]


def _identity(found: Results) -> list[Block]:
    rows = []
    for name, splits in [*((split, [split]) for split in found.splits), ("all", found.splits)]:
        pairs = [
            (row, found.answers.get((split, FULL), {}).get(key))
            for split in splits
            for key, row in found.answers.get((split, GROUP), {}).items()
        ]
        both = [(group, full) for group, full in pairs if full is not None]
        theirs = [paper.IDENTICAL[split] for split in splits]
        rows.append((
            name,
            _counted(sum(a["text"] == b["text"] for a, b in both), len(both)),
            _counted(sum(a["digest"] is not None and a["digest"] == b["digest"] for a, b in both), len(both)),
            _counted(sum(bool(group["hit"]) for group, _ in pairs), len(pairs)),
            f"{sum(same for same, _ in theirs)} of {sum(of for _, of in theirs)}",
        ))
    return [
        Heading("Group cache against full prefill"),
        Paragraph(
            "Answers: the same text. Logits: the same bits at every step. Real hits: the whole set came from the "
            "cache, under the label `exact`. Each with the lower end of its share's 95 % interval (Wilson). The last "
            "column is what the paper's published code reaches."
        ),
        Table(
            ("split", "answers identical", "logits identical", "real hits", "ContextCache: answers identical"),
            tuple(rows),
        ),
    ]


def _counted(hits: int, n: int) -> str:
    low = proportion(hits, n).low
    return f"{hits} of {n}" + ("" if low is None else f" (≥ {low:.1%})")


def _errors(found: Results) -> list[Block]:
    rows = []
    for split in found.splits:
        for condition in found.conditions:
            counts = Counter(each.outcome for each in found.scores.get((split, condition), {}).values())
            rows.append((split, condition, *(str(counts[outcome]) for outcome in Outcome)))
    return [
        Heading("Errors (the paper's Figure 5)"),
        Table(("split", "condition", *(outcome.value for outcome in Outcome)), tuple(rows)),
    ]


def _methods(found: Results) -> list[Block]:
    rows = [
        (f"{name}, ours", *(_cell(found.summary(None, name)[metric]) for metric in ("TSA", "EM", "FPR")))
        for name in found.conditions
    ]
    rows += [(f"{name}, published", *(_or_dash(v) for v in values)) for name, *values in paper.METHODS]
    return [
        Heading("Methods (the paper's Figure 6)"),
        Table(
            ("method", "TSA", "EM", "FPR"), tuple(rows), f"Ours over all splits; published: seen split, {paper.SOURCE}"
        ),
    ]


def _economics(folder: Path, file: Path, pictures: list[Path]) -> list[Block]:
    """Tables and figures from the rows that `keepwarm bench tools` measured."""
    read = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    about, *lines = (line for line in read if "run" not in line)  # the first line, where `make bench-all` made the file
    sizes = sorted((line["row"] for line in lines if "row" in line), key=lambda row: int(row["tools"]))
    theirs = {row[0]: row for row in paper.TABLE_3}
    scaling = tuple(
        (
            str(row["tools"]),
            f"{row['tokens']:,}",
            f"{row['full_ms']:,.0f}",
            f"{row['hit_ms']:,.1f}",
            f"{row['floor_ms']:,.1f}",
            f"{row['speedup']:.1f} ×",
            f"{row['compile_ms']:,.0f}",
            f"{row['cache_bytes'] / 1e6:,.0f}",
            "yes" if row["identical"] else "NO",
            "{1} / {2} / {3} × / {4} / {5}".format(*theirs[row["tools"]]) if row["tools"] in theirs else "-",
        )
        for row in sizes
    )
    headers = (
        "tools",
        "tokens",
        "full ms",
        "hit ms",
        "floor ms",
        "speed-up",
        "compile ms",
        "cache MB",
        "bit-identical",
        "published: full / hit / speed-up / compile / cache",
    )
    twenty = next((row for row in sizes if row["tools"] == 20), sizes[-1])
    ours = {
        "tools": str(twenty["tools"]),
        "cached prefix tokens": f"{twenty['tokens']:,}",
        "cache size": f"{twenty['cache_bytes'] / 1e6:,.0f} MB",
        "compile, once": f"{twenty['compile_ms']:,.0f} ms",
        "full prefill TTFT": f"{twenty['full_ms']:,.0f} ms",
        "hit TTFT": f"{twenty['hit_ms']:,.1f} ms",
        "of it, the cached KV into place": f"{twenty['link_ms']:,.1f} ms",
        "of it, prefill of the question": f"{twenty['prefill_ms']:,.1f} ms",
        "speed-up": f"{twenty['speedup']:.1f} ×",
        "saved per request": f"{twenty['saved_ms']:,.0f} ms",
        "saved in 1,000 requests": f"{twenty['saved_s_at_1000']:,.0f} s",
        "break-even": f"{twenty['break_even']:.2f} requests",
    }
    rows = tuple((name, ours[name], paper.TABLE_2[name]) for name in paper.TABLE_2)
    model = Path(about["model"]).name
    made = plots.times(folder, model, sizes, twenty)
    pictures += made
    captions = ("Figure 2: time to the first token", "Figure 3: amortization", "Figure 4: time by number of tools")
    return [
        Heading(f"Times of {model}: {about['dtype']}, {about['threads']} thread(s), torch {about['torch']}"),
        Paragraph(
            "From a run of `keepwarm bench tools` of its own. Full is the faster of our cold run and transformers' "
            "one-shot pass; a hit is timed from the call to the first token; the floor is the bare forward pass over "
            f"what follows the set. {_growth(lines)}"
        ),
        Table(headers, scaling, "The paper's Table 3"),
        Table(("", "ours", "published"), rows, "The paper's Table 2; savings with the compilation paid for"),
        *(Picture(path.name, caption) for path, caption in zip(made, captions, strict=True)),
    ]


def _growth(lines: Sequence[Row]) -> str:
    """How times grow with the number of tools, and what one more costs."""
    growth = next(line["growth"] for line in lines if "growth" in line)
    counts = [line["row"]["tools"] for line in lines if "row" in line]
    return (
        f"From {min(counts)} to {max(counts)} tools a hit grows {growth['hit']:.2f} times, the floor "
        f"{growth['floor']:.2f} times, a full prefill {growth['full']:.1f} times. Adding one tool to {max(counts)} "
        f"recomputes {growth['edit_tokens']:,} tokens ({growth['edit_share']:.1%})."
    )


def _queries(journal: Journal) -> list[Block]:
    if not journal.rows:
        return []
    parts = tuple(
        (name, *(f"{value:,.1f}" for value in _spread([row[key] for row in journal.rows])))
        for name, key in (
            ("link", "link_ms"),
            ("prefill", "prefill_ms"),
            ("decode", "decode_ms"),
            ("total", "total_ms"),
            ("time to the first token", "ttft_ms"),
        )
    )
    run, rows = journal.settings, journal.rows
    words = (
        f"{run['model']}, {run['dtype']}, {journal.machine['threads']} thread(s): {len(rows)} questions of "
        f"{_spread([row['question_tokens'] for row in rows])[0]:.0f} tokens (median) over {queries.TOOLS} tools of "
        f"{min(row['cached_tokens'] for row in rows):,} tokens, each a hit"
    )
    return [
        Heading("Thirty questions (the paper's latency benchmark)"),
        Table(("ms", "median", "shortest", "longest"), parts, words),
    ]


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def _median(rows: Sequence[Row], key: str) -> str:
    return f"{statistics.median(row[key] for row in rows):,.0f}" if rows else "-"


def _or_dash(value: float | str | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _cell(measure: Measure) -> str:
    if measure.value is None:
        return "- (n = 0)"
    return f"{measure.value:.3f} [{measure.low:.2f}, {measure.high:.2f}] n = {measure.n}"


def identical(found: Results) -> Measure:
    """The share of answers that are the same from the group cache as from full prefill, over all splits."""
    pairs = [
        (row["text"], found.answers[split, GROUP][key]["text"])
        for (split, condition), rows in found.answers.items()
        if condition == FULL
        for key, row in rows.items()
        if key in found.answers.get((split, GROUP), {})
    ]
    return proportion(sum(a == b for a, b in pairs), len(pairs))
