"""Layers that come from disk one after another, and a model that uses them in another order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.every_model import make
from tests.helpers.letters import letters

from keepwarm import Engine
from keepwarm.core.request import Request

TEXT = "Boats of nine metres go to pier nine, and those of three metres to pier three. " * 3
SETTINGS: dict[str, Any] = {"step": 64, "min_step": 8}


def kv(engine: Engine, order: list[int]) -> list[np.ndarray[Any, Any]]:
    """What a prompt finds in place, with layers asked for in an order."""
    pipeline = engine.pipeline
    linked = pipeline.linked(pipeline.prompts.compile(Request(TEXT), 1))
    with pipeline.lease(linked, pipeline.config.reuse, len(TEXT) + 1, overlap=True) as placed:
        for number in order:
            placed.arena.layers[number].materialize()
        cached = placed.plan.cached_tokens
        assert cached > 0
        return [placed.arena.read(layer, part, 0, cached).copy() for layer in sorted(order) for part in (0, 1)]


@pytest.mark.parametrize("model_type", ["deepseek_v32", "gpt2"])
def test_layers_may_be_asked_for_in_any_order(model_type: str, tmp_path: Path) -> None:
    model = make(model_type)
    with Engine.from_pretrained((model, letters()), store=tmp_path, **SETTINGS) as engine:
        count = len(engine.pipeline.model.geometry.layers)
        engine.generate(TEXT, max_new_tokens=1)
        engine.flush()
        there = kv(engine, list(range(count)))
    for order in (list(range(count))[::-1], [1, 0, *range(2, count)], list(range(count))):
        with Engine.from_pretrained((model, letters()), store=tmp_path, **SETTINGS) as engine:
            for mine, theirs in zip(kv(engine, order), there, strict=True):
                np.testing.assert_array_equal(mine, theirs)
