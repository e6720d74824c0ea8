"""Layers that attend to a window of the last positions: cached whole, shown their window, and right at every cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helpers.models import VOCABULARY
from tests.helpers.windowed import WINDOW, windowed

from keepwarm import Engine

STEP = 16


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


CASES = [(f, d) for f in ("mistral", "gemma2", "gemma3") for d in ("float32", "bfloat16")]
USUAL = (("mistral", "bfloat16"), ("gemma3", "float32"))  # windows in every layer, and in some


@pytest.fixture(
    scope="module",
    params=[each if each in USUAL else pytest.param(each, marks=pytest.mark.slow) for each in CASES],
    ids=[f"{family}-{dtype}" for family, dtype in CASES],
)
def engine(
    request: pytest.FixtureRequest, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    family, dtype = request.param
    model = windowed(family, getattr(torch, dtype))
    with Engine.from_pretrained((model, tokenizer), store=tmp_path_factory.mktemp("store"), step=STEP) as engine:
        yield engine


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prefix=st.integers(1, 4 * WINDOW),
    suffix=st.sampled_from([1, STEP - 1, STEP, STEP + 1, 2 * WINDOW + 3]),
    tier=st.sampled_from(["device", "ram", "disk"]),
)
def test_warm_equals_cold_to_the_bit(engine: Engine, prefix: int, suffix: int, tier: str) -> None:
    head = ids(prefix, 0)
    engine.generate([*head, *ids(3, 1)], max_new_tokens=1)
    engine.flush()
    if tier != "device":
        engine.pipeline.pool.forget()
    if tier == "disk":
        engine.pipeline.archive.clear_ram()
    prompt = [*head, *ids(suffix, 2)]
    warm = engine.generate(prompt, max_new_tokens=4, trace=True)
    cold = engine.generate(prompt, max_new_tokens=4, trace=True, reuse="off")
    assert warm.uncached_reason == ""
    assert warm.cached_tokens >= prefix // STEP * STEP - STEP
    assert warm.logits_digest == cold.logits_digest


def test_tokens_equal_those_of_transformers(engine: Engine) -> None:
    if engine.pipeline.model.model.dtype is not torch.float32:
        pytest.skip("in bfloat16 a scheduled prefill differs from a one-shot one in the last bits")
    prompt = ids(3 * WINDOW + 5, 3)
    mine = engine.generate(prompt, max_new_tokens=8)
    theirs = engine.pipeline.model.model.generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=2, eos_token_id=None
    )
    length = len(mine.token_ids)
    assert list(mine.token_ids) == theirs[0, len(prompt) : len(prompt) + length].tolist()
    assert engine.pipeline.model.geometry.layers[0].window == WINDOW
