"""The example runs as it is printed, twice."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "mlx_restart.py"


def test_a_second_run_reuses_the_firsts_prompt(model: Callable[..., Path], tmp_path: Path) -> None:
    found: list[tuple[list[tuple[int, int]], list[str]]] = []
    for _ in range(2):
        command = [sys.executable, str(EXAMPLE), str(model()), str(tmp_path / "store")]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        counts = [(int(a), int(b)) for a, b in re.findall(r"(\d+) of (\d+) tokens", printed)]
        found.append((counts, re.findall(r"-> (.*)", printed)))
    (first, answers), (second, again) = found
    assert first[0][0] == 0 < first[1][0]  # the second question shares the manual
    assert second[0][0] == second[0][1] - 1
    assert answers == again


def test_the_python_of_the_page(model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "mlx-lm.md").read_text(), re.DOTALL)
    monkeypatch.setenv("HOME", str(tmp_path))
    names: dict[str, Any] = {"path": str(model()), "tokens": list(range(2, 40))}
    exec(compile(block, "mlx-lm.md", "exec"), names)
    assert len(names["rest"]) == len(names["tokens"])
    names["prompts"].close()
