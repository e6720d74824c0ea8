"""The RAM tier beside a device: runs are kept in pages of their own, which are registered."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from keepwarm.core.geometry import KVGeometry
from keepwarm.core.memory import OWN_PAGES
from keepwarm.store.ram.registered import RegisteredRam
from keepwarm.testing.kv import MemoryKV, blocks_of, make_run, prompt

WIDE = KVGeometry.uniform(2, 2, 64, "float32")


def run_of(tokens: int) -> Any:
    return make_run(MemoryKV.random(WIDE, tokens), blocks_of(prompt(tokens), 16))


def test_large_runs_are_registered_where_they_are_kept() -> None:
    registered: list[Any] = []
    tier = RegisteredRam(1 << 30, registered.append)
    small, large = run_of(32), run_of(OWN_PAGES // WIDE.bytes_per_token + 16)
    assert tier.put(small)
    assert not registered
    tier.remove(small.id)
    assert tier.put(large)
    (found,) = tier.runs()
    assert found.data is registered[0]
    assert found.data.ctypes.data % mmap.PAGESIZE == 0
    assert np.array_equal(found.data, large.data)
    assert not tier.put(large)
    assert len(registered) == 1
    assert tier.nbytes == large.nbytes


def test_a_run_that_was_removed_meanwhile_does_not_come_back() -> None:
    tier = RegisteredRam(1 << 30, lambda data: tier.remove(large.id))
    large = run_of(OWN_PAGES // WIDE.bytes_per_token + 16)
    assert tier.put(large)
    assert tier.runs() == ()
    assert tier.nbytes == 0
