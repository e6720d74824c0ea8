"""Rows' largest logits, where the head's weights are read by half: they are those among all logits, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.gguf_files import MIXTURE, write

from keepwarm import Engine
from keepwarm.core.blocks import token_ids
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.device.host import HostPort
from keepwarm.runtime.native import build
from keepwarm.runtime.native.blocks import IN_PARTS, can_compute
from keepwarm.runtime.native.decoder import LeanDecoder, Screening
from keepwarm.runtime.native.proof import variance

pytestmark = [
    pytest.mark.slow,  # kernels of their own are compiled for these tests
    pytest.mark.skipif(not can_compute(), reason="no C++ compiler"),
    pytest.mark.host_memory("the lean decoder attends to the host's memory"),
]
LENGTH = 60


@pytest.fixture(scope="module", params=["Q8_0", "Q6_K"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    kinds = MIXTURE | {"output": request.param, "token_embd": request.param}
    path = write(tmp_path_factory.mktemp("gguf") / "m.gguf", kinds)
    with Engine.from_pretrained(path, max_disk=0) as engine:
        yield engine


@pytest.fixture(scope="module")
def lean(engine: Engine) -> LeanDecoder:
    found = engine.pipeline.model.runner.lean
    assert isinstance(found, LeanDecoder)
    return found


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights have nearly equal logits, so that it would be given up soon."""
    monkeypatch.setattr(Screening, "pays", lambda self, rows: True)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The shares of panels that steps multiplied whole."""
    found: list[float] = []
    monkeypatch.setattr(Screening, "was", lambda self, rows, share: found.append(share))
    return found


def both(engine: Engine, lean: LeanDecoder, tokens: list[int], wanted: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """All logits of some rows, and those of which only the largest were asked for."""
    found = []
    for largest in (False, True):
        arena = Arena(engine.pipeline.model.geometry, LENGTH, HostPort())
        found.append(lean.step([token_ids(tokens)], [0], [arena.sequenced()], wanted, largest=largest))
    return found[0], found[1]


def assert_largest(every: torch.Tensor, some: torch.Tensor) -> None:
    assert every.argmax(dim=1).tolist() == some.argmax(dim=1).tolist()
    there = some != -torch.inf
    assert torch.equal(every[there], some[there])
    assert torch.equal(every.max(dim=1).values, some.max(dim=1).values)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.integers(0, 255), min_size=6, max_size=20),
    wanted=st.sets(st.integers(0, 5), min_size=1, max_size=6),
    threads=st.integers(1, 5),
)
def test_the_largest_logits_are_those_among_all(
    engine: Engine, lean: LeanDecoder, tokens: list[int], wanted: set[int], threads: int
) -> None:
    lean.threads = threads
    try:
        every, some = both(engine, lean, tokens, sorted(wanted))
    finally:
        lean.threads = None
    assert_largest(every, some)
    if len(wanted) > 4:
        assert torch.equal(every, some), "so many rows are not screened"


Spoil = Callable[[Any, int], None]


def scaled(by: float) -> Spoil:
    def spoil(blocks: Any, row: int) -> None:
        blocks[row, :, :2].view(np.float16)[:] *= by

    return spoil


def same_as(other: int) -> Spoil:
    def spoil(blocks: Any, row: int) -> None:
        blocks[row] = blocks[other]

    return spoil


@pytest.mark.parametrize(
    "spoil",
    {
        "larger": scaled(8),
        "scales below zero": scaled(-1),
        "no weight": scaled(0),
        "no numbers": scaled(float("nan")),
        "without end": scaled(float("inf")),
        "equal ones": same_as(7),
    }.items(),
    ids=lambda item: item[0],
)
def test_odd_weights_and_ties(spoil: tuple[str, Spoil], tmp_path_factory: pytest.TempPathFactory) -> None:
    """In some rows, the largest one's among them."""
    kinds = MIXTURE | {"output": "Q8_0"}
    path = write(tmp_path_factory.mktemp("odd") / "m.gguf", kinds)
    with Engine.from_pretrained(path, max_disk=0) as engine:
        lean, model = engine.pipeline.model.runner.lean, engine.pipeline.model.model
        assert isinstance(lean, LeanDecoder)
        every, _ = both(engine, lean, list(range(30)), [29])
        raw = model.lm_head.weight.numpy().copy()
        for row in (int(every.argmax()), 3, 40, 255):
            spoil[1](raw.reshape(len(raw), -1, 34), row)
        model.lm_head.weight = torch.from_numpy(raw)
        kernels = build.kernels(in_blocks=True)
        assert kernels is not None
        other = LeanDecoder(model, kernels, [None] * len(model.model.layers))
        every, some = both(engine, other, list(range(30)), [27, 28, 29])
        if every.isfinite().all():
            assert_largest(every, some)
        else:
            assert [row.numpy().argmax() for row in every] == [row.numpy().argmax() for row in some]


def test_few_panels_are_multiplied_whole_if_one_logit_stands_out(
    engine: Engine, lean: LeanDecoder, whole: list[float]
) -> None:
    assert engine.pipeline.model.model.lm_head.blocks.in_parts.kind in IN_PARTS.values()
    both(engine, lean, list(range(40)), [39])
    assert 0 < whole[-1] <= 1


@pytest.mark.parametrize("more", [{}, {"draft_tokens": 0}])
def test_answers_are_the_same_as_from_all_logits(engine: Engine, more: dict[str, Any], whole: list[float]) -> None:
    """`trace` digests all logits, so it asks for them."""
    prompt = [5, 9, 2, 5, 9, 2, 5, 9]
    answers = [engine.generate(prompt, max_new_tokens=24, ignore_eos=True, trace=trace) for trace in (True, False)]
    assert answers[0].token_ids == answers[1].token_ids
    count = len(whole)
    assert count > 0
    for asks_all in ({"logprobs": 2}, {"repetition_penalty": 1.3}, {"temperature": 1.0, "seed": 3}, {"min_tokens": 4}):
        engine.generate(prompt, max_new_tokens=8, **asks_all)
    assert len(whole) == count


def test_the_self_test_compares_them(engine: Engine, lean: LeanDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    geometry, vocabulary = engine.pipeline.model.geometry, engine.pipeline.model.runner.vocabulary
    assert variance(lean, geometry, vocabulary) == ""
    step = LeanDecoder.step

    def wrong(self: LeanDecoder, *given: Any, **named: Any) -> torch.Tensor:
        logits = step(self, *given, **named)
        return logits.roll(1, dims=1) if named.get("largest") else logits

    monkeypatch.setattr(LeanDecoder, "step", wrong)
    assert variance(lean, geometry, vocabulary) == "the largest logits alone, with 1 threads"


def test_it_is_given_up_where_it_does_not_pay_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    screening = Screening(0.25)

    def steps(count: int, share: float, rows: int = 1) -> int:
        """How many of so many steps try it."""
        tried = 0
        for _ in range(count):
            if screening.pays(rows):
                screening.was(rows, share)
                tried += 1
        return tried

    assert steps(130, 0.9) == 3
    assert steps(130, 0.9, rows=2) == 3, "other numbers of rows are measured on their own"
    assert steps(128, 0.01) > 64, "one good try is enough"
    assert steps(20, 0.3) > 2, "one bad step is not"
