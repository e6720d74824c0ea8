"""The example runs as it is printed, twice."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "llamacpp_restart.py"


def test_a_second_run_reuses_the_firsts_prompt(model: Callable[..., Path], tmp_path: Path) -> None:
    found: list[tuple[list[tuple[int, int]], list[str]]] = []
    for _ in range(2):
        command = [sys.executable, str(EXAMPLE), str(model()), str(tmp_path / "store")]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        counts = [(int(a), int(b)) for a, b in re.findall(r"(\d+) of (\d+) tokens", printed)]
        found.append((counts, re.findall(r"-> (.*)", printed)))
    (first, answers), (second, again) = found
    assert [cached for cached, _ in first] == [0, 0]  # the second question's beginning is in the context still
    assert second[0][0] == second[0][1] - 1
    assert answers == again


def test_the_python_of_the_page(model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "llama-cpp.md").read_text(), re.DOTALL)
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copy(model(), tmp_path / "qwen2.5-0.5b.gguf")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(block.replace("n_ctx=8192", "n_ctx=256, verbose=False"), "llama-cpp.md", "exec"), names)
    names["llm"].create_completion("once upon a time", max_tokens=1)
    names["llm"].cache.close()
    names["llm"].close()
    assert any((tmp_path / ".cache" / "keepwarm" / "llamacpp").iterdir())
