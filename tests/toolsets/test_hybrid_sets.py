"""Registered sets on a model with recurrent state: an edit goes on from a snapshot, with the answer of a cold run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.hybrids import hybrid

from keepwarm import Engine
from keepwarm.errors import UnsupportedModel

NAMES = ("wind", "tide", "rain", "snow")
ASKED: dict[str, Any] = {"max_new_tokens": 4, "trace": True}


def tools(edited: str = "") -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "description": f"Looks up the {name} of a place{' at a station' if name == edited else ''}.",
            "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
        }
        for name in NAMES
    ]


@pytest.fixture
def opened(tokenizer: Any, tmp_path: Path) -> Callable[..., Engine]:
    model = hybrid()
    return lambda **given: Engine.from_pretrained((model, tokenizer), store=tmp_path, step=64, min_step=8, **given)


def test_a_set_its_edit_and_a_restart_answer_as_without_the_cache(opened: Callable[..., Engine]) -> None:
    for last in (False, True):
        with opened() as engine:
            for edited in ("", "snow"):
                registered = engine.tools(tools(edited), system="You are brief.", name=f"weather {edited}")
                engine.flush()
                warm = registered.generate("Is it windy?", **ASKED)
                cold = registered.generate("Is it windy?", reuse="off", **ASKED)
                assert (warm.logits_digest, warm.exactness) == (cold.logits_digest, "exact")
                report = registered.report
                assert report is not None
                assert warm.cached_tokens >= report.tokens // 32 * 32  # the compiled kernels go on from a page's end
                assert not last or not report.recomputed_tokens


def test_an_edit_is_not_blended(opened: Callable[..., Engine]) -> None:
    with opened() as engine:
        engine.tools(tools(), system="You are brief.", name="weather")
        found = engine.tools(tools("rain"), system="You are brief.", name="weather", warm=False)
        with pytest.raises(UnsupportedModel, match="recurrent state"):
            found.generate("Is it windy?", reuse="chunks", **ASKED)
