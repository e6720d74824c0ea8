"""While one thread loads a model, transformers changes torch's default dtype for all: answers do not depend on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.adapters import MLP, adapter
from tests.helpers.gguf_files import write
from tests.helpers.lean import compiled
from tests.helpers.models import tiny

from keepwarm import Engine
from keepwarm.runtime.native.blocks import can_compute

PROMPT = list(range(40, 90))
SAMPLED: dict[str, Any] = {"temperature": 1.2, "top_p": 0.9, "min_p": 0.01, "seed": 3, "repetition_penalty": 1.1}
CHOICES: list[dict[str, Any]] = [{}, SAMPLED, {"logit_bias": {7: 1.3}, "presence_penalty": 0.5}, {"logprobs": 3}]


@pytest.fixture
def as_while_loading() -> Iterator[Callable[[], None]]:
    before = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(torch.bfloat16)
    torch.set_default_dtype(before)


def answered(engine: Engine, **more: Any) -> list[tuple[Any, ...]]:
    results = [engine.generate(PROMPT, max_new_tokens=5, trace=True, **more, **choice) for choice in CHOICES]
    return [(each.token_ids, each.logits_digest, each.logprobs) for each in results]


@pytest.mark.parametrize("attention", ["auto", "model"])
def test_a_folders(saved: Callable[..., Path], as_while_loading: Callable[[], None], attention: str) -> None:
    with Engine.from_pretrained(saved("llama"), attention=attention) as engine:
        told = answered(engine, reuse="off")
        as_while_loading()
        assert answered(engine, reuse="off") == told
        assert answered(engine)[1:] == answered(engine)[1:]


@pytest.mark.skipif(not can_compute(), reason="no C++ compiler: GGUF files need the compiled kernels")
def test_a_gguf_files(tmp_path: Path, as_while_loading: Callable[[], None]) -> None:
    with Engine.from_pretrained(write(tmp_path / "m.gguf")) as engine:
        told = answered(engine, reuse="off")
        modules = engine.pipeline.model.model(torch.tensor([PROMPT])).logits
        as_while_loading()
        assert answered(engine, reuse="off") == told
        assert torch.equal(engine.pipeline.model.model(torch.tensor([PROMPT])).logits, modules)


@pytest.mark.host_memory("adapters need the compiled kernels")
@pytest.mark.skipif(compiled is None, reason="no C++ compiler: adapters need the compiled kernels")
def test_an_adapters(saved: Callable[..., Path], tmp_path: Path, as_while_loading: Callable[[], None]) -> None:
    folder, adapters = saved("llama"), {"one": str(adapter(tmp_path / "one", tiny("llama"), MLP))}
    with Engine.from_pretrained(folder, adapters=adapters) as engine:
        told = answered(engine, reuse="off", adapter="one")
        as_while_loading()
        assert answered(engine, reuse="off", adapter="one") == told
    with Engine.from_pretrained(folder, adapters=adapters) as engine:  # read at such a moment
        assert answered(engine, reuse="off", adapter="one") == told
