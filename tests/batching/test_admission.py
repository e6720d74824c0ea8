"""Who is let into a batch, and with what room."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from tests.helpers.batches import SECONDS, STEP, nothing_held, until
from tests.helpers.models import tiny
from tests.helpers.prompts import ids

from keepwarm import Batcher, Engine
from keepwarm.errors import ConfigError, Overloaded, PromptTooLong
from keepwarm.runtime.native.places import PAGE
from keepwarm.runtime.pages import pages_for


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(tokenizer: Any) -> None:
    with (
        Engine.from_pretrained((tiny("llama"), tokenizer), step=STEP, max_pages=20 * PAGE * 512) as engine,
        Batcher(engine) as batcher,
    ):
        assert batcher.pool.capacity == 20
        with pytest.raises(PromptTooLong, match=r"150 tokens and 12 new .* 21 pages of 8 tokens, and there are 20"):
            batcher.submit(ids(150, 1), max_new_tokens=12)
        assert len(batcher.submit(ids(150, 1), max_new_tokens=11).result(SECONDS).token_ids) <= 11
        with pytest.raises(PromptTooLong, match="context window"):
            batcher.submit(ids(150, 1), max_new_tokens=3000)
    with (
        Engine.from_pretrained((tiny("llama"), tokenizer), step=STEP, max_pages=5) as engine,
        pytest.raises(ConfigError, match="one page takes 4096"),
    ):
        Batcher(engine)


def test_a_full_queue_says_so(llama: Engine) -> None:
    with Batcher(llama, max_batch=1, max_queue=2) as batcher:
        with llama.pipeline.model.runner.lock:
            first = batcher.submit(ids(20, 1), max_new_tokens=2)
            until(lambda: batcher.stats().prefilling)
            tickets = [batcher.submit(ids(20, n), max_new_tokens=2) for n in range(2)]
            with pytest.raises(Overloaded, match="2 requests wait and max_queue is 2"):
                batcher.submit(ids(20, 3), max_new_tokens=2)
        for ticket in (first, *tickets):
            ticket.result(SECONDS)


def test_it_waits_for_pages_that_others_hold_and_is_not_overtaken(llama: Engine) -> None:
    with Batcher(llama) as batcher:
        held = batcher.pool.allocate(batcher.pool.counts.available - 8)
        big = batcher.submit(ids(150, 1), max_new_tokens=3)
        small = batcher.submit(ids(20, 2), max_new_tokens=3)
        time.sleep(0.1)
        assert batcher.stats().waiting == 2
        assert not big.done
        assert not small.done
        batcher.pool.release(held)
        big.result(SECONDS)
        small.result(SECONDS)
        nothing_held(batcher)


def test_higher_priority_goes_first_and_equals_in_order(llama: Engine) -> None:
    with Batcher(llama, max_batch=1) as batcher:
        with llama.pipeline.model.runner.lock:
            batcher.submit(ids(20, 1), max_new_tokens=2)
            until(lambda: batcher.stats().prefilling)
            low, one, two, high = (batcher.submit(ids(20, 2), max_new_tokens=2, priority=p) for p in (-1, 0, 0, 5))
        one.result(SECONDS)
        assert high.done
        two.result(SECONDS)
        assert one.done
        low.result(SECONDS)
        assert two.done


def test_low_priority_is_not_starved(llama: Engine) -> None:
    """However many of higher priority keep coming: each admission of another brings it nearer."""
    with Batcher(llama, max_batch=1) as batcher:
        first = batcher.submit(ids(20, 1), max_new_tokens=2, priority=1)
        low = batcher.submit(ids(20, 2), max_new_tokens=2)
        waiting = [first, batcher.submit(ids(20, 3), max_new_tokens=2, priority=1)]
        passed = 0
        while not low.done and passed < 40:
            waiting.append(batcher.submit(ids(20, 4), max_new_tokens=2, priority=1))
            waiting.pop(0).result(SECONDS)
            passed += 1
        low.result(SECONDS)
        assert passed <= 16


def test_a_shared_prefix_takes_its_pages_once(llama: Engine) -> None:
    """16 requests on one prefix: less than 1.2 times the pages of one, beside their own tokens."""
    prefix, count, new = ids(20 * STEP, 500), 16, 40
    with Batcher(llama, max_batch=count) as batcher:
        if batcher.engine.pipeline.model.runner.lean is None:
            pytest.skip("no compiler here")
        tickets = [batcher.submit(prefix + ids(5 + n, n), max_new_tokens=new) for n in range(count)]
        sizes = [ticket.result(SECONDS).prompt_tokens + new for ticket in tickets]
        peak = batcher.stats().peak_pages
        one = pages_for(sizes[0])
        own = sum(pages_for(size - len(prefix)) for size in sizes)
        print(f"{count} requests: {peak} pages at most; one alone {one}, their own tokens {own}")
        assert peak < 1.2 * one + own
        assert peak < count * one / 4


def test_nearly_all_slots_of_pages_in_use_hold_tokens(llama: Engine) -> None:
    chance = random.Random(1)
    heads = [ids(chance.randint(200, 1000), 600 + n) for n in range(3)]
    with Batcher(llama, max_batch=16) as batcher:
        tickets = [
            batcher.submit(
                chance.choice(heads) + ids(chance.randint(100, 300), n), max_new_tokens=chance.randint(10, 60)
            )
            for n in range(32)
        ]
        for ticket in tickets:
            ticket.result(SECONDS)
        used = batcher.stats().slots_used
        print(f"share of slots that hold tokens: {used:.3f}")
        assert used >= 0.96


@pytest.mark.host_memory("only the lean decoder runs prompts in one pass")
@pytest.mark.parametrize("owners", ["a", "ab"])
def test_up_to_four_short_ends_of_one_owner_are_let_in(
    llama: Engine, monkeypatch: pytest.MonkeyPatch, owners: str
) -> None:
    head = ids(96, 810)
    llama.warm(head)
    llama.flush()
    seen: list[tuple[int, set[str]]] = []  # the most that one owner has in prefill, and whose prompts there are
    last_steps = llama.pipeline.loader.last_steps

    def noted(steps: Any) -> torch.Tensor:
        prefilling = [job.owner for job in batcher._rounds._under_way.prefilling]
        waiting = {job.owner for job in batcher._rounds.admission.waiting}
        seen.append((max(map(prefilling.count, prefilling)), waiting.union(prefilling)))
        return last_steps(steps)

    monkeypatch.setattr(llama.pipeline.loader, "last_steps", noted)
    with Batcher(llama) as batcher:
        with batcher._changed:  # nobody is let in before all have come
            tickets = [
                batcher.submit([*head, *ids(9, 820 + n)], max_new_tokens=2, owner=owners[n % len(owners)])
                for n in range(8)
            ]
        found = [ticket.result(SECONDS) for ticket in tickets]
        nothing_held(batcher)
    assert all(each.cached_tokens >= len(head) for each in found)
    if owners == "a":
        assert max(most for most, _ in seen) == 4
    assert all(most <= 2 for most, whose in seen if len(whose) > 1)
