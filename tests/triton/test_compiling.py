"""Triton compiles every kernel for GPUs, without one: for NVIDIA's and AMD's, as far as this Triton has their tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "helpers" / "compile_kernels.py"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:80:32", "cuda:90:32", "hip:gfx942:64"])
def test_all_kernels_compile(target: str, tmp_path: Path) -> None:
    """In a process of its own, since here they are interpreted."""
    around = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, PROGRAM, target],
        env=around | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert set(found) == {f"{kernel}-{dtype}" for kernel in KERNELS for dtype in ("fp32", "bf16", "fp16")}


KERNELS = ("embed", "norm", "add", "product", "logits", "widen", "place", "attend", "merge", "move")
