"""Memory of the host that a device copies from where it lies is registered while something refers to it."""

from __future__ import annotations

import gc
import logging
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from keepwarm.core.geometry import KVGeometry
from keepwarm.core.memory import OWN_PAGES, own_bytes
from keepwarm.runtime.device import cuda_host
from keepwarm.runtime.device.cuda import CudaPort
from keepwarm.runtime.device.plane import Rows, allocate, fill
from keepwarm.runtime.device.registered import Registered
from keepwarm.testing.device import AdversarialPort


def rows_of(data: Any, heads: int = 4, width: int = 64) -> Any:
    return data.reshape(heads, -1, width)


def test_bytes_are_registered_while_a_view_refers_to_them() -> None:
    live: dict[int, int] = {}
    registered = Registered(lambda at, nbytes: live.setdefault(at, nbytes) > 0, live.pop)
    data = own_bytes(OWN_PAGES)
    registered.add(data)
    registered.add(data)
    assert list(live.values()) == [OWN_PAGES]
    view = rows_of(data)[1:3, 7:90]
    assert registered.holds(view)
    assert not registered.holds(view[:, :, ::2]), "rows must be whole"
    assert not registered.holds(view[::-1])
    assert not registered.holds(np.zeros((2, 3, 64), np.uint8))
    del data
    gc.collect()
    assert live
    del view
    gc.collect()
    assert not live


def test_memory_that_the_device_may_still_read_stays() -> None:
    registered = Registered(lambda at, nbytes: True, lambda at: False)
    data = own_bytes(OWN_PAGES)
    data[:] = 7
    registered.add(data)
    there = np.frombuffer(data.base, np.uint8)
    del data
    gc.collect()
    assert not registered.holds(rows_of(there))
    assert registered._stuck


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_leaves_the_device_alone() -> None:
    told: list[int] = []
    registered = Registered(lambda at, nbytes: True, lambda at: not told.append(at))
    data = own_bytes(OWN_PAGES)
    registered.add(data)
    if (child := os.fork()) == 0:
        holds = registered.holds(rows_of(data))
        del data
        os._exit(holds or len(told))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert registered.holds(rows_of(data))


def test_little_and_refused_memory_stays_as_it_is() -> None:
    asked: list[int] = []
    registered = Registered(lambda at, nbytes: bool(asked.append(nbytes)), lambda at: pytest.fail("nothing was there"))
    small, large, shared = own_bytes(OWN_PAGES - 64), own_bytes(OWN_PAGES), own_bytes(2 * OWN_PAGES)[64:]
    registered.add(small)
    registered.add(shared)  # not in pages of its own
    assert not asked
    registered.add(large)
    assert asked == [OWN_PAGES]
    assert not registered.holds(rows_of(large))


def test_rows_go_to_the_device_from_where_they_lie() -> None:
    """Without a copy in between: what changes before the device has them is a fault."""
    port = AdversarialPort()
    geometry = KVGeometry.uniform(1, 4, 32, "bfloat16")
    _, ((keys, values),) = allocate([port], geometry, 4096, huge=False)
    whole = own_bytes(2 * 4 * 4096 * 64)
    whole[:] = np.arange(whole.size).astype(np.uint8)
    port.register(whole)
    data = whole.reshape(2, 4, 4096, 64)
    fill([Rows(keys, 5, data[0][:, :4000]), Rows(values, 5, data[1][:, :4000])])
    for plane, part in zip((keys, values), data, strict=True):
        found = plane.tensor()[:, 5:4005].contiguous().view(torch.uint8)
        assert torch.equal(found, torch.from_numpy(part[:, :4000].copy()))
    assert port.faults == []
    fill([Rows(keys, 5, data[0][:, :4000])])
    data[0, 0, 0] += 1
    keys.tensor()
    assert port.faults == ["bytes of the host changed before their copy was done"]


class Driver:
    """NVIDIA's driver as far as memory of the host goes, with what it answers."""

    def __init__(self, status: int = 0, context: int = 0) -> None:
        self.calls: list[str] = []
        self._status, self._context = status, context

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> int:
            self.calls.append(name)
            return self._status if name == "cuMemHostRegister_v2" else self._context if "Push" in name else 0

        return call


def test_what_the_driver_refuses_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(status=2)
    memory = cuda_host.HostMemory(driver, 0)
    with caplog.at_level(logging.WARNING):
        assert not memory.register(4096, 1 << 20)
        assert not memory.register(8192, 1 << 20)
    assert len(caplog.records) == 1
    assert "CUresult 2" in caplog.text
    assert driver.calls[2:5] == ["cuCtxPushCurrent_v2", "cuMemHostRegister_v2", "cuCtxPopCurrent_v2"]


def test_without_a_context_nothing_is_popped() -> None:
    driver = Driver(context=4)  # CUDA_ERROR_DEINITIALIZED
    cuda_host.HostMemory(driver, 0).unregister(4096)
    assert driver.calls[2:] == ["cuCtxPushCurrent_v2", "cuMemHostUnregister"]


def test_there_may_be_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda_host, "ctypes", SimpleNamespace(CDLL=missing))
    assert cuda_host.registered(0) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_gpu_copies_from_registered_memory() -> None:
    port = CudaPort(torch.device("cuda"))
    geometry = KVGeometry.uniform(1, 4, 32, "bfloat16")
    _, ((keys, _),) = allocate([port], geometry, 4096, huge=False)
    data = own_bytes(4 * 4096 * 64)
    data[:] = np.random.default_rng(0).integers(0, 256, data.size, np.uint8)
    port.register(data)
    assert port.holds(rows_of(data))
    fill([Rows(keys, 0, rows_of(data))])
    assert torch.equal(keys.tensor().view(torch.uint8).cpu(), torch.from_numpy(rows_of(data).copy()))
