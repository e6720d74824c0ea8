"""Weights in float32 that are numbers of bfloat16, as those of most checkpoints, are kept as such. No bit changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.lean import Lean, compiled, windows
from tests.helpers.lean_families import LEAN

from keepwarm.runtime.native import packing
from keepwarm.runtime.native.decoder import LeanDecoder

IDS = [3 + i * 7919 % 600 for i in range(128)]
CUTS = (60, 90, 102, 112, 117, 121, 124, 126)  # steps of 60, 30, 12, 10, 5, 4, 3, 2 and 2 rows
QUICK = ("gemma4", "gpt-oss", "granite4-moe", "lfm2", "olmo2", "qwen3-moe")

pytestmark = [
    pytest.mark.skipif(compiled is None, reason="no C++ compiler: steps run through transformers"),
    pytest.mark.host_memory("the lean decoder attends to the host's memory"),
]


def logits(lean: Lean) -> list[torch.Tensor]:
    """What each step ends with, and then all rows of one step."""
    arena = lean.arena()
    ends = [lean.run(IDS[:end], CUTS[:at], arena) for at, end in enumerate([*CUTS, len(IDS)])]
    return [*ends, lean.run(IDS, [], lean.arena(), range(len(IDS)))]


def held(lean: Lean) -> int:
    return sum(lean.decoder.storages.values())


def packed_again(lean: Lean) -> None:
    assert compiled is not None
    lean.decoder = LeanDecoder(lean.model, compiled, windows(lean.geometry))


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each in QUICK else [pytest.mark.slow]) for each in sorted(LEAN)]
)
def test_no_bit_changes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lean = Lean(family, torch.float32)
    with torch.no_grad():
        for weight in lean.model.parameters():
            weight.copy_(weight.bfloat16())
    packed_again(lean)
    narrow, fewer = logits(lean), held(lean)
    monkeypatch.setattr(packing, "narrowed", refuse)
    packed_again(lean)
    assert all(map(torch.equal, logits(lean), narrow))
    assert fewer < 0.9 * held(lean)  # tiny models have much beside the weights of products


def refuse(_weight: Any) -> Any:
    raise packing.WideWeights


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "lm_head.weight"])
def test_one_weight_that_is_none_keeps_all_of_them_wide(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lean = Lean("olmo2", torch.float32)
    weights = dict(lean.model.named_parameters())
    with torch.no_grad():
        for weight in weights.values():
            weight.copy_(weight.bfloat16())
        packed_again(lean)
        narrow = held(lean)
        weights[name].view(-1)[5] = 1 + 2**-20
    packed_again(lean)
    mine, wide = logits(lean), held(lean)
    monkeypatch.setattr(packing, "narrowed", refuse)
    packed_again(lean)
    assert all(map(torch.equal, logits(lean), mine))
    assert narrow < 0.9 * wide == 0.9 * held(lean)


@pytest.mark.parametrize("number", [1 + 2**-8, float("nan"), 1e-45, 3.4e38])
def test_other_numbers_are_refused(number: float) -> None:
    weight = torch.ones(5000, 3)
    weight[4999, 2] = number
    with pytest.raises(packing.WideWeights):
        packing.narrowed(weight)


@pytest.mark.parametrize("number", [1 + 2**-7, -0.0, float("inf"), 2**-133])
def test_numbers_of_bfloat16_are_kept(number: float) -> None:
    weight = torch.full((3, 3), number)
    assert torch.equal(packing.narrowed(weight).float().view(torch.int32), weight.view(torch.int32))
