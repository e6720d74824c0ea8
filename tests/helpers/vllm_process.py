"""A real vLLM in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

PAGE = 32


def ids(count: int, seed: int) -> list[int]:
    return [int(n) for n in np.random.default_rng(seed).integers(10, 40_000, count)]


def ask(prompts: list[list[int]], **step: Any) -> dict[str, Any]:
    return {"prompts": prompts, "max_tokens": 8} | step


def start(
    model: Path,
    store: dict[str, Any] | None,
    *steps: dict[str, Any],
    events: str | None = None,
    late: bool = False,
    **settings: Any,
) -> list[Any]:
    """Results of the steps in a new vLLM process, which publishes its KV events where `events` says. `late`: its pages
    are on a device that is as late as it may be."""
    job = {"settings": {"model": str(model)} | settings, "store": store, "late": late}
    job |= {"events": events} if events else {}
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "vllm" / "instance.py")],
        input="".join(json.dumps(line) + "\n" for line in (job, *steps)),
        text=True,
        capture_output=True,
        timeout=600,
    )
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(found) == len(steps), ran.stderr[-4000:]
    return found


def answers(found: list[dict[str, Any]]) -> list[list[int]]:
    return [one["ids"] for one in found]


def cached(found: list[dict[str, Any]]) -> list[int]:
    return [one["cached"] for one in found]


def whole(tokens: int) -> int:
    return (tokens - 1) // PAGE * PAGE
