"""The results that `docs/models.md` shows, as they were recorded (`docs/models.json`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
RESULTS, TABLE = DOCS / "models.json", DOCS / "models.md"
FIELDS = ("type", "class", "cached", "keeps", "bytes_per_token", "state_bytes", "reason")  # the same on every machine


def recorded() -> dict[str, dict[str, Any]]:
    """Rows by model type."""
    return {row["type"]: row for row in json.loads(RESULTS.read_text(encoding="utf-8"))}


def lasting(row: dict[str, Any]) -> dict[str, Any]:
    """What is recorded of a row."""
    return {name: row[name] for name in FIELDS if row.get(name) not in (None, "", [], 0)}


def record(rows: list[dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(lasting(row)) for row in rows)
    RESULTS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
