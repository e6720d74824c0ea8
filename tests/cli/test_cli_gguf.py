"""Commands take a GGUF file as a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.cli import Cli
from tests.helpers.gguf_files import write

from keepwarm.runtime.native.blocks import can_compute


@pytest.mark.skipif(not can_compute(), reason="no C++ compiler")
@pytest.mark.slow  # kernels of their own are compiled for it
def test_warm_and_run_take_a_file(cli: Cli, tmp_path: Path) -> None:
    at = ["--system", "x" * 100, "--model", write(tmp_path / "m.gguf"), "--store", tmp_path / "store"]
    assert cli("warm", *at).code == 0
    answered = cli("run", "Hello", "-n", "3", "--json", *at)
    assert answered.code == 0
    assert answered.json["cached_tokens"] > 100
    assert answered.json["exactness"] == "exact"


def test_a_path_without_a_file_is_refused_before_anything_is_loaded(cli: Cli, tmp_path: Path) -> None:
    refused = cli("run", "Hello", "--model", tmp_path / "none.gguf", "--store", tmp_path / "store")
    assert refused.code == 3
    assert "no GGUF file" in refused.err
