"""The report of `python -m papers chunks`: every table of KVBoost's description beside ours."""

from __future__ import annotations

import json
from pathlib import Path

from papers.chunks.bench import Extent
from papers.chunks.experiments import EXPERIMENTS
from papers.chunks.tables import ms, percent
from papers.journal import Journal
from papers.pages import Block, Heading, Paragraph, Picture, Table, write

NAME = "report"


def report(folder: Path, points: Journal, *, peers: Path | None = None, note: str = "") -> list[Path]:
    """Write report.md, report.html and the plots into `folder`; returns what was written.

    `peers` is a file that `benchmarks/peers/chunks.py` wrote.
    """
    run, machine = points.settings, points.machine
    blocks: list[Block] = [
        Paragraph(
            f"Model {run['model']} ({run['dtype']}, weights {run['weights']}), {run['runs']} runs"
            f"{', quick' if run['quick'] else ''}, seed {run['seed']}. Machine: {machine['processor']}, "
            f"{machine['threads']} thread(s), torch {machine['torch']}, Keepwarm {machine['keepwarm']}. Times are wall "
            "time from the call to the first token, lookup, loading, turning of keys and repair included. Published "
            "figures are of other machines and models: they show what was claimed, not what to compare with; "
            "KVBoost itself, run on this machine, is at the end."
        )
    ]
    if note:
        blocks.append(Paragraph(note))
    pictures: list[Path] = []
    extent = Extent(run["runs"], run["quick"])
    for experiment in EXPERIMENTS:
        measured = {row["case"]: row for row in points.rows if row["experiment"] == experiment.name}
        rows = [measured[case] for case in experiment.cases(extent) if case in measured]
        if not rows:
            continue
        made = experiment.blocks(rows, folder)
        blocks += [Heading(f"{experiment.number}. {experiment.title}"), *made]
        pictures += [folder / block.file for block in made if isinstance(block, Picture)]
    if peers is not None:
        blocks += _peers(peers)
    return [*write(folder, NAME, "Chunk reuse: KVBoost's ten experiments", blocks), *pictures]


def _peers(file: Path) -> list[Block]:
    read = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    about, *rows = (line for line in read if "run" not in line)  # the first line, where `make bench-all` made the file
    table = tuple(
        (
            row["peer"],
            row["kind"],
            row["case"],
            ms(row["ttft_ms"]),
            ms(row["told_ms"]) if row["told_ms"] else "-",
            percent(row["reused"]),
            f"{row['agree']:.0%}",
            f"{row['same']} of {row['n']}",
        )
        for row in rows
    )
    headers = (
        "engine",
        "mode",
        "workload",
        "TTFT ms",
        "its own TTFT ms",
        "reused",
        "leading tokens right",
        "same answer",
    )
    return [
        Heading("Beside KVBoost, in one run"),
        Paragraph(
            f"KVBoost {about['kvboost']} from the Python Package Index in an environment of its own, the same weights "
            f"({about['model']}, {about['dtype']}), texts and {about['threads']} thread(s). TTFT is wall time from the "
            "call to the first token; its own TTFT is what KVBoost reports. Right is what the engine's own full "
            "prefill says greedily."
        ),
        Table(headers, table),
    ]
