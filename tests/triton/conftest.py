"""Triton's kernels under Triton's interpreter, on the processor (`make test-triton`)."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.interpreter import WHY_NOT

if WHY_NOT:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != "test_installed.py"]
