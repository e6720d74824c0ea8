"""What a generation config recommends, and what of it no request may have."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest

from keepwarm.runtime.recommended import recommended


def test_what_is_named_is_taken() -> None:
    assert recommended(None) == recommended(SimpleNamespace(temperature=None, max_length=20)) == {}
    told = {"temperature": 0.7, "top_p": 0.8, "top_k": 20.0, "min_p": 0, "repetition_penalty": 1.05}
    found = recommended(SimpleNamespace(**told))
    assert found == told
    assert isinstance(found["top_k"], int), "as a sampler takes it"
    assert recommended(SimpleNamespace(top_k=0)) == recommended(SimpleNamespace(top_k=-1)) == {}, "all tokens"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", "0.7"),
        ("top_p", 0.0),
        ("top_k", 2.5),
        ("top_k", -2),
        ("top_k", "20"),
        ("top_k", math.inf),
        ("min_p", 7),
        ("repetition_penalty", 0.0),
    ],
)
def test_what_no_request_may_have_is_left_out(name: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert recommended(SimpleNamespace(**({"top_p": 0.9, "temperature": 0.5} | {name: value}))) == {
            kept: number for kept, number in (("temperature", 0.5), ("top_p", 0.9)) if kept != name
        }
    assert name in caplog.text
