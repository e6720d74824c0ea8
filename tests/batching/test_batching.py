"""Many requests at once: each answer as alone, and nothing left behind."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.batches import SECONDS, STEP, nothing_held, same, until
from tests.helpers.every_model import make
from tests.helpers.models import tiny
from tests.helpers.prompts import ids

from keepwarm import Batcher, Engine, Generation
from keepwarm.batching import rounds
from keepwarm.core.schedule import next_part
from keepwarm.errors import ConfigError, PromptError
from keepwarm.pipeline.prefix_loader import PrefixLoader
from keepwarm.runtime.native.places import PAGE
from keepwarm.runtime.pages import pages_for

BROKEN = {"temperature": 1e-45, "seed": 1}  # logits overflow: the sampler fails after the prompt was computed


@pytest.fixture(scope="module", params=["llama-float32", "qwen3-bfloat16", "gpt2-float32"])
def engine(request: pytest.FixtureRequest, tokenizer: Any) -> Iterator[Engine]:
    """Two that decode from pages, and one that runs through transformers and takes turns."""
    family, _, dtype = request.param.partition("-")
    model = tiny(family, getattr(torch, dtype))
    with Engine.from_pretrained((model, tokenizer), step=STEP, min_step=4, max_pages="2MiB") as engine:
        yield engine


def conversations(count: int, seed: int) -> list[list[int]]:
    """Prompts that share a system prompt, some of them tools, some of them a conversation too."""
    chance = random.Random(seed)
    system, tools = ids(100, seed), [ids(70, seed + 1), ids(33, seed + 2)]
    talks = [ids(50, seed + 3), ids(16, seed + 4)]
    made = []
    for number in range(count):
        prompt = list(system)
        if chance.random() < 0.8:
            prompt += chance.choice(tools)
            if chance.random() < 0.6:
                prompt += chance.choice(talks)
        made.append(
            prompt + ids(chance.randint(1, 60), seed + 10 + number) if chance.random() < 0.9 else ids(5, number)
        )
    return made


def requests(count: int, seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    choices: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": seed},
        {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "seed": seed + 1},
        {"repetition_penalty": 1.3},
        {"stop": [" ", "e"]},
        {"temperature": 1.1, "seed": 3, "stop": "a"},
        {"reuse": "off"},
        {"reuse": "prefix"},
    ]
    return [
        {"prompt": prompt, "max_new_tokens": chance.randint(1, 14), "trace": True, **chance.choice(choices)}
        for prompt in conversations(count, seed)
    ]


@pytest.mark.host_memory("only the lean decoder runs prompts in one pass")
@pytest.mark.parametrize(
    "length", [pytest.param(96, marks=pytest.mark.slow), 91, pytest.param(500, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("settings", [{}, {"kv_codec": "int8", "kv_in_memory": "encoded"}], ids=["plain", "encoded"])
def test_short_ends_of_prompts_are_computed_in_one_pass(
    length: int, settings: dict[str, Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the weights once for all of them, and each answer is what it is alone. Also beside others' prompts, and
    where the beginning ends inside a page."""
    head, groups = ids(length, 700), []
    asked: list[dict[str, Any]] = [
        {"prompt": head + ids(count, 701 + count), "max_new_tokens": 5, "trace": True} for count in (20, 25, 19, 40)
    ]
    asked[1] |= {"max_new_tokens": 1}
    asked[2] |= {"temperature": 0.9, "seed": 5}
    last_steps = PrefixLoader.last_steps
    monkeypatch.setattr(
        PrefixLoader, "last_steps", lambda loader, steps: groups.append(len(steps)) or last_steps(loader, steps)
    )
    reuse = "prefix" if settings else "exact"

    def answers() -> list[Generation]:
        with Engine.from_pretrained((tiny("llama"), tokenizer), reuse=reuse, max_pages="2MiB", **settings) as engine:
            engine.warm(head)
            with Batcher(engine) as batcher:
                with batcher._changed:  # nobody is let in before all have come
                    tickets = [batcher.submit(**each, owner="ab"[n % 2]) for n, each in enumerate(asked)]
                found = [ticket.result(SECONDS) for ticket in tickets]
                nothing_held(batcher)
            return found

    together = answers()
    assert groups  # which ones depends on how quick the first were
    groups.clear()
    monkeypatch.setattr(rounds, "TOGETHER", 0)
    for one, alone in zip(together, answers(), strict=True):
        assert one.cached_tokens >= len(head) - PAGE
        same(one, alone)
    assert not groups


def test_prompts_of_a_pass_that_fails_are_computed_alone(llama: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    head = ids(96, 720)
    llama.warm(head)

    def fails(steps: Any) -> torch.Tensor:
        raise MemoryError("no memory for so many rows")

    monkeypatch.setattr(llama.pipeline.loader, "last_steps", fails)
    asked = [{"prompt": head + ids(20, 721 + each), "max_new_tokens": 3, "trace": True} for each in range(4)]
    with Batcher(llama) as batcher:
        with batcher._changed:
            tickets = [batcher.submit(**each) for each in asked]
        for request, ticket in zip(asked, tickets, strict=True):
            same(ticket.result(SECONDS), llama.generate(**request | {"reuse": "off"}))
        nothing_held(batcher)


@pytest.mark.parametrize("seed", [100, pytest.param(200, marks=pytest.mark.slow)])
def test_answers_are_those_of_requests_alone(engine: Engine, seed: int) -> None:
    """Mixed lengths, parameters and nested prefixes; half of them join while others run."""
    asked = requests(16, seed)
    with Batcher(engine, max_batch=8, max_prefill_tokens=20) as batcher:
        tickets = [batcher.submit(**request) for request in asked[:8]]
        next(iter(tickets[0]))
        tickets += [batcher.submit(**request) for request in asked[8:]]
        answers = [ticket.result(SECONDS) for ticket in tickets]
        nothing_held(batcher)
    for request, answer in zip(asked, answers, strict=True):
        if request.get("reuse") == "prefix":  # what it found depends on who came before
            continue
        assert answer.exactness == "exact"
        same(answer, engine.generate(**{**request, "reuse": "off"}))


@pytest.mark.host_memory("exact at any token is the lean decoder's")
def test_a_second_time_all_but_the_last_token_is_found(llama: Engine) -> None:
    asked = [{"prompt": p, "max_new_tokens": 4, "trace": True} for p in conversations(10, 300)]
    alone = [llama.generate(**request, reuse="off") for request in asked]
    with Batcher(llama) as batcher:
        for _ in range(2):
            answers = [ticket.result(SECONDS) for ticket in [batcher.submit(**request) for request in asked]]
            for answer, cold in zip(answers, alone, strict=True):
                same(answer, cold)
            llama.flush()
        assert all(a.cached_tokens == a.prompt_tokens - 1 for a in answers)


def test_what_computing_takes_is_measured_in_a_batch_too(tokenizer: Any) -> None:
    with Engine.from_pretrained((tiny("llama"), tokenizer), step=256) as engine, Batcher(engine) as batcher:
        assert engine.pipeline.costs.compute_ms(1) is None
        batcher.submit(ids(200, 1), max_new_tokens=2).result(60)
        assert engine.pipeline.costs.compute_ms(1)


def test_pieces_are_those_of_a_stream(llama: Engine) -> None:
    request = {"prompt": ids(60, 1), "max_new_tokens": 9, "temperature": 1.0, "seed": 5}
    with Batcher(llama) as batcher:
        pieces = list(batcher.submit(**request))
        ticket = batcher.submit(**request)
        assert [p.result is None for p in ticket] == [True] * (len(pieces) - 1) + [False]
        assert list(ticket) == [], "pieces are given out once"
        assert ticket.done
        assert not ticket.cancel()
    streamed = list(llama.stream(**request))
    assert [(p.text, p.token_id, p.index) for p in pieces] == [(p.text, p.token_id, p.index) for p in streamed]
    result = pieces[-1].result
    assert result is not None
    assert 0 < result.ttft_ms <= result.total_ms
    assert set(result.timings) == {"compile", "constrain", "queue", "link", "load", "prefill", "decode"}
    assert sum(result.timings.values()) <= result.total_ms + 1


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_whatever_happens_nothing_stays_held(engine: Engine, seed: int) -> None:
    """Requests join, end, fail and are cancelled at random; memory is short, so that they also wait for pages."""
    chance = random.Random(seed)
    with Batcher(engine, max_batch=5, max_queue=40, max_prefill_tokens=16) as batcher:
        held = batcher.pool.allocate(batcher.pool.counts.available - 40)
        tickets = []
        for request in requests(30, seed):
            fails = chance.random() < 0.2
            tickets.append((fails, batcher.submit(**(request | BROKEN if fails else request))))
            if chance.random() < 0.5:
                time.sleep(chance.random() * 0.01)
            if chance.random() < 0.3:
                chance.choice(tickets)[1].cancel()
            if chance.random() < 0.1:
                batcher.pool.forget_all()
        for fails, ticket in tickets:
            error = ticket.exception(SECONDS)
            if isinstance(error, CancelledError):
                assert ticket.cancelled
            else:
                assert isinstance(error, RuntimeError) if fails else error is None
        engine.flush()
        counts = batcher.stats().pages
        assert (counts.referenced, counts.reserved) == (len(held), 0)
        batcher.pool.release(held)
        nothing_held(batcher)
        prompt = {"prompt": ids(30, 1), "max_new_tokens": 5, "trace": True}
        same(batcher.submit(**prompt).result(SECONDS), engine.generate(**prompt, reuse="off"))


def test_a_failure_after_prefill_ends_one_request_alone(llama: Engine) -> None:
    good = {"prompt": ids(100, 2), "max_new_tokens": 12, "trace": True}
    with Batcher(llama) as batcher:
        fine = batcher.submit(**good)
        broken = batcher.submit(ids(100, 2), max_new_tokens=5, **BROKEN)
        with pytest.raises(RuntimeError, match="probability"):
            broken.result(SECONDS)
        with pytest.raises(RuntimeError, match="probability"):
            list(broken)
        same(fine.result(SECONDS), llama.generate(**good))
        nothing_held(batcher)


def test_cancelling_in_the_queue_in_prefill_and_while_running(llama: Engine) -> None:
    with Batcher(llama, max_batch=2, max_prefill_tokens=STEP) as batcher:
        prompt = ids(300, 400)
        with llama.pipeline.model.runner.lock:  # the worker cannot run a step
            prefilling = batcher.submit(prompt, max_new_tokens=3)
            other = batcher.submit(ids(20, 5), max_new_tokens=300)
            queued = batcher.submit(ids(20, 6), max_new_tokens=3)
            until(lambda: batcher.stats().prefilling)
            assert batcher.stats().pages.reserved >= pages_for(302)
            assert prefilling.cancel()
            assert queued.cancel()
        for ticket in (prefilling, queued):
            with pytest.raises(CancelledError):
                ticket.result(SECONDS)
        pieces = iter(other)
        next(pieces)
        assert other.cancel()
        with pytest.raises(CancelledError):
            list(pieces)
        nothing_held(batcher)
    first = next_part(len(prompt), STEP)  # it was cancelled in this step or the next one
    assert llama.generate(prompt, max_new_tokens=1).cached_tokens >= first, "what it had computed is kept"


@pytest.mark.host_memory("only the lean decoder cuts a step between rows")
def test_a_long_prompt_does_not_stall_the_others(llama: Engine) -> None:
    with Batcher(llama, max_prefill_tokens=16) as batcher:
        running = batcher.submit(ids(20, 7), max_new_tokens=400)
        pieces = iter(running)
        next(pieces)
        long = batcher.submit(ids(1000, 8), max_new_tokens=1)
        short = batcher.submit(ids(40, 9), max_new_tokens=1)
        short.result(SECONDS)
        assert not long.done, "a short prompt goes by turns with a long one"
        waited = long.result(SECONDS).timings["prefill"]
        running.cancel()
        seen = sum(1 for _ in _quiet(pieces))
        assert seen >= 1000 // 16 // 2, f"{seen} tokens in {waited:.0f} ms"


def _quiet(pieces: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from pieces
    except CancelledError:
        return


def test_uncached_models_take_turns(tokenizer: Any) -> None:
    with Engine.from_pretrained((make("recurrent_gemma"), tokenizer)) as engine:
        asked = [{"prompt": ids(20 + n, n, 100), "max_new_tokens": 4 + n, "trace": True} for n in range(3)]
        with Batcher(engine) as batcher:
            answers = [t.result(SECONDS) for t in [batcher.submit(**request) for request in asked]]
        for request, answer in zip(asked, answers, strict=True):
            assert "lies in its modules" in answer.uncached_reason
            same(answer, engine.generate(**request))


def test_closing_finishes_or_cancels(llama: Engine) -> None:
    batcher = Batcher(llama, max_batch=2)
    tickets = [batcher.submit(ids(20, n), max_new_tokens=5) for n in range(5)]
    batcher.close()
    batcher.close()
    assert all(ticket.done and ticket.result().token_ids for ticket in tickets)
    with pytest.raises(ConfigError, match="closed"):
        batcher.submit(ids(20, 1))
    batcher = Batcher(llama, max_batch=2)
    tickets = [batcher.submit(ids(20, n), max_new_tokens=500) for n in range(5)]
    batcher.close(cancel=True)
    for ticket in tickets:
        with pytest.raises(CancelledError):
            ticket.result()
    nothing_held(batcher)
    tickets.clear()

    def leave_early() -> None:
        with Batcher(llama) as batcher:
            tickets.append(batcher.submit(ids(20, 1), max_new_tokens=500))
            raise KeyError

    with pytest.raises(KeyError):
        leave_early()
    assert isinstance(tickets[0].exception(), CancelledError)


def test_bad_requests_and_settings_are_refused_at_once(llama: Engine) -> None:
    with Batcher(llama) as batcher:
        with pytest.raises(ConfigError, match="temperatur"):
            batcher.submit("x", temperatur=1)  # type: ignore[call-arg]
        with pytest.raises(PromptError):
            batcher.submit([])
    for name in ("max_batch", "max_queue", "max_prefill_tokens"):
        with pytest.raises(ConfigError, match=name):
            Batcher(llama, **{name: 0})


def test_many_threads_may_submit(llama: Engine) -> None:
    asked = [{"prompt": p, "max_new_tokens": 5, "trace": True} for p in conversations(12, 700)]
    answers: dict[int, Generation] = {}
    with Batcher(llama) as batcher:

        def ask(number: int) -> None:
            answers[number] = batcher.submit(**asked[number]).result(SECONDS)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(asked))]
        for thread in threads:
            thread.start()
        for number in range(0, len(asked), 3):  # and the engine is used beside it
            llama.generate(**asked[number])
        for thread in threads:
            thread.join(SECONDS)
    for number, request in enumerate(asked):
        same(answers[number], llama.generate(**request, reuse="off"))


@pytest.mark.slow
@pytest.mark.host_memory("it shares what the lean decoder reads together")
def test_the_real_model_answers_in_a_batch_as_alone(demo_folder: Path) -> None:
    system = "You are the clerk of a harbour. " + " ".join(f"Pier {n} takes boats up to {n} metres." for n in range(40))
    questions = ["Name a pier.", "Where can a boat of 20 metres go?", "Write one line about the sea.", "Count to five."]
    asked: list[dict[str, Any]] = [
        {
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
            "max_new_tokens": 6 + number,
            "trace": True,
            **({"temperature": 0.7, "seed": number} if number % 2 else {}),
        }
        for number, question in enumerate(questions)
    ]
    with (
        Engine.from_pretrained(demo_folder, dtype="float32") as engine,
        Batcher(engine, max_prefill_tokens=128) as batcher,
    ):
        answers = [ticket.result(SECONDS) for ticket in [batcher.submit(**request) for request in asked]]
        assert all(answer.cached_tokens > 400 for answer in answers[1:]), "the first computes it for all"
        for request, answer in zip(asked, answers, strict=True):
            same(answer, engine.generate(**request, reuse="off"))
