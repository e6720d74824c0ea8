"""Models with recurrent state on the compiled kernels: steps that fail, and states in a form of other code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.lean import compiled
from tests.helpers.lean_families import lean_family
from tests.helpers.models import VOCABULARY
from tests.helpers.prompts import ids

from keepwarm import Batcher, Engine
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.native.places import Sequenced
from keepwarm.runtime.native.proof import variance

pytestmark = [
    pytest.mark.skipif(compiled is None, reason="no C++ compiler: steps run through transformers"),
    pytest.mark.host_memory("the compiled kernels keep the state in the host's memory"),
]

SETTINGS: dict[str, Any] = {"settle_after": None, "snapshot_budget": 100.0}  # a snapshot at the end of every page


def text(count: int, seed: int) -> list[int]:
    """Token ids that the model has and that are no special ones of the tokenizer."""
    return [20 + token for token in ids(count, seed, 100)]


@pytest.fixture(scope="module")
def model() -> Any:
    return lean_family("lfm2", torch.float32, vocab_size=VOCABULARY)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_prompts_of_a_pass_that_fails_midway_are_exact(
    count: int, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels have moved the states of all of them when the `count`-th takes its snapshot."""
    head = text(96, 1)
    asked = [head + text(20, 2 + each) for each in range(3)]
    advance, failing = Arena.advance, [0]

    def fails(arena: Arena, length: int) -> None:
        if length == len(asked[0]) and failing[0] < count:
            failing[0] += 1
            if failing[0] == count:
                raise MemoryError("no memory for a snapshot")
        advance(arena, length)

    with Engine.from_pretrained((model, tokenizer), **SETTINGS) as engine:
        cold = [engine.generate(prompt, max_new_tokens=3, trace=True, reuse="off") for prompt in asked]
        engine.warm(head)
        monkeypatch.setattr(Arena, "advance", fails)
        with Batcher(engine) as batch:
            with batch._changed:  # nobody is let in before all have come
                tickets = [batch.submit(prompt, max_new_tokens=3, trace=True) for prompt in asked]
            found = [ticket.result(60) for ticket in tickets]
        assert failing[0] == count
        assert [each.logits_digest for each in found] == [each.logits_digest for each in cold]


@pytest.mark.parametrize("first", [pytest.param("model", marks=pytest.mark.slow), "auto"])
def test_states_in_a_form_of_other_code_are_left_where_they_are(
    first: str, model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """Under `prefix` a prompt finds KV of other arithmetic, whose states the kernels, or transformers, cannot read."""
    prompt = text(200, 1)
    settings = SETTINGS | {"store": tmp_path, "reuse": "prefix", "step": 32, "min_step": 4}
    other = "auto" if first == "model" else "model"

    def reused(attention: str) -> tuple[int, str]:
        with Engine.from_pretrained((model, tokenizer), attention=attention, **settings) as engine:
            result = engine.generate([*prompt, *text(20, 2)], max_new_tokens=4)
            assert engine.stats().corrupt == 0
            assert result.miss is not None
            return result.cached_tokens, result.miss.reason

    with Engine.from_pretrained((model, tokenizer), attention=first, **settings) as engine:
        engine.generate(prompt, max_new_tokens=4)
    assert reused(other) == (0, "arithmetic_differs")
    assert reused(first)[0] == (192 if first == "model" else 200)  # at a cut, or at the end


def test_the_proof_of_invariance_keeps_no_state_that_it_does_not_compare(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state may take many megabytes, and the step has 73 tokens."""
    kept: list[int] = []
    sequenced = Arena.sequenced

    def noted(arena: Arena, end: int | None = None) -> Sequenced:
        found = sequenced(arena, end)
        kept.append(len(found.state.kept) if found.state is not None else 0)
        return found

    with Engine.from_pretrained((model, tokenizer), **SETTINGS) as engine:
        loaded = engine.pipeline.model
        assert loaded.runner.lean is not None
        monkeypatch.setattr(Arena, "sequenced", noted)
        assert variance(loaded.runner.lean, loaded.geometry, VOCABULARY, form=loaded.form) == ""
    assert 0 < max(kept) <= 12
