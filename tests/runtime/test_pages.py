"""Sequences in pages: the same numbers as alone in an arena, shared where they begin alike, never written by two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.helpers.models import tiny
from tests.helpers.prompts import ids

from keepwarm import Engine
from keepwarm.core.blocks import token_ids
from keepwarm.core.request import Request
from keepwarm.core.spans import Reuse
from keepwarm.errors import Overloaded
from keepwarm.runtime.execute import prefill
from keepwarm.runtime.native.places import PAGE
from keepwarm.runtime.pages import KVPages, PagedSequence, page_names, pages_for
from keepwarm.runtime.runner import Runner

pytestmark = pytest.mark.host_memory("pages are the lean decoder's")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, tokenizer: Any) -> Iterator[Engine]:
    with Engine.from_pretrained((tiny("qwen3", getattr(torch, request.param)), tokenizer), step=48) as engine:
        if engine.pipeline.model.runner.lean is None:
            pytest.skip("no compiler here")
        yield engine


def memory_of(engine: Engine, count: int) -> KVPages:
    lean = engine.pipeline.model.runner.lean
    assert lean is not None
    return KVPages(engine.pipeline.model.geometry, count, lambda: lean.copy_rows)


def paged(engine: Engine, memory: KVPages, prompt: list[int], room: int = 0) -> tuple[PagedSequence, torch.Tensor]:
    """A prompt's KV in pages, and its last logits."""
    linked = engine.pipeline.linked(engine.pipeline.prompts.compile(Request(prompt), 1))
    names = page_names(linked.blocks, len(prompt))
    sequence = memory.admit(len(prompt) + room, names)
    if sequence is None:
        raise Overloaded("no room")
    try:
        with engine.pipeline.lease(linked, Reuse.EXACT, len(prompt)) as placed:
            logits = prefill(placed.plan, token_ids(prompt), placed.arena.cache, engine.pipeline.model.runner)
            placed.computed_to = len(prompt)
            sequence.fill(placed.arena.sequenced(), len(prompt), names)
    except BaseException:
        sequence.release()
        raise
    return sequence, logits


def step(runner: Runner, tokens: list[int], sequences: list[PagedSequence]) -> torch.Tensor:
    for sequence in sequences:
        sequence.grow(sequence.length + 1)
    logits = runner.step_together(
        [token_ids([t]) for t in tokens], [s.length for s in sequences], [s.sequenced for s in sequences]
    )
    for sequence in sequences:
        sequence.length += 1
    return logits


def alone(engine: Engine, prompt: list[int]) -> torch.Tensor:
    """Logits after a prompt whose last token is decoded, as a request by itself computes them."""
    compiled = engine.pipeline.prompts.compile(Request(prompt[:-1]), 1)
    with engine.pipeline.lease(engine.pipeline.linked(compiled), Reuse.OFF, len(prompt)) as placed:
        prefill(placed.plan, compiled.tokens, placed.arena.cache, engine.pipeline.model.runner)
        return engine.pipeline.model.runner.step(token_ids(prompt[-1:]), placed.arena.cache, len(prompt) - 1)


def test_decoding_from_pages_equals_decoding_from_an_arena(engine: Engine) -> None:
    memory = memory_of(engine, pages_for(640))
    prompts = [ids(n, n) for n in (1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 100, 130)]
    sequences = [paged(engine, memory, prompt)[0] for prompt in prompts]
    logits = step(engine.pipeline.model.runner, [7] * len(prompts), sequences)
    for prompt, row in zip(prompts, logits, strict=True):
        assert torch.equal(row, alone(engine, [*prompt, 7]))


def test_equal_beginnings_are_one_page_whatever_tier_they_came_from(engine: Engine) -> None:
    memory = memory_of(engine, pages_for(640))
    head = ids(100, 1)
    first, _ = paged(engine, memory, head + ids(20, 2))
    engine.flush()
    engine.pipeline.pool.forget()
    second, _ = paged(engine, memory, head + ids(30, 3))  # its head is read in place in RAM
    whole = 96 // PAGE  # the last step of each is its own chain
    assert first.pages[:whole] == second.pages[:whole]
    assert not set(first.pages[whole:]) & set(second.pages[whole:])
    logits = step(engine.pipeline.model.runner, [5, 6], [first, second])
    assert torch.equal(logits[0], alone(engine, [*head, *ids(20, 2), 5]))
    assert torch.equal(logits[1], alone(engine, [*head, *ids(30, 3), 6]))
    first.release()
    assert memory.pool.counts.referenced == len(second.pages)
    again, _ = paged(engine, memory, head + ids(20, 2))
    assert again.pages[:whole] == second.pages[:whole]
    assert torch.equal(step(engine.pipeline.model.runner, [5], [again])[0], logits[0])


def test_forks_share_all_and_copy_the_last_page_when_they_write(engine: Engine) -> None:
    memory = memory_of(engine, pages_for(320))
    prompt = ids(2 * PAGE + PAGE // 2, 4)
    one, _ = paged(engine, memory, prompt)
    two = one.fork()
    assert two.pages == one.pages
    logits = step(engine.pipeline.model.runner, [5, 6], [one, two])
    assert one.pages[:2] == two.pages[:2]
    assert one.pages[2] != two.pages[2]
    for token, row, sequence in zip([5, 6], logits, [one, two], strict=True):
        assert torch.equal(row, alone(engine, [*prompt, token]))
        sequence.release()
    assert memory.pool.counts.referenced == 0


def test_running_out_of_pages_gives_all_back(engine: Engine) -> None:
    memory = memory_of(engine, 20)
    held, _ = paged(engine, memory, ids(10 * PAGE, 5))
    before = memory.pool.counts
    with pytest.raises(Overloaded):
        paged(engine, memory, ids(11 * PAGE, 6))
    assert memory.pool.counts == before
    # promised room cannot be taken by others, who then fail with what they had given back
    sequence = memory.admit(8 * PAGE, ())
    assert sequence is not None
    late, long = PagedSequence(memory), ids(5 * PAGE, 6)
    with engine.pipeline.lease(
        engine.pipeline.linked(engine.pipeline.prompts.compile(Request(long), 1)), Reuse.OFF, len(long)
    ) as placed:
        prefill(placed.plan, token_ids(long), placed.arena.cache, engine.pipeline.model.runner)
        with pytest.raises(Overloaded, match=r"1 pages wanted, 0 of 20 are available"):
            late.fill(placed.arena.sequenced(), len(long), ())
    assert len(late.pages) == 2
    late.release()
    sequence.release()
    held.release()
    counts = memory.pool.counts
    assert (counts.referenced, counts.reserved) == (0, 0)
