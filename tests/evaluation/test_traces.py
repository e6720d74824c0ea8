"""The archive finds of a made-up agent session all that a cache of single tokens without a bound would."""

from __future__ import annotations

import json
import random
import runpy
from pathlib import Path

import pytest


def session(seed: int, requests: int = 14) -> dict[str, object]:
    """A conversation that grows, is cut back now and then, and once begins anew."""
    chance = random.Random(seed)
    ids = list(range(20))
    rows = []
    fresh = 20
    for at in range(requests):
        if at % 5 == 4:
            ids = ids[: chance.randint(10, len(ids))]
        rows.append({"t": float(at), "in": 64 * len(ids) + chance.randint(0, 63), "hash_ids": list(ids)})
        grown = chance.randint(0, 5)
        ids += range(fresh, fresh + grown)
        fresh += grown
    return {"block_size": 64, "requests": rows}


@pytest.mark.parametrize("seed", range(2))
def test_what_is_found_of_a_session_is_the_optimum(seed: int, tmp_path: Path) -> None:
    rows = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "traces.py"))["rows"]
    files = []
    for name in ("a", "b"):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(session(seed)))
    found = list(rows(files))
    assert [(row["trace"], row["tier"]) for row in found[-2:]] == [("a and 1 more", "ram"), ("a and 1 more", "disk")]
    for row in found:
        assert row["found"] == row["best"] > 0.7 * row["tokens"]
