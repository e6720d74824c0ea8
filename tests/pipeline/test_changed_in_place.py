"""A model that is changed after it was loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.models import tiny

from keepwarm import Engine
from keepwarm.errors import UnsupportedModel

QUESTION = [{"role": "system", "content": "Rules hold. " * 30}, {"role": "user", "content": "Where to?"}]
STEP = 32


@pytest.mark.parametrize("through", ["copy_", "data"])
def test_weights_changed_in_place_are_noticed(tokenizer: Any, through: str) -> None:
    model = tiny("llama")
    with Engine.from_pretrained((model, tokenizer), step=STEP) as engine:
        before = engine.generate(messages=QUESTION, max_new_tokens=2, trace=True)
        weight = model.model.layers[1].self_attn.v_proj.weight
        if through == "data":
            weight.data.mul_(1.01)
        else:
            with torch.no_grad():
                weight.copy_(weight * 1.01)
        after = engine.generate(messages=QUESTION, max_new_tokens=2, trace=True)
        assert after.cached_tokens == 0
        assert after.logits_digest != before.logits_digest


def test_another_dtype_in_place_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    with Engine.from_pretrained((model, tokenizer), store=tmp_path, step=STEP) as engine:
        before = engine.generate("Where to?", max_new_tokens=4, trace=True)
        model.to(torch.bfloat16)
        with pytest.raises(UnsupportedModel, match="make a new engine"):
            engine.generate("Where to?", max_new_tokens=4)
        model.to(torch.float32)
    assert before.exactness == "exact"
