"""A batch that several owners share: nobody holds all of it, and short requests do not wait for others' long ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.batches import SECONDS, STEP, nothing_held, same
from tests.helpers.hybrids import hybrid
from tests.helpers.models import tiny
from tests.helpers.prompts import ids

from keepwarm import Batcher, Engine
from keepwarm.batching.request import Ticket
from keepwarm.batching.turns import PASSED
from keepwarm.core.shares import may_hold
from keepwarm.errors import Overloaded
from keepwarm.runtime.native.places import PAGE

pytestmark = pytest.mark.host_memory("only the lean decoder cuts a step between rows")


@pytest.fixture(scope="module")
def llama(tokenizer: Any) -> Iterator[Engine]:
    with Engine.from_pretrained((tiny("llama"), tokenizer), step=STEP, min_step=4, max_pages="8MiB") as engine:
        if engine.pipeline.model.runner.lean is None:
            pytest.skip("no compiler here")
        yield engine


def endless(number: int, length: int = 40) -> dict[str, Any]:
    return {"prompt": ids(length, number), "max_new_tokens": 1200, "temperature": 1.0, "seed": number}


@given(owners=st.integers(1, 6), asked=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=120))
def test_something_is_left_however_many_are_greedy(owners: int, asked: list[tuple[int, int]]) -> None:
    """As long as nobody asks for much at once."""
    held, free = [0] * owners, 100
    for number, more in asked:
        if number < owners and more <= free and may_hold("owner", held[number], more, free):
            held[number], free = held[number] + more, free - more
    assert free > 0
    assert may_hold("", 99, 1, 1), "a process without owners uses all there is"


def test_who_fills_the_batch_leaves_room_and_time_for_others(llama: Engine) -> None:
    short = {"prompt": ids(30, 1), "max_new_tokens": 6, "trace": True}
    alone = llama.generate(**short, reuse="off")
    with Batcher(llama, max_batch=8, max_prefill_tokens=64) as batcher:
        crowd = [batcher.submit(**endless(n, 500), owner="crowd") for n in range(20)]
        next(iter(crowd[0]))
        for owner in ("one", "two", "one"):
            same(batcher.submit(**short, owner=owner).result(SECONDS), alone)
        assert sum(ticket.done for ticket in crowd) < len(crowd)
        for ticket in crowd:
            ticket.cancel()
        for ticket in crowd:
            ticket.exception(SECONDS)
        nothing_held(batcher)


def test_long_prompts_do_not_take_all_places_before_the_first_token(llama: Engine) -> None:
    short = {"prompt": ids(30, 2), "max_new_tokens": 4}
    with Batcher(llama, max_prefill_tokens=32) as batcher:
        long = [batcher.submit(ids(1800, n), max_new_tokens=1, reuse="off", owner="crowd") for n in range(12)]
        for number in range(3):
            batcher.submit(**short, owner=f"other {number}").result(SECONDS)
        assert not long[-1].done
        for ticket in long:
            ticket.cancel()


def test_a_large_request_is_passed_over_so_often_and_not_for_ever(tokenizer: Any) -> None:
    """However many small ones of another owner keep coming, whose pages it would need."""
    with (
        Engine.from_pretrained((tiny("llama"), tokenizer), step=STEP, max_pages=20 * PAGE * 512) as engine,
        Batcher(engine) as batcher,
    ):

        def small(number: int) -> Ticket:
            return batcher.submit(ids(4, number), max_new_tokens=5, owner="many")

        waiting = [small(number) for number in range(4)]
        large = batcher.submit(ids(150, 1), max_new_tokens=11, owner="large")  # takes all pages
        passed = 0
        while not large.done and passed < 10 * PASSED:
            passed += 1
            waiting.append(small(4 + passed))
            waiting.pop(0).result(SECONDS)
        assert passed <= 2 * PASSED
        large.result(SECONDS)
        for ticket in waiting:
            ticket.result(SECONDS)
        nothing_held(batcher)


def test_one_owner_cannot_fill_the_queue(llama: Engine) -> None:
    with Batcher(llama, max_batch=1, max_queue=8) as batcher:
        crowd = [batcher.submit(**endless(0), owner="crowd")]
        next(iter(crowd[0]))
        with pytest.raises(Overloaded, match="wait"):  # noqa: PT012 (the eighth, at the latest)
            for number in range(8):
                crowd.append(batcher.submit(**endless(number), owner="crowd"))
        crowd.append(batcher.submit(ids(20, 3), max_new_tokens=1, owner="other"))
        for ticket in crowd:
            ticket.cancel()


def test_what_is_computed_beside_a_batch_gives_way_to_it(llama: Engine) -> None:
    """In pieces, and to the same bits."""
    prompt = ids(1500, 77)
    with Batcher(llama, max_prefill_tokens=64) as batcher:
        running = batcher.submit(**endless(5))
        next(iter(running))
        together = llama.generate(prompt, max_new_tokens=4, trace=True, reuse="off")
        running.cancel()
    same(llama.generate(prompt, max_new_tokens=4, trace=True, reuse="off"), together)
    assert llama.pipeline.model.runner.piece is None


def test_equal_prompts_at_once_are_computed_once(llama: Engine) -> None:
    """Seven wait for what the first computes, and compute no more than the end that nobody can share."""
    asked: dict[str, Any] = {"prompt": ids(700, 690), "max_new_tokens": 4, "trace": True}
    alone = llama.generate(**asked, reuse="off")
    with Batcher(llama) as batcher:
        with batcher._changed:  # nobody is let in before all have come
            tickets = [batcher.submit(**asked) for _ in range(8)]
        answers = [ticket.result(SECONDS) for ticket in tickets]
        nothing_held(batcher)
    for answer in answers:
        same(answer, alone)
    computed = sorted(answer.prompt_tokens - answer.cached_tokens for answer in answers)
    assert computed[-1] == 700
    assert computed[-2] < STEP, "less than two blocks"


@pytest.mark.parametrize("family", ["gpt2", "qwen3_5_text"])
def test_equal_prompts_at_once_are_computed_once_through_transformers(tokenizer: Any, family: str) -> None:
    """However long the first one's answer is."""
    model = tiny(family) if family == "gpt2" else hybrid(family)
    with Engine.from_pretrained((model, tokenizer), step=64, attention="model") as engine:
        asked: dict[str, Any] = {"prompt": ids(400, 690), "max_new_tokens": 40, "trace": True}
        alone = engine.generate(**asked, reuse="off")
        with Batcher(engine) as batcher:
            with batcher._changed:
                tickets = [batcher.submit(**asked) for _ in range(4)]
            answers = [ticket.result(SECONDS) for ticket in tickets]
            nothing_held(batcher)
    for answer in answers:
        same(answer, alone)
    assert sorted(answer.cached_tokens for answer in answers)[:2] == [0, 384]


@pytest.fixture(scope="module")
def gpt2(tokenizer: Any) -> Any:
    return tiny("gpt2"), tokenizer


def test_what_is_not_offered_early_is_not_waited_for(gpt2: Any) -> None:
    """A prompt that comes after the first one's token is computed at once."""
    with Engine.from_pretrained(gpt2, step=64, attention="model") as engine, Batcher(engine) as batcher:
        batcher.submit(ids(400, 691), max_new_tokens=2).result(SECONDS)
        assert not batcher._rounds._under_way.storing


def test_blocks_offered_for_those_who_wait_are_not_seen_twice(gpt2: Any) -> None:
    """What only one request has is not admitted by its second use."""
    with Engine.from_pretrained(gpt2, step=64, attention="model", admit="second_use") as engine:
        with Batcher(engine) as batcher, batcher._changed:
            tickets = [batcher.submit([*ids(200, 692), *ids(200, n)], max_new_tokens=4) for n in (693, 694)]
        engine.flush()
        for ticket in tickets:
            ticket.result(SECONDS)
            assert ticket.compiled is not None
            names = engine.pipeline.linked(ticket.compiled).blocks.exact
            assert len(engine.pipeline.archive.lookup(names)) <= 3, "192 tokens that both have"


def test_snapshots_are_counted_once(tokenizer: Any, tmp_path: Path) -> None:
    model = hybrid("qwen3_5_text"), tokenizer
    with Engine.from_pretrained(model, step=64, attention="model", store=tmp_path) as engine:
        with Batcher(engine) as batcher, batcher._changed:
            tickets = [batcher.submit(ids(400, 695), max_new_tokens=8) for _ in range(2)]
        for ticket in tickets:
            ticket.result(SECONDS)
        engine.flush()
        contents = engine.pipeline.archive.contents
        stored = [entry for entry in contents.entries() if entry.kind == "snapshot"]
        assert contents.counters()["snapshots_taken"] == len(stored) > 0
