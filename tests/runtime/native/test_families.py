"""Every family of the compiled kernels: transformers' logits, and rows whose bits depend on the tokens before alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.lean import Lean, compiled
from tests.helpers.lean_families import LEAN, lean_family

from keepwarm import Engine
from keepwarm.batching import Batcher
from keepwarm.runtime.native.proof import variance

COUNT = 330  # positions: several windows
IDS = [3 + i * 7919 % 600 for i in range(COUNT)]

pytestmark = [
    pytest.mark.skipif(compiled is None, reason="no C++ compiler: steps run through transformers"),
    pytest.mark.host_memory("the lean decoder attends to the host's memory"),
]


QUICK = ("gemma3", "cohere2", "gpt-oss", "qwen3-moe")
LONG = (
    *(
        "arcee",
        "bamba",
        "cwm",
        "ernie4.5",
        "falcon3",
        "flex-olmo",
        "granite-moe",
        "granite-moe-shared",
        "granite-moe-swa",
    ),
    *("granite4-dense", "granite4-moe", "helium", "hyperclova", "jais2", "mixtral", "nemotron", "olmoe", "qwen2-moe"),
    *("seed-oss", "vaultgemma"),
)


def marked(*slow: str) -> list[Any]:
    """All families, of which `slow` run in the long suite."""
    return [pytest.param(name, marks=[pytest.mark.slow] if name in slow else []) for name in sorted(LEAN)]


@pytest.fixture(scope="module", params=marked(*LONG))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_alone_are_those_among_all(family: str, dtype: torch.dtype) -> None:
    """Layers that keep nothing compute no other rows than those whose logits are asked for."""
    lean = Lean(family, dtype)
    every = lean.run(IDS[:70], [], lean.arena(), range(70))
    for rows in ([69], [3, 7, 20], [0, 68]):
        assert torch.equal(every[rows], lean.run(IDS[:70], [], lean.arena(), rows))


def in_float64(lean: Lean) -> torch.Tensor:
    """Transformers' own eager attention in float64."""
    reference = type(lean.model)(lean.model.config).double().eval()
    reference.load_state_dict({name: tensor.double() for name, tensor in lean.model.state_dict().items()})
    reference.config._attn_implementation = "eager"
    reference.config._experts_implementation = "eager"
    with torch.inference_mode():
        found: torch.Tensor = reference(torch.tensor([IDS])).logits[0]
    return found


def test_logits_are_those_of_float64(family: str) -> None:
    lean = Lean(family, torch.float32)
    exact = in_float64(lean)
    mine = lean.run(IDS, [], lean.arena(), range(COUNT)).double()
    assert (mine - exact).abs().max() < 1e-4 * exact.abs().max()


def test_half_precision_is_as_near_as_transformers_and_rows_are_invariant(family: str) -> None:
    lean = Lean(family, torch.bfloat16)
    exact = in_float64(lean)
    mine = lean.run(IDS, [], lean.arena(), range(COUNT)).double()
    with torch.inference_mode():
        theirs = lean.model(torch.tensor([IDS])).logits[0].double()
    assert (mine - exact).abs().mean() < 1.5 * (theirs - exact).abs().mean()
    assert variance(lean.decoder, lean.geometry, 600) == ""


@settings(max_examples=8, deadline=None, derandomize=True)
@given(cuts=st.sets(st.integers(1, COUNT - 1), max_size=6), threads=st.integers(1, 3))
def test_no_cut_and_no_thread_changes_a_bit(half: Lean, cuts: set[int], threads: int) -> None:
    whole, parts = half.arena(), half.arena()
    expected = half.run(IDS, [], whole)
    half.decoder.threads = threads
    try:
        assert torch.equal(expected, half.run(IDS, sorted(cuts), parts))
    finally:
        half.decoder.threads = None
    for a, b in zip(whole.layers, parts.layers, strict=True):
        for kv in (0, 1):
            assert torch.equal(a.plane(kv).tensor()[:, :COUNT], b.plane(kv).tensor()[:, :COUNT])


@pytest.fixture(scope="module", params=marked(*set(LEAN).difference(QUICK)))
def half(request: pytest.FixtureRequest) -> Lean:
    return Lean(request.param, torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param("gemma3", torch.float32, marks=pytest.mark.slow),
        pytest.param("gemma3", torch.bfloat16, marks=pytest.mark.slow),
        ("gemma4", torch.bfloat16),
        pytest.param("gemma4", torch.float32, marks=pytest.mark.slow),
        pytest.param("gemma4-moe", torch.float32, marks=pytest.mark.slow),
        pytest.param("gemma4-unified", torch.float32, marks=pytest.mark.slow),
        pytest.param("gpt-oss", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("gpt-oss", torch.float32, marks=pytest.mark.slow),
        ("qwen3-moe", torch.bfloat16),
        pytest.param("qwen2-moe", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_a_hit_a_restart_and_a_batch_answer_as_a_cold_run(
    tokenizer: Any, tmp_path: Any, family: str, dtype: torch.dtype
) -> None:
    """Windows in some layers: what a hit does not bring of them is neither read nor given to others. Experts: who else
    is in the step changes nothing."""
    model = lean_family(family, dtype)
    other = [*IDS[:200], *IDS[:60]]
    with Engine.from_pretrained((model, tokenizer), reuse="off") as cold:
        assert cold.pipeline.model.runner.lean is not None
        expected = [cold.generate(ids, max_new_tokens=4, trace=True) for ids in (IDS, other, IDS[:150])]
    for setting in ({}, {"max_ram": 0}):
        with Engine.from_pretrained((model, tokenizer), store=tmp_path / str(len(setting)), **setting) as engine:
            engine.generate(IDS, max_new_tokens=4)
        with Engine.from_pretrained((model, tokenizer), store=tmp_path / str(len(setting)), **setting) as engine:
            found = [engine.generate(ids, max_new_tokens=4, trace=True) for ids in (IDS, other, IDS[:150])]
            engine.pipeline.pool.forget()
            with Batcher(engine) as batch:
                tickets = [batch.submit(ids, max_new_tokens=4, trace=True) for ids in (IDS, other, IDS[:150])]
                found += [ticket.result(60) for ticket in tickets]
        assert [hit.logits_digest for hit in found] == [was.logits_digest for was in expected * 2]
        assert {hit.exactness for hit in found} == {"exact"}
        assert [hit.cached_tokens for hit in found[:3]] == [COUNT - 1, 200, 149]
