"""A batch on a device begins a step before the host knows its tokens: the answers are those of requests alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.helpers.models import tiny
from tests.helpers.on_triton import SMALL
from tests.helpers.prompts import ids

from keepwarm import Batcher, Engine
from keepwarm.batching import decoding
from keepwarm.runtime import device
from keepwarm.runtime.pages import page_bytes, pages_for
from keepwarm.testing.device import AdversarialPort

PROMPT = ids(40, 1, SMALL)
SECONDS = 120


@pytest.fixture(scope="module")
def engine(tokenizer: Any) -> Iterator[Engine]:
    port = AdversarialPort()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(device.PORTS, "cpu", lambda where: port)
        pair = tiny("llama", vocab_size=SMALL), tokenizer
        with Engine.from_pretrained(pair, attention="triton") as made:
            yield made
    assert port.faults == []


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests each step has that began ahead."""
    counts: list[int] = []
    begin = decoding.begun_ahead

    def counted(*given: Any) -> Any:
        found = begin(*given)
        counts.append(0 if found is None else len(found.jobs))
        return found

    monkeypatch.setattr(decoding, "begun_ahead", counted)
    return counts


def test_answers_that_end_at_different_tokens(engine: Engine, begun: list[int]) -> None:
    prompts = [[*PROMPT, *ids(3, 10 + number, SMALL)] for number in range(3)]
    hows: list[dict[str, Any]] = [{"max_new_tokens": 3}, {"max_new_tokens": 7}, {"max_new_tokens": 7}]
    hows = [how | {"trace": True, "ignore_eos": True} for how in hows]
    whole = engine.generate(prompts[2], **hows[2], reuse="off").token_ids
    hows[2]["stop_token_ids"] = [next(token for token in whole[1:] if token != whole[0])]
    alone = [engine.generate(prompt, **how, reuse="off") for prompt, how in zip(prompts, hows, strict=True)]
    with Batcher(engine) as batcher:
        for _ in range(2):  # the second time from pages that were freed while a step was under way
            tickets = [batcher.submit(prompt, **how) for prompt, how in zip(prompts, hows, strict=True)]
            found = [ticket.result(SECONDS) for ticket in tickets]
            assert [each.token_ids for each in found] == [each.token_ids for each in alone]
            assert [each.logits_digest for each in found] == [each.logits_digest for each in alone]
        assert batcher.stats().pages.referenced == 0 or engine.flush() is None
    assert max(begun) > 1
    assert begun.count(0) < len(begun) / 2


def test_who_needs_the_host_holds_nobody_up(engine: Engine, begun: list[int]) -> None:
    """While such a request runs, no step begins ahead. A cancelled one leaves its row behind."""
    plain: dict[str, Any] = {"max_new_tokens": 5, "trace": True, "ignore_eos": True}
    drawn = plain | {"temperature": 0.7, "seed": 1}
    wanted = [engine.generate(PROMPT, **how, reuse="off").logits_digest for how in (plain, drawn)]
    with Batcher(engine) as batcher:
        tickets = [batcher.submit(PROMPT, **how) for how in (plain, drawn)]
        cancelled = batcher.submit([*PROMPT, 3], max_new_tokens=200, ignore_eos=True)
        next(iter(cancelled))
        cancelled.cancel()
        assert [ticket.result(SECONDS).logits_digest for ticket in tickets] == wanted
        assert batcher.submit(PROMPT, **plain).result(SECONDS).logits_digest == wanted[0]
    assert max(begun) > 0


def test_by_default_pages_have_a_part_of_what_is_free(engine: Engine) -> None:
    """As much as the batch can use; requests outside of it have that again once it is closed."""
    pool = engine.pipeline.pool
    before = pool.cap
    with Batcher(engine, max_batch=4) as batcher:
        taken = batcher.pool.capacity * page_bytes(engine.pipeline.model.geometry)
        assert pool.cap == before - taken
        window = engine.pipeline.model.context_window
        assert window is not None
        assert batcher.pool.capacity == 4 * pages_for(window)
    assert pool.cap == before


def test_a_step_without_room_runs_in_its_turn(
    engine: Engine, begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"max_new_tokens": 4, "trace": True, "ignore_eos": True}
    wanted = engine.generate(PROMPT, **how, reuse="off").logits_digest
    runner = engine.pipeline.model.runner
    together = runner.step_together

    def refused(*given: Any, **named: Any) -> Any:
        if len(given) > 3:
            raise MemoryError("no room")
        return together(*given, **named)

    monkeypatch.setattr(runner, "step_together", refused)
    with Batcher(engine) as batcher:
        assert batcher.submit(PROMPT, **how).result(SECONDS).logits_digest == wanted
    assert set(begun) == {0}
