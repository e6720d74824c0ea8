"""Says why the other tests here are left out where the library is not installed, and which versions they are for."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: make test-mlx")


def test_the_pinned_versions_are_tested() -> None:
    pinned = (Path(__file__).parents[2] / "benchmarks" / "peers" / "environments.py").read_text()
    found = dict(re.findall(r'"(mlx\[cpu\]|mlx-lm)==([\d.]+)"', pinned))
    assert found == {"mlx[cpu]": version("mlx"), "mlx-lm": version("mlx-lm")}
