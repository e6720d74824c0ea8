"""Economics of tool sets: figures that follow from what was measured, on a model small enough for a test."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.models import tiny

from keepwarm import Engine
from keepwarm.core.tools import shown_tools
from keepwarm.errors import ConfigError, PromptTooLong
from keepwarm.evaluation.economics import Growth, Row, catalogue, machine, measure, write


def row(**changes: Any) -> Row:
    times = {
        "compile_ms": 220.0,
        "hit_ms": 10.0,
        "link_ms": 1.0,
        "prefill_ms": 9.0,
        "constrained_ms": 12.0,
        "cold_ms": 230.0,
        "oneshot_ms": 210.0,
    }
    fields: dict[str, Any] = {
        "tools": 5,
        "tokens": 500,
        "prompt_tokens": 520,
        "cache_bytes": 1,
        "floor_ms": 8.0,
        "hit_tiers": ("device",),
        "identical": True,
    }
    return Row(**(fields | times | changes))


def test_what_is_saved_is_told_against_the_faster_full_run() -> None:
    made = row()
    assert (made.full_ms, made.speedup, made.saved_ms) == (210.0, 21.0, 200.0)
    assert made.break_even == pytest.approx(1.1)
    assert made.saved_s_at_1000 == pytest.approx(200 - 0.22)
    assert row(hit_ms=300.0).break_even == float("inf")


def test_a_catalogue_has_tools_of_its_own_names_and_begins_like_a_smaller_one() -> None:
    assert len(shown_tools(catalogue(100))) == 100
    assert catalogue(100)[:50] == catalogue(50)
    with pytest.raises(ConfigError, match="120 tools to choose from, got 121"):
        catalogue(121)


@pytest.mark.slow
def test_measuring_a_small_model(tokenizer: Any, tmp_path: Path) -> None:
    with Engine.from_pretrained((tiny("llama"), tokenizer), step=256, min_step=16) as engine:
        first, second, growth = list(measure(engine, [6, 2], rounds=1))
        about = {"model": "models/tiny"} | machine(engine)
        with pytest.raises(PromptTooLong):
            list(measure(engine, [60], rounds=1))
        with pytest.raises(ConfigError, match="at least 1"):
            next(measure(engine, [], rounds=1))
    assert isinstance(first, Row)
    assert isinstance(second, Row)
    assert isinstance(growth, Growth)
    assert (first.tools, second.tools) == (2, 6)
    assert first.identical
    assert second.identical
    assert 0 < first.tokens < second.tokens < second.prompt_tokens
    assert {*first.hit_tiers, *second.hit_tiers} <= {"device", "ram"}
    assert 0 < growth.edit_tokens < second.tokens
    write([first, second], growth, about, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "tools-tiny.jsonl").read_text().splitlines()]
    assert lines[1]["row"]["break_even"] == first.break_even
    assert {name: len(each) for name, each in lines[1]["row"]["rounds_ms"].items()} == {"cold": 1, "hit": 1}
    assert lines[-1]["growth"]["edit_tokens"] == growth.edit_tokens
    assert (tmp_path / "tools-tiny.png").stat().st_size > 0


@pytest.mark.slow
def test_the_gpu_script_runs_at_a_small_geometry(
    demo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "gpu_tools.py"))
    monkeypatch.setitem(gpu["main"].__globals__, "PREFIXES", (64,))
    small = ["--geometry", "small", "--device", "cpu", "--tools", "2", "3", "--rounds", "1"]
    gpu["main"](["--tokenizer", str(demo_folder), *small, "--output", str(tmp_path)])
    rows = [json.loads(line) for line in (tmp_path / "tools-small.jsonl").read_text().splitlines()]
    assert [row["row"]["identical"] for row in rows if "row" in row] == [True, True]
    lines = [json.loads(line) for line in (tmp_path / "gpu-small.jsonl").read_text().splitlines()]
    assert lines[1]["prefix"] == 64
    assert "decode_ms_per_token" in capsys.readouterr().out
