"""Engines for the tests of sessions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.conversing import QUIET

from keepwarm import Engine


@pytest.fixture
def engine(saved: Callable[..., Path], tmp_path: Path) -> Any:
    with Engine.from_pretrained(saved("llama"), store=tmp_path / "store", **QUIET) as engine:
        yield engine


@pytest.fixture
def scheduled(saved: Callable[..., Path], tmp_path: Path) -> Any:
    """An engine whose answers are settled: through transformers a row's bits depend on its step."""
    with Engine.from_pretrained(saved("llama"), store=tmp_path / "store", attention="model", **QUIET) as engine:
        yield engine


@pytest.fixture(params=["auto", pytest.param("model", marks=pytest.mark.slow)])
def either(request: pytest.FixtureRequest, saved: Callable[..., Path], tmp_path: Path) -> Any:
    """Engines of both kinds of arithmetic."""
    store = tmp_path / "store"
    with Engine.from_pretrained(saved("llama"), store=store, attention=request.param, **QUIET) as engine:
        yield engine
