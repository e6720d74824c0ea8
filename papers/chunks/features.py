"""Experiment 7: features, as far as somebody can check them. Nothing is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from keepwarm.evaluation.canvas import canvas, save
from papers.chunks import published
from papers.chunks.bench import Bench, Experiment, Extent
from papers.journal import Row
from papers.pages import Block, Paragraph, Picture, Table

# ours, and where to check it
_OURS = {
    "prefix caching": ("yes, exact to the bit", "linker/prefix.py"),
    "reuse away from the prefix": ("yes, keys turned to their place", "linker/chunk.py, runtime/blend/rope.py"),
    "selective recompute at borders": ("yes, that and five other rules", "runtime/blend/repair.py"),
    "content-addressed keys": ("SHA-256", "core/blocks.py"),
    "cold storage on disk": ("yes, and Redis, S3", "store/disk/tier.py, store/remote/tiers.py"),
    "semantic chunking": ("yes, and content-defined", "core/chunking.py"),
    "continuous batching": ("yes, of chunks, too", "batching/"),
    "paged attention": ("yes", "store/page_pool.py, runtime/native/places.py"),
    "several GPUs": ("no", "-"),
}


def _cases(extent: Extent) -> Sequence[str]:
    return ("features",)


def _measure(bench: Bench, case: str) -> Row:
    return {"models": type(bench.first.pipeline.model.model).__name__}


def _blocks(rows: list[Row], folder: Path) -> list[Block]:
    table = tuple((name, _OURS[name][0], *theirs, _OURS[name][1]) for name, *theirs in published.FEATURES)
    figure, axes = canvas(1, width=7.0)
    shown = [[_OURS[name][0], *theirs] for name, *theirs in published.FEATURES]
    marks = [[0.0 if cell == "no" else 0.5 if cell == "partial" else 1.0 for cell in row] for row in shown]
    axes[0][0].imshow(marks, cmap="Greens", aspect="auto", vmin=0, vmax=1.6)
    axes[0][0].set_xticks(range(4), ["Keepwarm", "KVBoost", "vLLM", "SGLang"])
    axes[0][0].set_yticks(range(len(table)), [name for name, *_ in published.FEATURES], fontsize=8)
    picture = Picture(save(figure, folder, "features").name, "Features: green is yes")
    return [
        Paragraph("Ours with the file to check it in; the others as KVBoost's table has them, not checked by us."),
        Table(("feature", "Keepwarm", "KVBoost", "vLLM", "SGLang", "see"), table),
        picture,
    ]


EXPERIMENT = Experiment(7, "features", "Features", _cases, _measure, _blocks)
