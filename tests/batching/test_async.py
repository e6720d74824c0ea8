"""Requests from an event loop: each answer as alone, and a cancelled task leaves nothing behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.batches import SECONDS, STEP, nothing_held, same
from tests.helpers.models import tiny
from tests.helpers.prompts import ids

from keepwarm import AsyncEngine, Batcher, Engine
from keepwarm.errors import ConfigError, ModelNotFound, Overloaded, PromptTooLong

LONG = {"max_new_tokens": 1200, "temperature": 1.0, "seed": 3}  # still under way when it is looked at


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, SECONDS))


async def idle(engine: AsyncEngine) -> None:
    """Wait until no request is left, and see that none holds anything."""
    while (now := engine.batcher.stats()).waiting + now.prefilling + now.running:
        await asyncio.sleep(0.001)
    await asyncio.to_thread(nothing_held, engine.batcher)


async def first_piece(engine: AsyncEngine, number: int) -> Any:
    """Submit a long request, and return its ticket once it runs."""
    ticket = await engine.submit(ids(40, number), **LONG)
    await anext(aiter(ticket))
    return ticket


def test_requests_at_once_share_a_batch_and_answer_as_alone(llama: Engine) -> None:
    head = ids(96, 1)
    asked = [{"prompt": head + ids(9, n), "max_new_tokens": 6, "trace": True} for n in range(5)]
    alone = [llama.generate(**each, reuse="off") for each in asked]

    async def work() -> None:
        async with AsyncEngine(llama) as engine:
            tickets = [await first_piece(engine, n) for n in range(3)]
            assert engine.batcher.stats().running == 3
            together = await asyncio.gather(*(engine.generate(**each) for each in asked))
            for one, other in zip(together, alone, strict=True):
                same(one, other)
            assert any(one.cached_tokens for one in together)
            for ticket in tickets:
                ticket.cancel()
            await idle(engine)

    run(work())


def test_a_stream_yields_what_generate_returns_and_holds_nothing_up(llama: Engine) -> None:
    async def work() -> None:
        async with AsyncEngine(llama) as engine:
            whole = await engine.generate(ids(30, 2), max_new_tokens=8, trace=True)
            pieces = [piece async for piece in engine.stream(ids(30, 2), max_new_tokens=8, trace=True)]
            assert pieces[-1].result is not None
            same(pieces[-1].result, whole)
            assert "".join(piece.text for piece in pieces) == whole.text
            assert [piece.token_id for piece in pieces[:-1]] == list(whole.token_ids)
            ticket, turns = await engine.submit(ids(30, 2), **LONG), 0
            while not ticket.done and turns < 20:
                turns += 1
                await asyncio.sleep(0)
            assert turns == 20, "the loop runs beside the batch"
            ticket.cancel()

    run(work())


def test_a_cancelled_task_cancels_its_request(llama: Engine) -> None:
    async def work() -> None:
        async with AsyncEngine(llama, max_batch=1) as engine:
            running = asyncio.create_task(engine.generate(ids(40, 4), **LONG))
            while not engine.batcher.stats().running:
                await asyncio.sleep(0.001)
            waiting = asyncio.create_task(engine.generate(ids(40, 5), **LONG))
            while not engine.batcher.stats().waiting:
                await asyncio.sleep(0.001)
            preparing = asyncio.create_task(engine.generate(ids(900, 6), **LONG))
            await asyncio.sleep(0)
            for task in (preparing, waiting, running):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await idle(engine)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await engine.generate(ids(40, 7), **LONG)
            await idle(engine)

    run(work())


def test_leaving_a_stream_cancels_its_request(llama: Engine) -> None:
    async def work() -> None:
        async with AsyncEngine(llama) as engine:
            async with aclosing(engine.stream(ids(40, 8), **LONG)) as pieces:
                async for _ in pieces:
                    break
            await idle(engine)
            async for _ in engine.stream(ids(40, 8), **LONG):
                break
            await idle(engine)

    run(work())


def test_errors_are_the_engines_own(llama: Engine) -> None:
    async def work() -> None:
        with pytest.raises(ConfigError, match="max_batch"):
            AsyncEngine(llama, max_batch=0)
        async with AsyncEngine(llama, max_batch=1, max_queue=1) as engine:
            with pytest.raises(ConfigError, match="temperatur"):
                await engine.generate(ids(5, 1), temperatur=1)  # type: ignore[call-arg]
            with pytest.raises(PromptTooLong):
                await anext(engine.stream(ids(5000, 1)))
            running = await first_piece(engine, 1)
            waiting = await engine.submit(ids(40, 2), **LONG)
            with pytest.raises(Overloaded, match="max_queue"):
                await engine.generate(ids(5, 3))
            for ticket in (waiting, running):
                ticket.cancel()
                with pytest.raises(CancelledError):
                    await ticket
            await idle(engine)

    run(work())


def test_closing_finishes_what_is_under_way_and_refuses_the_rest(llama: Engine) -> None:
    async def work() -> None:
        engine = AsyncEngine(llama)
        with pytest.raises(ConfigError, match="not open"):
            await engine.generate(ids(5, 1))
        await engine.open()
        with pytest.raises(ConfigError, match="opened before"):
            await engine.open()
        ticket = await engine.submit(ids(40, 11), max_new_tokens=100)
        await engine.close()
        assert len((await ticket).token_ids) == 100
        with pytest.raises(ConfigError, match="closed"):
            await engine.generate(ids(5, 1))
        await engine.close()
        tickets: list[Any] = []
        with pytest.raises(KeyError):
            await fail(tickets)
        with pytest.raises(CancelledError):
            await tickets[0]

    async def fail(tickets: list[Any]) -> None:
        async with AsyncEngine(llama) as engine:
            tickets.append(await first_piece(engine, 12))
            raise KeyError

    run(work())
    assert llama.generate(ids(5, 1), max_new_tokens=1).token_ids, "a lent engine stays open"


def test_an_engine_of_its_own_is_loaded_warmed_and_closed(tokenizer: Any, tmp_path: Path) -> None:
    prompt = ids(200, 21)
    model = (tiny("llama"), tokenizer)

    async def work() -> None:
        with pytest.raises(ConfigError, match="rouse"):
            AsyncEngine.from_pretrained(model, rouse="exact")  # type: ignore[call-arg]
        with pytest.raises(ConfigError, match="max_queue"):
            AsyncEngine.from_pretrained(model, max_queue=0)
        missing = AsyncEngine.from_pretrained("/no/such/model")
        with pytest.raises(ModelNotFound):
            await missing.open()
        with pytest.raises(ConfigError, match="closed"):
            await missing.generate("Hi")
        async with AsyncEngine.from_pretrained(model, store=tmp_path, step=STEP, max_pages="2MiB") as engine:
            assert (await engine.warm(prompt, name="head")).tokens == 200
            explained = await engine.explain(prompt + ids(9, 22))
            assert explained.cached_tokens >= 96
            assert await engine.count_tokens(prompt) == 200
            cold = await engine.generate(prompt + ids(9, 22), max_new_tokens=5, trace=True, reuse="off")
            warm = await engine.generate(prompt + ids(9, 22), max_new_tokens=5, trace=True)
            same(warm, cold)
            assert (warm.cached_tokens, warm.exactness) == (explained.cached_tokens, "exact")
            assert (await engine.stats()).requests == 2
            inner = engine.engine
        with pytest.raises(ConfigError, match="closed"):
            inner.generate(prompt)

    run(work())
    with Engine.from_pretrained(model, store=tmp_path, step=STEP) as engine:
        assert engine.explain(prompt + ids(9, 22)).cached_tokens >= 96, "what was computed was written"


def test_who_is_cancelled_while_the_model_loads_leaves_no_engine(tokenizer: Any) -> None:
    made: list[Engine] = []

    def make() -> Engine:
        made.append(Engine.from_pretrained((tiny("llama"), tokenizer), step=STEP))
        return made[0]

    async def work() -> None:
        engine = AsyncEngine(make)
        opening = asyncio.create_task(engine.open())
        await asyncio.sleep(0.01)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await engine.close()
        with pytest.raises(ConfigError, match="closed"):
            made[0].generate(ids(5, 1))

    run(work())


def test_tickets_of_any_batch_can_be_awaited(llama: Engine) -> None:
    async def work(batcher: Batcher) -> None:
        ticket = batcher.submit(ids(30, 31), max_new_tokens=4)
        assert [piece.index async for piece in ticket][:2] == [0, 1]
        assert (await ticket).token_ids == ticket.result().token_ids
        assert [piece async for piece in ticket] == [], "each piece comes once"
        both = batcher.submit(ids(30, 32), max_new_tokens=4)
        assert await asyncio.gather(both, both) == [both.result()] * 2
        earlier = batcher.submit(ids(30, 33), max_new_tokens=1, started=time.perf_counter() - 100)
        assert (await earlier).ttft_ms > 100_000, "its clock started before it waited for a thread"

    with Batcher(llama) as batcher:
        run(work(batcher))
