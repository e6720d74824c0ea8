"""Experts on the compiled kernels: who is chosen, and what is left to transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.helpers.lean import Lean, compiled
from tests.helpers.lean_families import lean_family

from keepwarm.core.blocks import token_ids
from keepwarm.runtime.native import build
from keepwarm.runtime.native.decoder import LeanDecoder, unsupported
from keepwarm.runtime.native.families import described

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


@pytest.mark.parametrize("kind", ["best", pytest.param("vectors", marks=pytest.mark.slow)])
def test_a_row_is_the_same_alone_and_beside_others(kind: str) -> None:
    """However many rows an expert has beside it."""
    lean = Lean("qwen3-moe", torch.bfloat16, compiled if kind == "best" else build.compiled(build._KERNELS))
    ids = token_ids([3 + i * 7919 % 600 for i in range(300)])
    arena = lean.arena()  # its memory is freed with it
    sequence = lean.sequenced(arena)
    alone = torch.cat([lean.decoder.step([ids[at : at + 1]], [at], [sequence], [0]) for at in range(len(ids))])
    for rows in (2, 3, 13, 24, 25, 65, 150, 300):
        assert torch.equal(lean.decoder.step([ids[:rows]], [0], [sequence], range(rows)), alone[:rows])


def test_the_shared_expert_is_gated_and_other_layers_have_none() -> None:
    """The gate of a shared expert that gives nothing is nothing."""
    lean = Lean("qwen2-moe", torch.float32)
    parts = described(lean.model).layers
    assert [layer.experts is None for layer in parts] == [False, True, False]
    before = logits(lean.model, lean)
    for layer in (lean.model.model.layers[0], lean.model.model.layers[2]):
        layer.mlp.shared_expert.down_proj.weight.data.zero_()
    shut = logits(lean.model, lean)
    assert not torch.equal(before, shut)
    for layer in (lean.model.model.layers[0], lean.model.model.layers[2]):
        layer.mlp.shared_expert_gate.weight.data.neg_()
    assert torch.equal(logits(lean.model, lean), shut)


@pytest.mark.parametrize("family", ["glm4-moe", "lfm2-moe"])
def test_a_correction_chooses_experts_and_has_no_part_in_their_shares(family: str) -> None:
    """One that is the same for all experts changes nothing; a large one for some has them chosen by every row."""
    lean = Lean(family, torch.float32)
    corrections = [buffer for name, buffer in lean.model.named_buffers() if name.endswith("bias")]
    assert corrections
    for buffer in corrections:
        buffer.zero_()
    plain = logits(lean.model, lean)
    for buffer in corrections:
        buffer.fill_(0.5)
    assert torch.equal(logits(lean.model, lean), plain)
    for buffer in corrections:
        buffer.zero_()[-4:] = 9.0
    last = logits(lean.model, lean)
    for layer in lean.model.model.layers:
        experts = getattr(getattr(layer, "mlp", None) or layer.feed_forward, "experts", None)
        if experts is not None:
            experts.down_proj.data[:-4].fill_(float("nan"))  # the others are not read
    assert torch.equal(logits(lean.model, lean), last)
    assert not torch.equal(last, plain)


def test_what_is_not_covered_is_told() -> None:
    def reason(family: str, **changes: Any) -> str:
        return unsupported(lean_family(family, **changes), [None] * 3)

    assert reason("olmoe") == ""
    assert "clipped" in reason("olmoe", clip_qkv=8.0)
    assert "multiple of 32" in reason("qwen3-moe", moe_intermediate_size=48)
    assert "activation" in reason("mixtral", hidden_act="mish")
    assert "by groups" in reason("glm4-moe", n_group=2, topk_group=1)
    renamed = lean_family("glm4-moe")
    for layer in renamed.model.layers[1:]:
        layer.mlp.gate.__class__ = type(
            "AnotherRouter", (type(layer.mlp.gate),), {"__module__": type(renamed).__module__}
        )
    assert "AnotherRouter" in unsupported(renamed, [None] * 3)
    wrong = lean_family("lfm2-moe")
    wrong.model.layers[1].feed_forward.expert_bias = torch.nn.Buffer(torch.zeros(1))
    assert "the router's correction of shape [1]" in unsupported(wrong, [None])


@pytest.mark.parametrize("changes", [{"norm_topk_prob": False}, {"use_expert_bias": False}, {"num_dense_layers": 0}])
def test_routers_of_lfm2_by_their_settings(changes: dict[str, Any]) -> None:
    lean = Lean("lfm2-moe", torch.float32, **changes)
    mine = lean.run(IDS, [], lean.arena(), range(len(IDS)))
    with torch.inference_mode():
        theirs = lean.model(torch.tensor([IDS])).logits[0]
    assert torch.allclose(mine, theirs, atol=1e-4 * float(theirs.abs().max()))
