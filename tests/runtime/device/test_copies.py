"""Plans of copies by address: what they list, and every way to run them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from keepwarm.errors import UnsupportedModel
from keepwarm.runtime import device
from keepwarm.runtime.device import Copies, cuda_copies
from keepwarm.runtime.device.common import OneStreamPort
from keepwarm.runtime.device.cuda_copies import Run
from keepwarm.runtime.device.host import HostStream
from keepwarm.testing.device import AdversarialPort

NUMBER = np.int64
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def numbers(*values: int) -> Any:
    return np.array(values, NUMBER)


def test_what_goes_on_at_both_sides_is_one_copy() -> None:
    there, here = numbers(100, 110, 120, 200, 210, 400), numbers(0, 10, 20, 30, 50, 60)
    plan = Copies.between(there, here, numbers(10), inward=True)
    assert plan.targets.tolist() == [100, 200, 210, 400]
    assert plan.sources.tolist() == [0, 30, 50, 60]
    assert plan.sizes.tolist() == [30, 10, 10, 10]
    assert plan.nbytes == 60
    back = Copies.between(there, here, numbers(10), inward=False)
    assert (back.sources.tolist(), back.targets.tolist()) == (plan.targets.tolist(), plan.sources.tolist())


def test_nothing_to_copy_is_a_plan_too() -> None:
    plan = Copies.between(numbers(), numbers(), numbers(), inward=True)
    assert (len(plan), plan.nbytes) == (0, 0)
    device.HostPort().copy_all(plan, HostStream())


def there_and_back(port: device.DevicePort) -> None:
    """Scatter pieces of pinned memory over a device's, and gather them again."""
    owner = port.allocate(1 << 12)
    memory = owner.tensor
    source, target = port.pinned(1 << 12), port.pinned(1 << 12)
    source.copy_(torch.from_numpy(np.random.default_rng(1).integers(0, 256, 1 << 12, np.uint8)))
    order = np.random.default_rng(2).permutation(64).astype(NUMBER) * 64
    here, stream = np.arange(64, dtype=NUMBER) * 64, port.stream()
    inward = Copies.between(memory.data_ptr() + order, source.data_ptr() + here, numbers(64), inward=True)
    port.copy_all(inward, stream)
    outward = Copies.between(memory.data_ptr() + order, target.data_ptr() + here, numbers(64), inward=False)
    other = port.stream()
    other.wait(stream.record())
    port.copy_all(outward, other)
    event = other.record()
    event.synchronize()
    assert event.is_past()
    assert torch.equal(source, target)
    owner.free()


@pytest.mark.parametrize("kind", [device.HostPort, AdversarialPort])
def test_there_and_back(kind: Any) -> None:
    there_and_back(kind())


@NEEDS_CUDA
@pytest.mark.parametrize("way", ["best", "batches", "one by one"])
def test_there_and_back_on_cuda(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way != "best":
        found = way_of(way)
        if found is None:
            pytest.skip("the driver has no such call")
        monkeypatch.setattr("keepwarm.runtime.device.cuda.runner", lambda: found)
    there_and_back(device.CudaPort(torch.device("cuda")))


def way_of(way: str) -> Run | None:
    driver = ctypes.CDLL("libcuda.so.1")
    return cuda_copies.one_by_one(driver) if way == "one by one" else cuda_copies.batches(driver)


def test_a_copy_over_what_is_still_read_is_noted() -> None:
    port = AdversarialPort()
    memory = torch.zeros(64, dtype=torch.uint8)
    adopted, source = port.adopt(memory), port.pinned(64)
    with port.on(port.stream()):
        port.use(memory, writes=False)
        stream = port.stream()
        plan = Copies.between(numbers(memory.data_ptr()), numbers(source.data_ptr()), numbers(64), inward=True)
        port.copy_all(plan, stream)
        stream.record().synchronize()
    assert port.faults == ["bytes were copied over without waiting for who reads them"]
    assert adopted.nbytes == 64


def test_what_is_computed_over_a_copy_that_may_not_be_there_is_noted() -> None:
    port = AdversarialPort()
    memory = torch.zeros(64, dtype=torch.uint8)
    adopted, source, stream = port.adopt(memory), port.pinned(64), port.stream()
    plan = Copies.between(numbers(memory.data_ptr()), numbers(source.data_ptr()), numbers(64), inward=True)
    port.copy_all(plan, stream)
    event = stream.record()
    assert not event.is_past()
    while port.busy():
        port.busy()[0].advance()
    port.use(memory, writes=False)  # it is there, but nobody saw to that
    assert len(port.faults) == 1
    assert event.is_past()  # now the host knows
    port.use(memory, writes=True)
    assert len(port.faults) == 1
    assert adopted.nbytes == 64


def test_where_addresses_mean_nothing_a_plan_is_refused() -> None:
    class Elsewhere(OneStreamPort):
        kind, is_host = "mps", False

        def _allocate(self, nbytes: int, huge: bool) -> Any:
            raise AssertionError

    port = Elsewhere(torch.device("meta"), HostStream())
    with pytest.raises(UnsupportedModel, match="by address"):
        port.copy_all(Copies.between(numbers(), numbers(), numbers(), inward=True), port.stream())
