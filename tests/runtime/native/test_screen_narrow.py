"""Rows' largest logits, where the first part of a head in bfloat16 is read: they are those among all logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.emulated import emulated
from tests.helpers.lean import Lean, compiled, prompt, windows

from keepwarm.core.blocks import token_ids
from keepwarm.runtime.native.decoder import LeanDecoder, Screening
from keepwarm.runtime.native.proof import variance

pytestmark = pytest.mark.host_memory("the lean decoder attends to the host's memory")

ODD = {"vocab_size": 1003, "hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 16}


@pytest.fixture(scope="module", params=["here", pytest.param("emulated", marks=pytest.mark.slow)])
def lean(request: pytest.FixtureRequest) -> Lean:
    kernels = compiled if request.param == "here" else emulated()
    if kernels is None or kernels.library.keepwarm_deep() == 1:
        pytest.skip("this processor does not multiply bfloat16, or multiplies it in tiles, so none are emulated")
    return Lean("llama", torch.bfloat16, kernels, **ODD)


@pytest.fixture(autouse=True)
def shares(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The shares of panels that steps multiplied whole. It is never given up, though random weights have nearly equal
    logits."""
    found: list[float] = []
    monkeypatch.setattr(Screening, "pays", lambda self, rows: self.screens)
    monkeypatch.setattr(Screening, "was", lambda self, rows, share: found.append(share))
    return found


def both(lean: Lean, ids: list[int], wanted: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """All logits of some rows, and those of which only the largest were asked for."""
    found = []
    for largest in (False, True):
        arena = lean.arena()
        found.append(lean.decoder.step([token_ids(ids)], [0], [arena.sequenced()], wanted, largest=largest))
    return found[0], found[1]


def assert_largest(every: torch.Tensor, some: torch.Tensor) -> None:
    assert every.numpy().argmax(1).tolist() == some.numpy().argmax(1).tolist()
    there = some != -torch.inf
    assert torch.equal(every[there].nan_to_num(7.0), some[there].nan_to_num(7.0))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    ids=st.lists(st.integers(0, 1002), min_size=6, max_size=20),
    wanted=st.sets(st.integers(0, 5), min_size=1, max_size=6),
    threads=st.integers(1, 5),
)
def test_the_largest_logits_are_those_among_all(lean: Lean, ids: list[int], wanted: set[int], threads: int) -> None:
    assert lean.decoder.screens
    lean.decoder.threads = threads
    try:
        every, some = both(lean, ids, sorted(wanted))
    finally:
        lean.decoder.threads = None
    assert_largest(every, some)
    if len(wanted) > 4:
        assert torch.equal(every, some), "so many rows are not screened"


Spoil = Callable[[torch.Tensor, int], None]


def times(by: float) -> Spoil:
    return lambda weight, row: weight[row].mul_(by)


def same_as_best(weight: torch.Tensor, row: int) -> None:
    weight[row] = weight[7]


def nearly_the_same(weight: torch.Tensor, row: int) -> None:
    """Its logit is a bit smaller, and may be rounded to the same number."""
    weight[row] = weight[7]
    weight[row, ::16] *= 0.99


def overflowing(weight: torch.Tensor, row: int) -> None:
    weight[row] = torch.tensor([3e38, 0, -3e38, 0], dtype=weight.dtype).repeat(weight.shape[1] // 4)


@pytest.mark.parametrize(
    "spoil",
    {
        "larger": times(8),
        "below zero": times(-8),
        "none": times(0),
        "no number": times(float("nan")),
        "without end": times(float("inf")),
        "sums that overflow on the way": overflowing,
        "equal ones": same_as_best,
        "nearly equal ones": nearly_the_same,
    }.items(),
    ids=lambda item: item[0],
)
def test_odd_weights_and_ties(lean: Lean, spoil: tuple[str, Spoil]) -> None:
    """In some rows: before the largest one's, beside it, and the last one."""
    weight = lean.model.lm_head.weight.data
    before = weight.clone()
    whole = lean.decoder
    try:
        best = int(both(lean, prompt_of(30), [29])[0].argmax())
        weight[7] = before[best] * 2
        for row in (3, 6, 8, 500, 1002):
            spoil[1](weight, row)
        lean.decoder = LeanDecoder(lean.model, lean.kernels, windows(lean.geometry))
        assert lean.decoder.screens
        for wanted in ([29], [27, 28, 29]):
            assert_largest(*both(lean, prompt_of(30), wanted))
    finally:
        weight.copy_(before)
        lean.decoder = whole


def prompt_of(count: int) -> list[int]:
    return [token % 1003 for token in prompt(count, 0)]


def test_few_panels_are_multiplied_whole(lean: Lean, shares: list[float]) -> None:
    both(lean, prompt_of(40), [39])
    assert 0 < shares[-1] < 0.5


def test_weights_of_every_size_are_not_screened(lean: Lean) -> None:
    """Their head lies in 16 bits, in one part."""
    weight = lean.model.lm_head.weight.data
    before = weight.clone()
    try:
        weight.view(-1)[::300] *= 2.0**-40
        weight.view(-1)[1::300] *= 2.0**-60
        assert not LeanDecoder(lean.model, lean.kernels, windows(lean.geometry)).screens
    finally:
        weight.copy_(before)


def test_the_self_test_compares_them(lean: Lean, monkeypatch: pytest.MonkeyPatch) -> None:
    assert variance(lean.decoder, lean.geometry, 1003) == ""
    step = LeanDecoder.step

    def wrong(self: LeanDecoder, *given: object, **named: object) -> torch.Tensor:
        logits = step(self, *given, **named)  # type: ignore[arg-type]
        return logits.roll(1, dims=1) if named.get("largest") else logits

    monkeypatch.setattr(LeanDecoder, "step", wrong)
    assert variance(lean.decoder, lean.geometry, 1003) == "the largest logits alone, with 1 threads"
