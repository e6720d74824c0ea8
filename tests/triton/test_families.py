"""The Triton decoder on the real classes: the numbers of float64, and rows whose bits depend on nothing beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.lean_families import LEAN, lean_family
from tests.helpers.on_triton import SMALL, OnTriton
from tests.helpers.prompts import ids

from keepwarm.runtime.gpu_kernels.reasons import uncovered

COUNT = 90  # more than the families' windows
IDS = ids(COUNT, 4, SMALL)
PLAIN = ("llama", "qwen2", "qwen3", "mistral")
UNCOVERED = {
    "recurrent states": ("bamba", "granite4", "granite4-moe", "lfm2", "lfm2-last", "lfm2-moe", "lfm3"),
    "layers of different shapes, or that share keys and values": tuple(name for name in LEAN if "gemma4" in name),
    "routers by sigmoid": ("glm4-moe",),
    "factors of queries by position": ("ministral3",),
}
UNCOVERED["recurrent states"] += ("qwen3-next", "qwen3.5", "qwen3.5-moe")
WHY = {name: why for why, names in UNCOVERED.items() for name in names}
COVERED = (*PLAIN, *sorted(LEAN.keys() - WHY.keys()))
QUICK = ("qwen3", "gemma2", "qwen2-moe")


def marked() -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in COVERED]


@pytest.mark.parametrize("family", marked())
def test_logits_are_those_of_float64(family: str) -> None:
    made = OnTriton(family)
    made.model.config._experts_implementation = "eager"  # the others do not run in float64
    exact = made.in_float64(IDS)
    mine = made.run(IDS).double()
    assert (mine - exact).abs().max() < 1e-4 * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "gpt-oss", "mixtral"))]
)
def test_half_precision_is_as_near_as_transformers(family: str, dtype: torch.dtype) -> None:
    made = OnTriton(family, dtype)
    made.model.config._experts_implementation = "eager"
    exact = made.in_float64(IDS)
    mine = made.run(IDS).double()
    with torch.inference_mode():
        theirs = made.model(torch.tensor([IDS])).logits[0].double()
    apart, usual = ((logits - exact).abs().mean(-1) for logits in (mine, theirs))
    if made.decoder.is_routed:  # a row for which rounding chooses another expert is far away
        assert apart.median() < 1.5 * usual.median()
    else:
        assert apart.mean() < 1.5 * usual.mean()
    assert mine.float().to(dtype).double().equal(mine)


@pytest.mark.parametrize("family", sorted(WHY))
def test_what_is_not_covered_has_a_name(family: str) -> None:
    model = lean_family(family)
    assert uncovered(model, [None] * model.config.num_hidden_layers) == WHY[family]
