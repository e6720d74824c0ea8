"""A device without room: requests wait for what others give back, what is kept goes first, and the error is ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.models import tiny
from tests.helpers.prompts import ids

from keepwarm import Batcher, Engine
from keepwarm.core.geometry import KVGeometry
from keepwarm.errors import Overloaded
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.arena.pool import ArenaPool
from keepwarm.runtime.device import PORTS
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
    pool = ArenaPool(geometry, port)
    for arena in [pool.acquire([], 512) for _ in range(2)]:
        pool.release(arena)
    large = pool.acquire([], 1024)
    assert (large.capacity, pool.nbytes) == (1024, 2 * unit)
    with pytest.raises(Overloaded):
        pool.acquire([], 1024)
    assert pool.nbytes == 2 * unit, "what could not be had is not counted"
    pool.release(large)
    assert pool.acquire([], 512) is large


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
