"""`attention="triton"` is never ignored: where it cannot be had, loading says why and what to do."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.interpreter import WHY_NOT
from tests.helpers.models import tiny

from keepwarm import Engine
from keepwarm.errors import ConfigError, UnsupportedModel
from keepwarm.runtime.gpu_kernels.reasons import missing, uncovered


@pytest.mark.skipif(WHY_NOT == "", reason="Triton's interpreter runs the kernels here")
def test_where_the_kernels_do_not_run_loading_says_why(tokenizer: Any) -> None:
    told = "is not installed" if find_spec("triton") is None else "on the processor"
    with pytest.raises(UnsupportedModel, match=f"{told}.*take attention='auto'"):
        Engine.from_pretrained((tiny("llama"), tokenizer), attention="triton")


def test_another_name_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="attention"):
        Engine.from_pretrained((tiny("llama"), tokenizer), attention="tritone")  # type: ignore[arg-type]


@pytest.mark.skipif(find_spec("triton") is not None, reason="Triton is installed")
def test_a_broken_triton_is_told(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('libtriton.so: cannot open')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UnsupportedModel, match=r"cannot be imported \(libtriton.so.*take attention='auto'"):
        Engine.from_pretrained((tiny("llama"), tokenizer), attention="triton")


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_devices_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "on the processor" in missing(torch.device("cpu"))
    assert missing(torch.device("cuda")) == ""
    assert "no kernels for mps" in missing(torch.device("mps"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert missing(torch.device("cpu")) == ""
    assert "TRITON_INTERPRET is set" in missing(torch.device("cuda"))


def test_float16_is_covered_and_other_classes_are_not() -> None:
    model = tiny("llama", torch.float16)
    assert uncovered(model, [None, None]) == ""
    assert "transformers' cache is made for" in uncovered(model, [None, 128])
    assert "GPT2LMHeadModel" in uncovered(tiny("gpt2"), [None, None])
    assert "dtype torch.float64" in uncovered(tiny("llama", torch.float64), [None, None])
