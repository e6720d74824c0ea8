"""The stress scripts, for a moment: they must run and find nothing. See tests/stress for the real thing."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

STRESS = Path(__file__).parents[1] / "stress"


def script(name: str, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = runpy.run_path(str(STRESS / name))["main"](list(arguments))
    return found


@pytest.mark.slow
def test_kills_at_random_moments(tmp_path: Path) -> None:
    figures = script("kill9.py", "--rounds", "8", "--seed", "7", "--folder", str(tmp_path))
    assert figures["kills"] == 16


@pytest.mark.slow
def test_several_processes_at_once(tmp_path: Path) -> None:
    figures = script("hammer.py", "--processes", "3", "--seconds", "1.5", "--folder", str(tmp_path))
    assert figures["asked"] > 0


@pytest.mark.parametrize("name", ["kill9.py", "hammer.py"])
def test_they_say_what_they_do(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script(name, "--help")
    assert "--seed" in capsys.readouterr().out
