"""Says why the other tests here are left out where the library is not installed, and which version they are for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: make test-llamacpp")


def test_the_pinned_version_is_tested() -> None:
    pinned = (Path(__file__).parents[2] / "benchmarks" / "peers" / "environments.py").read_text()
    found = re.search(r'LLAMACPP = "llama-cpp-python==(.*)"', pinned)
    assert found is not None
    assert llama_cpp.__version__ == found[1]
