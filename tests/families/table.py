"""Writes `docs/models.md`: what every causal language model class of the installed transformers does with the cache.

    python -m tests.families.table [--render] [TYPE ...]

Runs all types (some minutes), or those that are named, and records what they did. With `--render` nothing runs.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.families.examine import NO, examine
from tests.families.recorded import RESULTS, TABLE, record, recorded
from tests.helpers.every_config import MODEL_TYPES

Row = dict[str, Any]

_INTRO = """\
# Which models are cached

<!-- Written by `make models` from docs/models.json; tests/families runs every row. -->

This table has every class that transformers {version} loads as a causal language model. Each row was run: a tiny model
of the real class, with random weights, answered prompts with the cache and without it. A row that says *exact* gave the same logits to
the last bit in all of these cases: from the device, from RAM, from disk after a restart, after an edit, after a fork (a prompt that parts
from a stored one), in a batch, and in a conversation. An encoded store (`kv_codec="int8"`) was tried, too: its answers are
labelled `quantized`.

| | classes | cached | share |
|---|---|---|---|
{counts}

No class is trusted for its name. At load the engine runs some tokens in one pass and in parts, and compares. So a class that is not
in this table, from a hub with `trust_remote_code`, say, is cached by the same test, and what it keeps may differ from
what a class of the same name kept here. `engine.explain(...)` and `uncached_reason` say why a model is not cached.

## What the words mean

| cached | what it means for you |
|---|---|
| exact | A warm answer equals a cold one to the last bit. |
| exact, token by token | The same. The model takes several tokens at once only at the beginning of a prompt (Mamba-1's scan has no initial state), so what follows a stored prefix is computed one token after another. A prompt is cut once, no more than 64 tokens before its end. Reuse pays when a long prompt comes again with another short end. A conversation's next turn begins anew. |
| no | Every prompt is computed in full. The reason is below the table. |

| what a layer keeps | what it means for you |
|---|---|
| attention | Keys and values of every token. A prompt is reused up to where it differs, or up to the last cut before. |
| windows | Keys and values of which only the last ones are attended to. Everything is stored, so that every cut can be gone on from. |
| latent attention | One compressed vector per token in place of keys and values. It is stored as it is. |
| index keys | A third tensor per token, by which sparse attention chooses what it reads. It is stored with the keys and values. |
| recurrent state | A state that does not grow with the prompt, and cannot be cut. It is kept as a snapshot at some positions, and a prompt is reused up to the last snapshot before the difference. `keepwarm size` says how many tokens of KV one weighs. |
| a cache of its own | The model makes a cache of a class of its own. All of it is kept as a snapshot. Where it holds keys and values (MiniMax, XLNet), a snapshot grows with the prompt. |
| layers that keep nothing | Layers without attention, or that read what another layer keeps. They cost nothing. |

## Every class

Bytes are those of the tiny model, in float32: they show what is counted, not how large a real model is. `keepwarm size MODEL` computes
both for a real configuration. The state is that of all layers at one position.

| class | model types | its layers keep | cached | bytes per token | bytes of a state |
|---|---|---|---|---|---|
"""


def render(rows: Iterable[Row], version: str) -> str:
    """The page."""
    rows = sorted(rows, key=lambda row: (row["class"].lower(), _facts(row), row["type"]))
    counts = "\n".join([
        _count("`...ForCausalLM`", [row for row in rows if row["class"].endswith("ForCausalLM")]),
        _count("all", rows),
    ])
    lines = [_line(name, list(same)) for (name, _), same in groupby(rows, key=lambda row: (row["class"], _facts(row)))]
    text = _INTRO.format(version=version, counts=counts) + "\n".join(lines) + "\n"
    return text + "\n## Why some are not cached\n\n" + "\n".join(_reasons(rows)) + "\n"


def _facts(row: Row) -> tuple[Any, ...]:
    return (row["cached"], row.get("keeps", []), row.get("bytes_per_token", 0), row.get("state_bytes", 0))


def _count(name: str, rows: Sequence[Row]) -> str:
    by_class: dict[str, bool] = {}
    for row in rows:
        by_class[row["class"]] = by_class.get(row["class"], True) and row["cached"] != NO
    cached = sum(by_class.values())
    return f"| {name} | {len(by_class)} | {cached} | {100 * cached / len(by_class):.1f} % |"


def _line(name: str, rows: list[Row]) -> str:
    row = rows[0]
    types = ", ".join(f"`{each['type']}`" for each in rows)
    per_token, state = (f"{row.get(field, 0):,}" if row.get(field) else "" for field in ("bytes_per_token", "state_bytes"))
    return f"| {name} | {types} | {', '.join(row.get('keeps', []))} | {row['cached']} | {per_token} | {state} |"


def _reasons(rows: Sequence[Row]) -> list[str]:
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["cached"] == NO:
            found.setdefault((row["class"], row["reason"]), []).append(f"`{row['type']}`")
    return [f"- {name} ({', '.join(types)}): {reason}." for (name, reason), types in found.items()]


def run(types: Sequence[str]) -> list[Row]:
    """Rows of some types, run now. Raises AssertionError for one that is cached wrongly."""
    rows = []
    for number, model_type in enumerate(types, 1):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(examine(model_type, Path(folder)))
        print(f"{number}/{len(types)} {model_type}: {rows[-1]['cached']}", flush=True)
    return rows


def main(arguments: Sequence[str]) -> None:
    import transformers

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    named = [each for each in arguments if each != "--render"]
    known = recorded() if RESULTS.exists() else {}
    if "--render" not in arguments:
        known |= {row["type"]: row for row in run(named or MODEL_TYPES)}
        record([known[name] for name in MODEL_TYPES if name in known])
    TABLE.write_text(render(recorded().values(), transformers.__version__), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
