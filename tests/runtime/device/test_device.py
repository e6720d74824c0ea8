"""The port to a device's memory, and the adversarial device: that it shows what it is there to show."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.models import tiny
from tests.helpers.prompts import ids

from keepwarm import Engine
from keepwarm.core.geometry import KVGeometry
from keepwarm.errors import UnsupportedModel
from keepwarm.runtime import device
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.device.plane import Rows, Staged, fill, layout, load, make_planes
from keepwarm.testing.contracts import DeviceContract
from keepwarm.testing.device import AdversarialPort

GEOMETRY = KVGeometry.uniform(2, 3, 16, "float32")


class TestHost(DeviceContract):
    def make(self) -> device.DevicePort:
        return device.HostPort(torch.device("cpu"))


class TestAdversarial(DeviceContract):
    def make(self) -> device.DevicePort:
        return AdversarialPort()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
class TestCuda(DeviceContract):
    def make(self) -> device.DevicePort:
        return device.CudaPort(torch.device("cuda"))


@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="no MPS device here")
class TestMps(DeviceContract):
    def make(self) -> device.DevicePort:
        return device.MpsPort(torch.device("mps"))


def test_a_device_without_a_port_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="on 'meta'.*cpu, cuda, mps"):
        device.port_to(torch.device("meta"))


# ---- the adversarial device ----


def planes(port: AdversarialPort) -> Any:
    memory = port.allocate(layout(GEOMETRY, 64)[1][-1])
    return memory, make_planes(port, memory, GEOMETRY, 64)


def test_its_memory_is_nan_before_and_after() -> None:
    memory, pairs = planes(AdversarialPort())
    tensor = pairs[0][0].tensor()
    assert tensor.isnan().all()
    pairs[0][0].put(0, torch.ones(3, 64, 16))
    assert not tensor.isnan().any()
    memory.free()
    assert tensor.isnan().all()


def test_a_copy_lands_when_it_is_waited_for_and_not_before() -> None:
    port = AdversarialPort()
    (keys, values), _ = planes(port)[1]
    raw = [plane.tensor() for plane in (keys, values)]  # as work that has not waited sees it
    data = np.ones((3, 64, 64), np.uint8)
    keys.fill(0, data)
    event = port.inbound.record()
    values.fill(0, data)
    assert all(tensor.isnan().all() for tensor in raw)
    event.synchronize()
    assert [tensor.isnan().any().item() for tensor in raw] == [False, True], "no further than the event"
    assert not values.tensor().isnan().any()
    assert not port.faults


def test_a_copy_that_did_not_wait_for_what_was_computed_is_nan() -> None:
    port = AdversarialPort()
    keys = planes(port)[1][0][0]
    keys.put(0, torch.ones(3, 64, 16))
    target = port.pinned(3 * 64 * 64).view(3, 64, 64)
    port.copy_out(keys.tensor().view(torch.uint8), target, port.outbound)
    port.outbound.record().synchronize()
    assert target.view(torch.float32).isnan().all()
    assert len(port.faults) == 1
    assert "copied out without waiting" in port.faults[0]
    port.copy_in(keys.tensor().view(torch.uint8), target, port.inbound)
    port.inbound.record().synchronize()
    assert "written over without waiting" in port.faults[1]


def test_host_bytes_that_change_before_their_copy_are_nan() -> None:
    port = AdversarialPort()
    keys, values = planes(port)[1][0]
    for plane, whole in ((keys, True), (values, False)):
        staged = plane.stage(64).fill_(1)
        if whole:
            load([Staged(plane, 0, staged)])
        else:
            plane.load(0, staged)
        staged[0, 5] = 2
        assert plane.tensor()[0].isnan().all()
    assert set(port.faults) == {"bytes of the host changed before their copy was done"}


# ---- engines on it ----


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> list[AdversarialPort]:
    """Engines get a device of their own for the processor."""
    made: list[AdversarialPort] = []

    def make(device: torch.device) -> AdversarialPort:
        made.append(AdversarialPort(device))
        return made[-1]

    monkeypatch.setitem(device.PORTS, "cpu", make)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("settings", [{}, {"max_ram": 0}, {"map_files": True}], ids=["ram", "disk", "in-place"])
def test_a_hit_off_the_host_equals_a_cold_run(
    family: str, settings: dict[str, Any], ports: list[AdversarialPort], tokenizer: Any, tmp_path: Path
) -> None:
    """In a new engine, from disk; from RAM; behind what is resident; and with a longer prompt stored on top."""
    prompt, longer = ids(300, 4), [*ids(300, 4), *ids(90, 5)]

    def engine() -> Engine:
        return Engine.from_pretrained((tiny(family), tokenizer), store=tmp_path, step=64, min_step=16, **settings)

    with engine() as first:
        cold = first.generate(prompt, max_new_tokens=6, trace=True)
    with engine() as second:
        hit = second.generate(prompt, max_new_tokens=6, trace=True)
        assert (hit.cached_by_tier, hit.exactness) == ({"disk": 256}, "exact")
        again = second.generate(prompt, max_new_tokens=6, trace=True)
        assert again.cached_by_tier == {"device": 256}
        second.flush()
        second.pipeline.pool.forget()
        kept = second.generate(prompt, max_new_tokens=6, trace=True)
        assert kept.cached_by_tier == ({"disk": 256} if "max_ram" in settings else {"ram": 256})
        grown = second.generate(longer, max_new_tokens=6, trace=True)
    with engine() as third:
        assert third.generate(longer, max_new_tokens=6, trace=True).logits_digest == grown.logits_digest
        alone = third.generate(longer, max_new_tokens=6, trace=True, reuse="off")
        assert grown.logits_digest == alone.logits_digest
    assert hit.logits_digest == again.logits_digest == kept.logits_digest == cold.logits_digest
    assert len(ports) == 3, "one port for each engine"
    assert not any(port.faults for port in ports)


def test_what_streams_of_their_own_compute_is_stored_and_reused(
    ports: list[AdversarialPort], tokenizer: Any, tmp_path: Path
) -> None:
    """As a caller does who puts each request into `torch.cuda.stream(...)`, each in a thread."""
    prompts = [[*ids(200, 1), *ids(60, 10 + n)] for n in range(4)]
    with Engine.from_pretrained((tiny("gpt2"), tokenizer), step=64, min_step=16) as plain:
        cold = [plain.generate(prompt, max_new_tokens=5, trace=True, reuse="off") for prompt in prompts]
    found: dict[int, Any] = {}
    with Engine.from_pretrained((tiny("gpt2"), tokenizer), store=tmp_path, step=64, min_step=16) as engine:
        port = engine.pipeline.model.runner.port

        def ask(number: int) -> None:
            with port.on(port.stream()):
                found[number] = engine.generate(prompts[number], max_new_tokens=5, trace=True)

        for _ in range(2):
            threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert [found[n].logits_digest for n in range(4)] == [each.logits_digest for each in cold]
    with Engine.from_pretrained((tiny("gpt2"), tokenizer), store=tmp_path, step=64, min_step=16) as later:
        for prompt, wanted in zip(prompts, cold, strict=True):
            hit = later.generate(prompt, max_new_tokens=5, trace=True)
            assert hit.cached_tokens >= 192
            assert hit.logits_digest == wanted.logits_digest
    assert not any(port.faults for port in ports)


class CountingPort(AdversarialPort):
    """Notes its copies: how many bytes each call brings."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device)
        self.alone: list[int] = []
        self.together: list[int] = []

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        self.alone.append(source.nbytes)
        super().copy_in(target, source, stream)

    def copy_all(self, copies: Any, stream: Any, pinned: object = None) -> None:
        self.together.append(copies.nbytes)
        super().copy_all(copies, stream, pinned)


@pytest.mark.parametrize("tier", ["disk", "ram"])
def test_a_hit_is_one_copy_per_layer(
    tier: str, monkeypatch: pytest.MonkeyPatch, tokenizer: Any, tmp_path: Path
) -> None:
    """Of keys and values together, from several runs in RAM."""
    port = CountingPort(torch.device("cpu"))
    monkeypatch.setitem(device.PORTS, "cpu", lambda _: port)
    with Engine.from_pretrained((tiny("llama"), tokenizer), store=tmp_path, step=64, min_step=16) as engine:
        for length in (130, 260):
            engine.generate(ids(length, 4), max_new_tokens=1)
            engine.flush()
        cold = engine.generate(ids(300, 4), max_new_tokens=4, trace=True, reuse="off")
        engine.pipeline.pool.forget()
        if tier == "disk":
            engine.pipeline.archive.clear_ram()
        port.alone.clear()
        port.together.clear()
        hit = engine.generate(ids(300, 4), max_new_tokens=4, trace=True)
        geometry = engine.pipeline.model.geometry
    assert (hit.cached_by_tier, hit.logits_digest) == ({tier: 256}, cold.logits_digest)
    layers = len(geometry.layers)
    runs = len(port.together) // layers
    assert runs == 1 if tier == "ram" else runs >= 1, "from disk, each run's layers come for themselves"
    assert (port.alone, len(port.together)) == ([], runs * layers)
    assert sum(port.together) == 256 * geometry.bytes_per_token
    assert not port.faults


def test_pinned_memory_lives_until_it_was_copied() -> None:
    port = AdversarialPort()
    keys, values = planes(port)[1][0]
    data = np.ones((3, 64, 64), np.uint8)
    fill([Rows(plane, 0, data) for plane in (keys, values)])
    gc.collect()
    others = [torch.zeros(2 * data.nbytes, dtype=torch.uint8) for _ in range(8)]  # would get its place
    assert (values.tensor().view(torch.uint8) == 1).all()
    assert len(others) == 8


def test_what_two_runs_have_of_a_layer_is_copied_as_each_is_read() -> None:
    """A device may copy at once, while the second run is still read."""
    port = AdversarialPort()
    arena = Arena(GEOMETRY, 64, port)
    runs = [(0, 16), (16, 48)]
    places = {run: [arena.view(0, kv, *run) for kv in (0, 1)] for run in runs}
    for number, run in enumerate(runs):
        for place in places[run]:
            place[...] = number + 1
        arena.commit(0, *run)
    for kv in (0, 1):
        found = arena.layers[0].plane(kv).tensor().view(torch.uint8)
        assert (found[:, :16] == 1).all()
        assert (found[:, 16:48] == 2).all()
    assert not port.faults


def test_a_broken_off_load_leaves_nothing_to_be_copied_in() -> None:
    """What was staged for a load that failed never lands on what came after it."""
    arena = Arena(GEOMETRY, 64, AdversarialPort())
    for layer in range(2):
        for kv in (0, 1):
            arena.view(layer, kv, 16, 48)[...] = 1
    arena.seek(16)
    for layer in range(2):
        new = torch.full((1, 3, 8, 16), 7.0)
        arena.cache.update(new, new, layer)
        arena.commit(layer, 16, 48)  # of the next load, say
        for kv in (0, 1):
            assert (arena.layers[layer].plane(kv).tensor()[:, 16:24] == 7).all()


# ---- clocks ----


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines get a device by whose clock everything that is copied or written takes a second."""
    monkeypatch.setitem(device.PORTS, "cpu", lambda device: AdversarialPort(device, slowness=1.0))


@pytest.mark.parametrize("tier", ["disk", "ram"])
def test_loading_is_timed_by_the_device(tier: str, slow: None, tokenizer: Any, tmp_path: Path) -> None:
    """Two layers are copied, keys and values together, after their threads went on."""
    with Engine.from_pretrained((tiny("llama"), tokenizer), store=tmp_path, step=64, min_step=16) as engine:
        cold = engine.generate(ids(300, 4), max_new_tokens=2)
        assert cold.timings["load"] < 1000
        engine.flush()
        engine.pipeline.pool.forget()
        if tier == "disk":
            engine.pipeline.archive.clear_ram()
        hit = engine.generate(ids(300, 4), max_new_tokens=2)
        assert hit.cached_by_tier == {tier: 256}
        assert hit.timings["load"] >= 2 * 1000


def test_blending_is_timed_by_the_device(slow: None, tokenizer: Any) -> None:
    documents = [{"title": f"{n}", "text": f"The ferry of pier {n} leaves at {n}:40 in summer. " * 4} for n in range(3)]
    settings: dict[str, Any] = {"reuse": "chunks", "learn_chunks": False, "repair": "deviation:0.3"}
    with Engine.from_pretrained((tiny("llama"), tokenizer), **settings) as engine:
        for document in documents:
            engine.warm(documents=[document])
        found = engine.generate(messages=[{"role": "user", "content": "When?"}], documents=documents, max_new_tokens=1)
        assert found.repaired_tokens > 0
        assert found.timings["select"] >= 4 * 1000, "a pass over both layers"
        assert found.timings["repair"] >= 4 * 1000
        assert found.timings["carry"] >= 4 * 1000, "each plane is written"
