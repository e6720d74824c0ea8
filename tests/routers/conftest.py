"""vLLM's own router: `$KEEPWARM_ROUTER`, else the one in `.peers/router` (`make test-router`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAM = Path(os.environ.get("KEEPWARM_ROUTER", HERE.parents[1] / ".peers" / "router" / "bin" / "vllm-router"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)
            if not PROGRAM.is_file():
                item.add_marker(pytest.mark.skip(reason="vllm-router is not installed: make test-router"))


@pytest.fixture(scope="session")
def router() -> Path:
    return PROGRAM
