"""Blocks about GPUs. Their results come from `make gpu`, wherever a GPU can be had, and not from `make bench-all`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tools.figures.results import ROOT, ms, table

RESULTS = ROOT / "benchmarks" / "results-gpu"
_THROUGH = {"auto": "transformers", "model": "transformers", "triton": "our kernels"}  # `auto` was that until then


def runs() -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield what each run tells of its machine, and its other lines."""
    for path in sorted(RESULTS.glob("gpu-*.jsonl")):
        first, *others = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        yield first, others


def times() -> str:
    head = (
        *("GPU", "shape of Qwen 3", "computed by", "prompt, tokens"),
        *("cold, ms", "from the GPU", "from RAM", "from disk", "tokens per second"),
        *("transformers alone: cold, ms", "tokens per second"),
    )
    rows = [
        (
            about["name"],
            each["size"].upper(),
            _THROUGH[each["attention"]],
            f"{each['prompt_tokens']:,}",
            *(ms(each["ttft_ms"][tier]) for tier in ("cold", "device", "ram", "disk")),
            f"{each['decode_tokens_per_s']:.0f}",
            ms(each["transformers"]["cold_ttft_ms"]),
            f"{each['transformers']['decode_tokens_per_s']:.0f}",
        )
        for about, lines in runs()
        for each in lines
        if "ttft_ms" in each
    ]
    return table(head, rows)


def checks() -> str:
    rows = [
        (
            about["name"],
            f"torch {about['torch']}, transformers {about['transformers']}",
            _THROUGH[each["attention"]],
            each["family"],
            each["dtype"],
            str(sum(each["right"].values())),
        )
        for about, lines in runs()
        for each in lines
        if "right" in each
    ]
    return table(("GPU", "with", "computed by", "model", "dtype", "comparisons, all right"), rows)


def loads() -> str:
    """How near hits from RAM come to what the copy and a bare step take."""
    head = (
        *("GPU", "shape of Qwen 3", "computed by", "prompt, tokens"),
        *("from RAM, GB/s", "one large copy, GB/s", "first token from RAM, over copy and bare step"),
    )
    rows = []
    for about, lines in runs():
        ceiling = next((each["copy_in_gb_per_s"] for each in lines if "copy_in_gb_per_s" in each), 0.0)
        rows += [
            (
                about["name"],
                each["size"].upper(),
                _THROUGH[each["attention"]],
                f"{each['prompt_tokens']:,}",
                f"{each['load_gb_per_s']['ram']:.0f}",
                f"{ceiling:.0f}",
                f"{each['ram_over_floor']:.2f}",
            )
            for each in lines
            if "ram_over_floor" in each
        ]
    return table(head, rows)


BLOCKS = {"gpu-times": times, "gpu-checks": checks, "gpu-loads": loads}
