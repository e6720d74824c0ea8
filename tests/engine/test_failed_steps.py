"""A step that fails after some of its layers have run leaves nothing behind that a later request finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.every_model import make
from tests.helpers.prompts import ids

from keepwarm import Engine

PROMPT = [20 + token for token in ids(100, 1, 100)]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5_text"])
@pytest.mark.parametrize("steps", [1, 5])
def test_a_step_that_fails_in_its_last_layer(name: str, steps: int, tokenizer: Any, tmp_path: Path) -> None:
    model = make(name)
    left = [steps]

    def fail(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("the device is gone")

    settings: dict[str, Any] = {"step": 32, "min_step": 4, "attention": "model", "reuse": "prefix", "store": tmp_path}
    with Engine.from_pretrained((model, tokenizer), **settings) as engine:
        said = engine.generate(PROMPT, max_new_tokens=8, reuse="off").token_ids
        for arena in engine.pipeline.pool._idle:
            for memory, _ in arena.memories:
                memory.tensor.fill_(0xFF)  # NaN
        hook = model.get_decoder().layers[-1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="gone"):
            engine.generate(PROMPT, max_new_tokens=8)
        hook.remove()
        engine.flush()
        longer = [*PROMPT, *said]
        cold = engine.generate(longer, max_new_tokens=4, reuse="off")
        warm = engine.generate(longer, max_new_tokens=4, logprobs=1)
        assert warm.token_ids == cold.token_ids
        assert all(abs(each.logprob) < 100 for each in warm.logprobs or ())
