"""A device without room: requests wait for what others give back, what is kept goes first, and the error is ours."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.helpers.models import tiny
from tests.helpers.prompts import ids

from keepwarm import Batcher, Engine
from keepwarm.core.blocks import token_ids
from keepwarm.core.geometry import KVGeometry
from keepwarm.errors import Overloaded, PromptTooLong
from keepwarm.pipeline.shadow import Shadow
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.arena.for_pages import LEAST, bytes_for_pages
from keepwarm.runtime.arena.pool import ArenaPool
from keepwarm.runtime.arena.room import Cap
from keepwarm.runtime.device import PORTS
from keepwarm.runtime.device.host import HostPort
from keepwarm.testing.device import AdversarialPort

SECONDS = 60  # until a test stops waiting
ROOM = {"step": 64, "min_step": 16, "max_pages": "2MiB"}


# through transformers, where others of this file run, and through the lean decoder
@pytest.mark.parametrize("family", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def test_a_batch_queues_what_has_no_arena_yet(tokenizer: Any, family: str) -> None:
    model = tiny(family)
    with Engine.from_pretrained((model, tokenizer), **ROOM) as free:
        cold = [free.generate(ids(100, n), max_new_tokens=8, trace=True, reuse="off") for n in range(5)]
        one = Arena.size(free.pipeline.model.geometry, 512)
    with Engine.from_pretrained((model, tokenizer), max_device=one, **ROOM) as engine, Batcher(engine) as batcher:
        tickets = [batcher.submit(ids(100, n), max_new_tokens=8, trace=True) for n in range(5)]
        for ticket, wanted in zip(tickets, cold, strict=True):
            assert ticket.result(SECONDS).logits_digest == wanted.logits_digest
        engine.flush()  # pages go once what they hold of answers is stored
        assert batcher.stats().pages.referenced == batcher.stats().pages.reserved == 0
        assert engine.pipeline.pool.lent == 0


def test_a_batch_waits_for_a_request_outside_of_it(tokenizer: Any) -> None:
    model = tiny("gpt2")
    with Engine.from_pretrained((model, tokenizer), **ROOM) as free:
        one = Arena.size(free.pipeline.model.geometry, 512)
    with Engine.from_pretrained((model, tokenizer), max_device=one, **ROOM) as engine, Batcher(engine) as batcher:
        outside = engine.stream(ids(50, 1), max_new_tokens=4)
        next(outside)
        ticket = batcher.submit(ids(50, 2), max_new_tokens=4)
        with pytest.raises(TimeoutError):
            ticket.result(0.2)
        list(outside)
        assert len(ticket.result(SECONDS).token_ids) == 4


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> AdversarialPort:
    """The device of every engine that is made."""
    made = AdversarialPort()
    monkeypatch.setitem(PORTS, "cpu", lambda device: made)
    return made


def test_what_nobody_gives_back_is_not_waited_for(tokenizer: Any, port: AdversarialPort) -> None:
    with Engine.from_pretrained((tiny("gpt2"), tokenizer), **ROOM) as engine, Batcher(engine) as batcher:
        engine.pipeline.pool.close()
        port.room = 0
        with pytest.raises(Overloaded, match="cpu has no memory left for .* bytes of KV"):
            batcher.submit(ids(50, 1), max_new_tokens=2).result(SECONDS)
        port.room = None
        assert len(batcher.submit(ids(50, 1), max_new_tokens=2).result(SECONDS).token_ids) == 2


def test_what_is_kept_for_later_goes_when_the_device_is_full() -> None:
    """Others use it, too: `max_device` alone does not say what is free."""
    geometry = KVGeometry.uniform(2, 2, 4, "float32")
    unit = Arena.size(geometry, 512)
    port = AdversarialPort(room=3 * unit)
    pool = ArenaPool(geometry, port, cap=8 * unit)
    for arena in [pool.acquire([], 512) for _ in range(2)]:
        pool.release(arena)
    large = pool.acquire([], 1024)
    assert (large.capacity, pool.nbytes) == (1024, 2 * unit)
    numbers = f"{unit} bytes are free.*1 running requests and what is kept take {2 * unit} bytes; max_device is"
    with pytest.raises(Overloaded, match=numbers):
        pool.acquire([], 1024)
    assert (pool.nbytes, pool.lent) == (2 * unit, 1), "what could not be had is not counted"
    pool.release(large)
    assert pool.acquire([], 512) is large


def test_by_default_arenas_have_a_share_of_what_is_free(tokenizer: Any, port: AdversarialPort) -> None:
    """What the engine's own first arena takes is theirs, too, and the context window does not matter."""
    port.room = 2 << 20
    with Engine.from_pretrained((tiny("gpt2"), tokenizer), **ROOM) as engine:
        pool = engine.pipeline.pool
        assert 1 << 20 < pool.cap <= (2 << 20) * 3 // 4, "loading may have left something"
        assert engine.generate(ids(pool.room - 1, 1), max_new_tokens=1).token_ids
        with pytest.raises(PromptTooLong, match=f"max_device is {pool.cap}, by default 75% of what was free on cpu"):
            engine.generate(ids(1600, 1), max_new_tokens=1)
        engine.flush()  # so that nobody reads it
        cap = pool.cap
        assert pool.nbytes > cap // 3, "it holds the first answer"
        _, given = bytes_for_pages(pool, None, 1 << 40, 0)
        assert cap // 2 <= given <= cap * 2 // 3
        assert pool.cap == cap - given
        assert pool.nbytes == 0, "what was idle made way"
        with pytest.raises(
            PromptTooLong, match=f"max_device is {pool.cap}, by default .*, and a batch has {given} of it"
        ):
            engine.generate(ids(1600, 1), max_new_tokens=1)
        pool.caps.returned.append(given)
        assert (pool.cap, bytes_for_pages(pool, None, 100, 0)) == (cap, (100, 100))
        pool.caps.returned.append(100)
        assert pool.caps.part(cap // 2) == cap - cap // 2, "a prompt of the whole window fits beside the pages"
        assert pool.caps.part(cap) == cap // 2
        assert bytes_for_pages(pool, cap // 4, 1 << 40, 0) == (cap // 4, cap // 4), (
            "what is asked for is less for arenas"
        )
        assert pool.cap == cap - cap // 4
    with Engine.from_pretrained((tiny("gpt2"), tokenizer), max_device="3MiB", **ROOM) as engine:
        assert engine.pipeline.pool.cap == 3 << 20
        assert bytes_for_pages(engine.pipeline.pool, None, 1 << 40, 0) == (LEAST, 0), "nothing is left"
        port.room = 8 << 20
        left, given = bytes_for_pages(engine.pipeline.pool, None, 1 << 40, 0)
        assert (given, left) == (0, LEAST)
        port.room = 4 << 30
        left, given = bytes_for_pages(engine.pipeline.pool, None, 1 << 40, 0)
        assert (given, (5 << 29) < left < (3 << 30)) == (0, True), "three quarters in all"
        assert bytes_for_pages(engine.pipeline.pool, None, 1000, 0) == (1000, 0)


def test_the_device_that_has_least_for_its_layers_decides() -> None:
    geometry = KVGeometry.uniform(4, 2, 4, "float32")
    large, small = AdversarialPort(room=1000), AdversarialPort(room=200)
    assert Cap.of(None, geometry, [large, large, small, small], 0).nbytes == 300
    assert Cap.of(None, geometry, [large, large, large, small], 0).nbytes == 600
    assert Cap.of(None, geometry, [large, large, large, HostPort()], 0).nbytes == 1000
    assert Cap.of(None, geometry, [HostPort()] * 4, 5 << 30).nbytes == 5 << 30


@pytest.mark.parametrize("limit", ["max_device", "device"])
def test_requests_wait_for_running_ones_in_their_order(limit: str, tokenizer: Any, port: AdversarialPort) -> None:
    """With room for one arena, under `max_device` or on the device. The answers are those of an engine with room."""
    model, prompts = tiny("gpt2"), [ids(100, n) for n in range(4)]
    with Engine.from_pretrained((model, tokenizer), **ROOM) as free:
        cold = [free.generate(prompt, max_new_tokens=4, trace=True, reuse="off") for prompt in prompts]
        one = Arena.size(free.pipeline.model.geometry, 512)
    cap = {"max_device": one} if limit == "max_device" else {"max_device": 64 * one}
    with Engine.from_pretrained((model, tokenizer), device_timeout=SECONDS, **cap, **ROOM) as engine:
        engine.pipeline.pool.evict()
        port.room = None if limit == "max_device" else one + one // 2
        running = engine.stream(prompts[0], max_new_tokens=4, trace=True)
        next(running)
        with ThreadPoolExecutor(3) as threads:
            asked = [threads.submit(engine.generate, each, max_new_tokens=4, trace=True) for each in prompts[1:]]
            with pytest.raises(Overloaded, match="1 running requests"):
                engine.generate(prompts[1], max_new_tokens=1)  # nobody but this thread could give anything back
            assert not any(each.done() for each in asked)
            *_, last = running
            found = [last.result, *(each.result(SECONDS) for each in asked)]
        assert [each.logits_digest for each in found] == [each.logits_digest for each in cold]
        assert engine.pipeline.pool.lent == 0


def test_who_waited_long_enough_is_refused_by_numbers(tokenizer: Any) -> None:
    model = tiny("gpt2")
    with Engine.from_pretrained((model, tokenizer), **ROOM) as free:
        one = Arena.size(free.pipeline.model.geometry, 512)
    with Engine.from_pretrained((model, tokenizer), max_device=one, device_timeout=0.1, **ROOM) as engine:
        running = engine.stream(ids(50, 1), max_new_tokens=4)
        next(running)
        with ThreadPoolExecutor(1) as thread:
            refused = thread.submit(engine.generate, ids(50, 2), max_new_tokens=1)
            with pytest.raises(Overloaded, match=f"{one} bytes of KV are wanted.* 0 are free beside 1 running"):
                refused.result(SECONDS)
        running.close()
        assert engine.generate(ids(50, 2), max_new_tokens=1).token_ids


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def full() -> ArenaPool:
    """A pool with room for one arena."""
    geometry = KVGeometry.uniform(2, 2, 4, "float32")
    return ArenaPool(geometry, HostPort(), cap=Arena.size(geometry, 512))


def waiting(pool: ArenaPool) -> Callable[[], bool]:
    """Whether somebody waits for what others hold."""

    def is_so() -> bool:
        try:
            pool.make_way()
        except Overloaded:
            return True
        return False

    return is_so


def test_who_asks_again_at_once_comes_after_who_waits(full: ArenaPool) -> None:
    order, mine = [], full.acquire(None, 512)

    def other() -> None:
        arena = full.acquire(None, 512, wait=SECONDS)
        order.append("other")
        full.release(arena)

    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(other)
        until(waiting(full))
        with full._changed:  # so that the other cannot be quicker
            full.release(mine)
            mine = full.acquire(None, 512, wait=SECONDS)
        order.append("mine")
        full.release(mine)
        done.result(SECONDS)
    assert order == ["other", "mine"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, also in a worker of pytest-xdist, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform == "win32", reason="no signal is sent to a thread there")
@pytest.mark.usefixtures("interruptible")
def test_who_is_interrupted_in_the_line_leaves_it(full: ArenaPool) -> None:
    with ThreadPoolExecutor(1) as holder, ThreadPoolExecutor(1) as waiter:
        arena = holder.submit(full.acquire, None, 512).result(SECONDS)
        first = waiter.submit(full.acquire, None, 512, wait=SECONDS)
        until(waiting(full))
        alarm = threading.Timer(0.1, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])

        def interrupted() -> None:
            alarm.start()
            full.acquire(None, 512, wait=SECONDS)

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert len(full._line) == 1
        full.release(arena)
        full.release(first.result(SECONDS))
    assert len(full._line) == full.lent == 0


def test_memory_that_is_freed_later_than_its_arena_came_back_is_noticed() -> None:
    geometry = KVGeometry.uniform(2, 2, 4, "float32")
    pool = ArenaPool(geometry, HostPort(), cap=2 * Arena.size(geometry, 512))
    with ThreadPoolExecutor(1) as holder, ThreadPoolExecutor(1) as waiter:
        other = holder.submit(pool.acquire, None, 512).result(SECONDS)
        mine = pool.acquire(None, 512)
        asked = waiter.submit(pool.acquire, None, 512, wait=SECONDS)
        until(waiting(pool))
        mine.arrivals.lost = True  # nobody uses it again
        pool.release(mine)
        time.sleep(0.05)
        del mine
        gc.collect()
        pool.release(asked.result(SECONDS / 2))
        pool.release(other)


def test_idle_work_gives_its_arena_to_a_request(tokenizer: Any) -> None:
    """It pauses while a request runs, so the request would wait for what waits for it."""
    model = tiny("gpt2")
    with Engine.from_pretrained((model, tokenizer), **ROOM) as free:
        cold = free.generate(ids(100, 2), max_new_tokens=4, trace=True, reuse="off")
        one = Arena.size(free.pipeline.model.geometry, 512)
    more: dict[str, Any] = {"max_device": one, "device_timeout": SECONDS, "shadow": 1.0}
    with Engine.from_pretrained((model, tokenizer), **more, **ROOM) as engine, ThreadPoolExecutor(1) as thread:
        chunks, runner = engine.pipeline.chunks, engine.pipeline.model.runner
        with runner.lock:  # idle work has its arena, and is about to run a step
            chunks._sample(Shadow(token_ids(ids(100, 1)), (1, 2), torch.zeros(runner.vocabulary)))
            until(lambda: engine.pipeline.pool.lent == 1)
            asked = thread.submit(engine.generate, ids(100, 2), max_new_tokens=4, trace=True)
            until(waiting(engine.pipeline.pool))
        assert asked.result(SECONDS / 2).logits_digest == cold.logits_digest
        assert chunks.stats()["failed"] == 1


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batch"])
def test_what_is_kept_makes_way_for_a_step_without_memory(tokenizer: Any, *, batched: bool) -> None:
    model, prompt = tiny("gpt2"), ids(120, 3)
    with Engine.from_pretrained((model, tokenizer), **ROOM) as engine, Batcher(engine) as batcher:
        cold = engine.generate(prompt, max_new_tokens=3, trace=True, reuse="off")
        streams = [engine.stream(ids(30, n), max_new_tokens=2) for n in range(2)]
        for _ in zip(*streams, strict=True):  # side by side, each in an arena of its own
            pass
        engine.flush()
        engine.pipeline.pool.forget()
        pool, failed = engine.pipeline.pool, []

        def fail(*_: Any) -> None:
            if pool.nbytes > Arena.size(pool.geometry, 2048):  # the first arena has a whole context window
                failed.append(pool.nbytes)
                raise torch.OutOfMemoryError("out of memory")

        model.transformer.h[1].register_forward_pre_hook(fail)
        if batched:
            found = batcher.submit(prompt, max_new_tokens=3, trace=True).result(SECONDS)
        else:
            found = engine.generate(prompt, max_new_tokens=3, trace=True)
        assert len(failed) == 1
        assert found.logits_digest == cold.logits_digest


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("MPS backend out of memory (MPS allocated: 9.04 GiB). Tried to allocate 1.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
    ids=["cuda", "mps", "cpu"],
)
def test_a_step_without_memory_is_our_error_and_the_engine_goes_on(tokenizer: Any, error: RuntimeError) -> None:
    model = tiny("gpt2")
    prompt = ids(120, 3)
    with Engine.from_pretrained((model, tokenizer), **ROOM) as engine:
        handle = model.transformer.h[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(error))
        with pytest.raises(Overloaded, match="has no memory left for a step") as found:
            engine.generate(prompt, max_new_tokens=3)
        assert found.value.__cause__ is error
        handle.remove()
        cold = engine.generate(prompt, max_new_tokens=3, trace=True, reuse="off")
        assert engine.generate(prompt, max_new_tokens=3, trace=True).logits_digest == cold.logits_digest


def test_other_errors_of_a_step_stay_what_they_are(tokenizer: Any) -> None:
    model = tiny("gpt2")
    with Engine.from_pretrained((model, tokenizer), **ROOM) as engine:
        wrong = RuntimeError("shapes do not match")
        model.transformer.h[0].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(wrong))
        with pytest.raises(RuntimeError, match="shapes do not match"):
            engine.generate(ids(20, 1), max_new_tokens=1)
