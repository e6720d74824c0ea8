"""Writes `docs/models.md`: what every causal language model class of the installed transformers does with the cache.

    python -m tests.families.table [--render] [TYPE ...]

Runs all types (some minutes), or those that are named, and records what they did. With `--render` nothing runs.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.families.examine import CACHED, examine
from tests.families.recorded import RESULTS, TABLE, record, recorded
from tests.helpers.every_config import MODEL_TYPES

from keepwarm.runtime.native.families import COVERED

Row = dict[str, Any]

_PAGE = Path(__file__).parent / "page.md"  # what stands around the table


def render(rows: Iterable[Row], version: str) -> str:
    """The page."""
    rows = sorted(rows, key=lambda row: (row["class"].lower(), _facts(row), row["type"]))
    counts = "\n".join([
        _count("`...ForCausalLM`", [row for row in rows if row["class"].endswith("ForCausalLM")]),
        _count("all", rows),
    ])
    lines = [_line(name, list(same)) for (name, _), same in groupby(rows, key=lambda row: (row["class"], _facts(row)))]
    page = _PAGE.read_text(encoding="utf-8")
    kernels = textwrap.fill(", ".join(name.removesuffix("ForCausalLM") for name in COVERED) + ".", 120)
    return page.format(
        version=version, counts=counts, kernels=kernels, rows="\n".join(lines), reasons="\n".join(_reasons(rows))
    )


def _facts(row: Row) -> tuple[Any, ...]:
    return (row["cached"], row.get("keeps", []), row.get("bytes_per_token", 0), row.get("state_bytes", 0))


def _count(name: str, rows: Sequence[Row]) -> str:
    by_class: dict[str, bool] = {}
    for row in rows:
        by_class[row["class"]] = by_class.get(row["class"], True) and row["cached"] in CACHED
    cached = sum(by_class.values())
    return f"| {name} | {len(by_class)} | {cached} | {100 * cached / len(by_class):.1f} % |"


def _line(name: str, rows: list[Row]) -> str:
    row = rows[0]
    types = ", ".join(f"`{each['type']}`" for each in rows)
    per_token, state = (f"{row[field]:,}" if field in row else "" for field in ("bytes_per_token", "state_bytes"))
    return f"| {name} | {types} | {', '.join(row.get('keeps', []))} | {row['cached']} | {per_token} | {state} |"


def _reasons(rows: Sequence[Row]) -> list[str]:
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["cached"] not in CACHED:
            found.setdefault((row["class"], row["reason"]), []).append(f"`{row['type']}`")
    return [f"- {name} ({', '.join(types)}): {reason}." for (name, reason), types in found.items()]


def run(types: Sequence[str]) -> tuple[list[Row], dict[str, str]]:
    """Rows of some types, run now; and what was wrong with others."""
    rows, wrong = [], {}
    for number, model_type in enumerate(types, 1):
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows.append(examine(model_type, Path(folder)))
                said = rows[-1]["cached"]
            except Exception as error:
                said = wrong[model_type] = f"{type(error).__name__}: {error}"
        print(f"{number}/{len(types)} {model_type}: {said}", flush=True)
    return rows, wrong


def main(arguments: Sequence[str]) -> None:
    import transformers

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    named = [each for each in arguments if each != "--render"]
    wrong: dict[str, str] = {}
    if "--render" not in arguments:
        rows, wrong = run(named or MODEL_TYPES)
        known = recorded() if RESULTS.exists() else {}
        known |= {row["type"]: row for row in rows}
        record([known[name] for name in MODEL_TYPES if name in known])
    TABLE.write_text(render(recorded().values(), transformers.__version__), encoding="utf-8")
    if wrong:
        sys.exit("\n".join(["these are wrong, and were not recorded:", *(f"{a}: {b}" for a, b in wrong.items())]))


if __name__ == "__main__":
    main(sys.argv[1:])
