"""Arenas on a device: whole runs come and go in one copy, and what an arena in use holds is copied there."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from keepwarm.core.blocks import token_ids
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.memory import OWN_PAGES, own_bytes
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.arena.held import Held, KVCopy
from keepwarm.runtime.arena.pool import ArenaPool
from keepwarm.runtime.arena.room import KEPT_THERE
from keepwarm.store.runfile.giving import give
from keepwarm.testing.device import AdversarialPort
from keepwarm.testing.kv import MemoryKV, blocks_of, make_run, prompt

EVEN = KVGeometry.uniform(3, 2, 8, "float32")
KEYS_WIDER = replace(EVEN, layers=tuple(replace(layer, value_dim=4) for layer in EVEN.layers))
TOKENS = 96


@pytest.fixture
def port() -> Any:
    made = AdversarialPort()
    yield made
    assert made.faults == []


def held(names: str) -> Held:
    """64 tokens for each letter."""
    return Held(b"root", {}, token_ids([ord(name) for name in names for _ in range(64)]))


def filled(arena: Arena, kv: MemoryKV, length: int) -> None:
    """Write as steps do, from the calling thread's stream."""
    arena.seek(0)
    for number, layer in enumerate(arena.layers):
        for which in (0, 1):
            rows = torch.from_numpy(kv.read(number, which, 0, length).copy()).view(torch.float32)
            layer.plane(which).put(0, rows)
    arena.advance(length)


@pytest.mark.parametrize("geometry", [EVEN, KEYS_WIDER], ids=["even", "keys_wider"])
def test_a_copy_for_the_store_has_the_bytes(geometry: KVGeometry, port: AdversarialPort) -> None:
    kv = MemoryKV.random(geometry, TOKENS)
    arena = Arena(geometry, 128, port)
    filled(arena, kv, TOKENS)
    copied = arena.copy_of(7, 61)
    filled(arena, MemoryKV.random(geometry, TOKENS), TOKENS)
    assert isinstance(copied, KVCopy)
    for layer in range(len(geometry.layers)):
        for which in (0, 1):
            found = copied.read(layer, which, 9, 50)
            assert np.array_equal(found, kv.read(layer, which, 9, 50))


@pytest.mark.parametrize("registered", [False, True])
def test_a_run_in_ram_arrives(port: AdversarialPort, registered: bool) -> None:
    """If its memory is registered, the copies of all layers are queued at once; otherwise each layer's when it is
    used."""
    geometry = KVGeometry.uniform(2, 2, 64, "float32")
    tokens = OWN_PAGES // geometry.bytes_per_token + 64
    kv = MemoryKV.random(geometry, tokens)
    run = make_run(kv, blocks_of(prompt(tokens), 16))
    run = replace(run, data=_own(run.data))
    if registered:
        port.register(run.data)
    arena = Arena(geometry, tokens, port)
    give(run, run.blocks, tokens - 5, arena)
    assert arena.is_late != registered
    arena.seek(tokens - 5)
    for layer in range(len(geometry.layers)):
        arena.layers[layer].materialize()
        for which in (0, 1):
            found = arena.read(layer, which, 0, tokens - 5)
            assert np.array_equal(found, kv.read(layer, which, 0, tokens - 5))
    assert arena.waited > 0
    arena.seek(0)
    assert arena.waited == 0


def _own(data: Any) -> Any:
    copied = own_bytes(data.nbytes)
    copied[:] = data
    return copied


def test_many_idle_arenas_are_kept(port: AdversarialPort) -> None:
    pool = ArenaPool(EVEN, port)
    names = [chr(ord("a") + number) for number in range(4)]
    for name in names:
        arena = pool.acquire(held(name), 64)
        arena.hold(held(name))
        pool.release(arena)
    assert [pool.peek(held(name)) for name in names] == [64] * 4
    lent = [pool.acquire(None, 64) for _ in range(KEPT_THERE + 3)]
    for arena in lent:
        pool.release(arena)
    assert pool.nbytes == KEPT_THERE * Arena.size(EVEN, 512)


def test_a_common_header_is_no_reason_to_empty_an_arena(port: AdversarialPort) -> None:
    pool = ArenaPool(EVEN, port)
    one, other = (Held(b"root", {}, token_ids([*[1] * 20, *[number] * 100])) for number in (2, 3))
    for each in (one, other):
        arena = pool.acquire(each, 128)
        arena.hold(each)
        pool.release(arena)
    assert (pool.peek(one), pool.peek(other)) == (120, 120)


def test_idle_arenas_are_emptied_where_there_is_no_room(port: AdversarialPort) -> None:
    pool = ArenaPool(EVEN, port, cap=2 * Arena.size(EVEN, 512))
    for name in "abc":
        arena = pool.acquire(held(name), 64)
        arena.hold(held(name))
        pool.release(arena)
    assert [pool.peek(held(name)) for name in "abc"].count(64) == 2
    assert pool.nbytes <= pool.cap


def test_what_an_arena_in_use_holds_is_copied_and_its_owner_waits(port: AdversarialPort) -> None:
    pool, kv = ArenaPool(EVEN, port), MemoryKV.random(EVEN, 128)
    first = pool.acquire(None, 200)
    filled(first, kv, 128)
    first.hold(held("ab"))
    pool.release(first)
    assert pool.acquire(held("ab"), 200) is first
    second = pool.acquire(held("abc"), 200)
    assert second is not first
    assert second.resident(held("abc")) == 128
    second.seek(128)
    for layer in range(len(EVEN.layers)):
        for which in (0, 1):
            assert np.array_equal(second.read(layer, which, 0, 128), kv.read(layer, which, 0, 128))
    assert first.pins == []
    pool.wait_readers(first, 64)  # it will be written from here on
    assert pool.acquire(held("ac"), 200).resident(held("ac")) == 64
    pool.wait_readers(second, 0)
    pool.wait_readers(first, 0)
    pool.forget()
    assert pool.acquire(held("ab"), 200).resident(held("ab")) == 0


def test_what_has_not_arrived_is_not_copied(port: AdversarialPort) -> None:
    pool = ArenaPool(EVEN, port)
    arena = pool.acquire(None, 200)
    run = make_run(MemoryKV.random(EVEN, TOKENS), blocks_of(prompt(TOKENS), 16))
    give(run, run.blocks, TOKENS, arena)  # small, so it is copied when it is used
    arena.seek(TOKENS)
    arena.hold(held("ab"))
    assert pool.acquire(held("ab"), 200).resident(held("ab")) == 0


def test_a_copy_is_made_beside_an_owner_that_goes_on(port: AdversarialPort) -> None:
    """The owner writes behind what is copied, from its own stream."""
    pool, kv = ArenaPool(EVEN, port), MemoryKV.random(EVEN, 128)
    first = pool.acquire(None, 400)
    filled(first, kv, 128)
    first.hold(held("ab"))
    stop = threading.Event()

    def write() -> None:
        more = torch.ones(2, 1, 8)
        while not stop.is_set():
            for position in range(128, 300):
                first.layers[0].plane(0).put(position, more)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(5):
            other = pool.acquire(held("ab"), 200)
            other.seek(other.resident(held("ab")))
            assert np.array_equal(other.read(0, 0, 0, 128), kv.read(0, 0, 0, 128))
            other.hold(None)
            pool.release(other)
    finally:
        stop.set()
        thread.join()
