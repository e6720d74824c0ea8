"""The device tier of requests outside a batch: who gets which arena, and that together they keep to their cap."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.models import tiny

from keepwarm import Engine
from keepwarm.core.blocks import token_ids
from keepwarm.core.geometry import KVGeometry
from keepwarm.errors import Overloaded, PromptTooLong
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.arena.held import Held
from keepwarm.runtime.arena.pool import ArenaPool
from keepwarm.runtime.device import port_to

CPU = torch.device("cpu")
GEOMETRY = KVGeometry.uniform(2, 2, 4, "float32")
UNIT = Arena.size(GEOMETRY, 512)


def held(names: str) -> Held:
    """16 tokens for each letter."""
    return Held(b"root", {}, token_ids([ord(name) for name in names for _ in range(16)]))


def test_writers_wait_for_readers_of_what_they_overwrite() -> None:
    pool = ArenaPool(GEOMETRY, port_to(CPU))
    arena = pool.acquire(None, 64)
    arena.hold(held("ab"))
    pool.pin(arena, 32)
    pool.release(arena)
    assert pool.acquire(held("x"), 64) is not arena, "nothing shared and still read: another one"
    other = pool.acquire(held("ac"), 64)
    assert other is not arena, "it would be written to where it is still read"
    assert other.resident(held("ac")) == 16, "what is shared was copied"
    pool.wait_readers(other, 16)
    assert pool.acquire(held("abc"), 64) is arena, "what is added behind disturbs nobody"
    pool.wait_readers(arena, 32)  # writes behind the reader: no wait
    done = threading.Event()

    def overwrite() -> None:
        pool.wait_readers(arena, 16)
        done.set()

    thread = threading.Thread(target=overwrite)
    thread.start()
    assert not done.wait(0.05)
    pool.unpin(arena, 32)
    assert done.wait(5)
    thread.join()


def test_a_growing_arena_keeps_what_is_shared() -> None:
    pool = ArenaPool(GEOMETRY, port_to(CPU))
    arena = pool.acquire(None, 16)
    for layer in range(2):
        arena.cache.update(torch.ones(1, 2, 16, 4), torch.ones(1, 2, 16, 4), layer)
    arena.hold(held("a"))
    pool.release(arena)
    larger = pool.acquire(held("a"), 5000)
    assert larger.capacity >= 5000
    assert larger.resident(held("ab")) == 16
    larger.seek(16)
    keys, _ = larger.cache.update(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), 0)
    assert (keys[:, :, :16] == 1).all()


def test_what_is_held_counts_to_the_first_token_that_differs_or_to_the_last_step_ended_alike() -> None:
    mine, other = held("ab"), held("aab")
    assert (mine.common(other), mine.common(held("b")), held("").common(mine)) == (16, 0, 0)
    assert replace(mine, root=b"other").common(mine) == 0
    assert replace(mine, keys={8: b"salt"}).common(mine) == 8, "what follows is a tenant's own"
    steps = replace(mine, cuts=(10, 20, 32))
    assert steps.common(replace(other, cuts=(10, 14, 48))) == 10
    assert steps.common(replace(held("abc"), cuts=(10, 20, 32, 48))) == 32
    assert (len(steps.cut(25).tokens), len(mine.cut(25).tokens)) == (20, 25)


def test_what_moved_to_a_larger_arena_stays_where_it_is_still_read() -> None:
    pool = ArenaPool(GEOMETRY, port_to(CPU))
    arena = pool.acquire(None, 512)
    arena.view(1, 1, 0, 16)[:] = 7
    arena.commit(1, 0, 16)
    arena.hold(held("a"))
    pool.pin(arena, 16)
    pool.release(arena)
    larger = pool.acquire(held("a"), 1024)
    assert larger is not arena
    assert (larger.read(1, 1, 0, 16) == 7).all()
    assert (arena.read(1, 1, 0, 16) == 7).all(), "the store copies it still"
    pool.unpin(arena, 16)
    pool.release(larger)
    assert pool.acquire(held("a"), 512) in (arena, larger)


def test_idle_arenas_make_room_the_least_recently_used_first() -> None:
    pool = ArenaPool(GEOMETRY, port_to(CPU), cap=2 * UNIT)
    one, other = pool.acquire(None, 512), pool.acquire(None, 512)
    for name, arena in (("a", one), ("b", other)):
        arena.hold(held(name))
        pool.release(arena)
    assert pool.nbytes == 2 * UNIT
    taken = pool.acquire(held("b"), 512)
    assert taken is other
    again = pool.acquire(held("c"), 512)
    assert (again is one, pool.evictions) == (True, 1), "it held another prompt"
    pool.release(taken)
    pool.release(again)
    large = pool.acquire(held("b"), 1024)
    assert (pool.nbytes, pool.evictions) == (2 * UNIT, 3), "both went"
    assert large.resident(held("b")) == 0, "there was no room for a copy"
    pool.release(large)


def test_what_never_fits_and_what_does_not_fit_now() -> None:
    pool = ArenaPool(GEOMETRY, port_to(CPU), cap=2 * UNIT)
    with pytest.raises(PromptTooLong, match="raise max_device"):
        pool.acquire(None, 1025)
    one = pool.acquire(None, 1024)
    with pytest.raises(Overloaded, match="1 running requests"):
        pool.acquire(None, 1)
    pool.release(one)
    assert pool.acquire(None, 1) is one


@pytest.mark.host_memory("elsewhere a read goes to memory of its own")
def test_memory_that_is_written_to_still_counts_until_the_writer_is_done() -> None:
    pool = ArenaPool(GEOMETRY, port_to(CPU), cap=2 * UNIT)
    arena = pool.acquire(None, 512)
    view = arena.view(0, 0, 0, 16)  # a read that hangs
    arena.arrivals.lost = True
    pool.release(arena)
    del arena
    gc.collect()
    assert pool.nbytes == UNIT
    with pytest.raises(Overloaded):
        pool.acquire(None, 1024)
    del view
    gc.collect()
    assert pool.nbytes == 0


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_cap_holds_whatever_comes(data: st.DataObject) -> None:
    pool = ArenaPool(GEOMETRY, port_to(CPU), cap=5 * UNIT)
    lent: list[Arena] = []
    pinned: list[tuple[Arena, int]] = []
    seen: dict[int, Arena] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["acquire", "release", "unpin"])):
            case "acquire" if not pinned:
                wanted = held("abc"[: data.draw(st.integers(0, 3))])
                try:
                    arena = pool.acquire(wanted, data.draw(st.sampled_from([1, 512, 600, 1500])))
                except Overloaded:
                    continue
                assert all(arena is not other for other in lent)
                arena.hold(wanted)
                seen[id(arena)] = arena
                lent.append(arena)
            case "release" if lent:
                arena = lent.pop(data.draw(st.integers(0, len(lent) - 1)))
                if data.draw(st.booleans()):
                    pool.pin(arena, 16)
                    pinned.append((arena, 16))
                pool.release(arena)
            case "unpin" if pinned:
                pool.unpin(*pinned.pop())
        alive = sum(arena.nbytes for arena in seen.values() if hasattr(arena, "memory"))
        assert alive <= pool.nbytes <= pool.cap


def test_an_engine_keeps_to_its_cap(tokenizer: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    prompt = list(range(5, 200))
    with Engine.from_pretrained((model, tokenizer), step=64) as free:
        cold = free.generate(prompt, max_new_tokens=4, reuse="off", trace=True)
        size = Arena.size(free.pipeline.model.geometry, 512)
    with Engine.from_pretrained((model, tokenizer), step=64, max_device=size, store=tmp_path) as engine:
        first = engine.stream(prompt, max_new_tokens=4)
        next(first)
        with pytest.raises(Overloaded, match="max_device"):
            engine.generate(prompt, max_new_tokens=4)
        list(first)
        engine.flush()  # until then the answer is stored from behind what the next one shares
        warm = engine.generate(prompt, max_new_tokens=4, trace=True)
        assert (warm.logits_digest, warm.exactness) == (cold.logits_digest, "exact")
        other = engine.generate(prompt[::-1], max_new_tokens=4)
        assert other.cached_tokens == 0
        stats = engine.stats()
        assert (stats.bytes["device"], stats.evictions["device"]) == (size, 1)
        with pytest.raises(PromptTooLong, match="max_device"):
            engine.generate(list(range(5, 200)) * 3, max_new_tokens=4)
