"""Experts on the compiled kernels: who is chosen, and what is left to transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.helpers.lean import Lean, compiled
from tests.helpers.lean_families import lean_family

from keepwarm.runtime.native.decoder import LeanDecoder, unsupported

IDS = [3 + i * 7919 % 600 for i in range(40)]

pytestmark = [
    pytest.mark.skipif(compiled is None, reason="no C++ compiler: steps run through transformers"),
    pytest.mark.host_memory("the lean decoder attends to the host's memory"),
]


def logits(model: Any, like: Lean) -> torch.Tensor:
    assert compiled is not None
    like.decoder = LeanDecoder(model, compiled, [layer.window for layer in like.geometry.layers])
    return like.run(IDS, [], like.arena(), range(len(IDS)))


def test_of_equal_scores_the_first_experts_are_chosen() -> None:
    """A router that tells nothing apart gives what a model with only the first experts gives."""
    lean = Lean("mixtral", torch.float32)
    few = lean_family("mixtral", num_local_experts=2)
    state = copy.deepcopy(lean.model.state_dict())
    for name in list(state):
        if name.endswith("mlp.gate.weight"):
            state[name].zero_()
            lean.model.get_parameter(name).data.zero_()
        if name.endswith("mlp.gate.weight") or ".experts." in name:
            state[name] = state[name][:2]
    few.load_state_dict(state)
    assert torch.equal(logits(lean.model, lean), logits(few, lean))


def test_what_is_not_covered_is_told() -> None:
    def reason(family: str, **changes: Any) -> str:
        return unsupported(lean_family(family, **changes), [None] * 3)

    assert reason("olmoe") == ""
    assert "clipped" in reason("olmoe", clip_qkv=8.0)
    assert "multiple of 32" in reason("qwen3-moe", moe_intermediate_size=48)
    assert "activation" in reason("mixtral", hidden_act="mish")
