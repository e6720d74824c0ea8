"""A short run of `tests/stress/bitflips.py`."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.stress import bitflips


def test_no_damaged_file_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "keepwarm")
    report = bitflips.run(60, 1, tmp_path)
    assert (report["misses"], report["served"]) == (60, 0)
    assert set(report["by_kind"]) <= set(bitflips.KINDS)
    assert len(report["by_kind"]) > 3
