"""What the store reads of an arena stays as it was, while the same prompt already writes into it again."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.models import tiny

from keepwarm import Engine
from keepwarm.core.geometry import KVGeometry
from keepwarm.runtime.arena import for_store as limits
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.arena.for_store import for_store
from keepwarm.runtime.device import port_to
from keepwarm.store.runfile.layout import Run

GEOMETRY = KVGeometry.uniform(2, 2, 4, "float32")
TOKENS = 40


@pytest.mark.host_memory("views of an arena are its memory")
@given(st.data())
def test_what_is_read_does_not_change_when_the_arena_does_behind_the_pin(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, TOKENS - 1))
    end = data.draw(st.integers(start + 1, TOKENS))
    anew = data.draw(st.integers(0, TOKENS))
    arena = Arena(GEOMETRY, 64, port_to(torch.device("cpu")))
    wanted = {}
    for layer in range(2):
        for kv in (0, 1):
            arena.view(layer, kv, 0, TOKENS)[:] = np.random.default_rng([layer, kv]).integers(256, size=(2, TOKENS, 16))
            wanted[layer, kv] = arena.read(layer, kv, 0, TOKENS).copy()
        arena.commit(layer, 0, TOKENS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "_COPIED", data.draw(st.integers(0, TOKENS)))
        source, pinned = for_store(arena, start, end, anew)
    for layer in range(2):
        for kv in (0, 1):
            arena.view(layer, kv, pinned, 64)[:] = 0
    first = data.draw(st.integers(start, end))
    last = data.draw(st.integers(first, end))
    for (layer, kv), kept in wanted.items():
        assert np.array_equal(source.read(layer, kv, first, last), kept[:, first:last])


@pytest.mark.host_memory("a device has other arenas to spare, and its requests go on at the end of a step")
def test_a_long_prompt_asked_again_before_it_is_stored_goes_on_where_its_kv_is(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", max_position_embeddings=4096)
    prompt = [5 + at * at % 200 for at in range(2500)]
    asked_again, copy_from = threading.Event(), Run.copy_from

    def late(*args: Any) -> Run:
        assert asked_again.wait(60)
        return copy_from(*args)

    monkeypatch.setattr(Run, "copy_from", late)
    with Engine.from_pretrained((model, tokenizer), store=tmp_path) as engine:
        answers = [engine.generate(prompt, max_new_tokens=4, trace=True)]
        taken = engine.stats().bytes["device"]
        answers.append(engine.generate(prompt, max_new_tokens=8, temperature=5.0, seed=1, trace=True))
        answers.append(engine.generate(prompt, max_new_tokens=4, trace=True))
        assert engine.stats().bytes["device"] == taken
        asked_again.set()
    with Engine.from_pretrained((model, tokenizer), store=tmp_path) as engine:
        answers.append(engine.generate(prompt, max_new_tokens=4, trace=True))
    assert [answer.cached_by_tier for answer in answers] == [{}, *[{"device": 2499}] * 2, {"disk": 2499}]
    cold, _, *warm = [answer.logits_digest for answer in answers]
    assert warm == [cold, cold]
