"""The vLLM connector's worker over pages on a device that is as late as it may be. Needs no vLLM."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keepwarm.core.blocks import chain, token_ids
from keepwarm.integrations.vllm.device_loading import DeviceLoading
from keepwarm.integrations.vllm.device_pages import DevicePages
from keepwarm.integrations.vllm.loading import Late
from keepwarm.integrations.vllm.messages import Load, Prefix, Save, Step
from keepwarm.integrations.vllm.pinned import PinnedPool
from keepwarm.integrations.vllm.worker import WorkerHalf
from keepwarm.runtime import device
from keepwarm.runtime.device import Copies
from keepwarm.store import Archive
from keepwarm.store.admin.purge_epochs import Began
from keepwarm.testing.device import AdversarialPort
from keepwarm.testing.kv import namespace

PAGE, HEADS, WIDTH, PAGES = 16, 3, 8, 24
TOKENS = token_ids(range(6 * PAGE))
BEFORE = Began("another store", 0)
FROM, TO = (3, 4, 5, 9, 20, 21), (11, 12, 2, 1, 0, 23)

# How vLLM's layers, pages, heads and tokens may lie: the order of [layer, page, head, token].
ORDERS = {
    "LBHNC": (0, 1, 2, 3),
    "LBNHC": (0, 1, 3, 2),
    "LHBNC": (0, 2, 1, 3),
    "BLHNC": (1, 0, 2, 3),
    "BLNHC": (1, 0, 3, 2),
    "BHLNC": (1, 2, 0, 3),
}


def views(order: str, layers: int, cuts: int = 1, padding: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Memory for all layers, and each layer's `[pages, heads, tokens, width]` in it. Kernels see `cuts` pages for one.
    `padding` bytes are at the end of each page."""
    sizes = (layers, PAGES * cuts, HEADS, PAGE // cuts)
    strides, step = [0] * 4, WIDTH
    for dim in reversed(ORDERS[order]):
        strides[dim] = step
        step *= sizes[dim]
        if dim == 2 + (order[-2] == "H"):  # the outermost dimension of a page
            step += padding if order[:2] in ("LB", "BL") and order[2] + order[3] in ("HN", "NH") else 0
    memory = torch.zeros(step + WIDTH, dtype=torch.float16)
    return memory, [
        memory.as_strided((*sizes[1:], WIDTH), (*strides[1:], 1), layer * strides[0]) for layer in range(layers)
    ]


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> AdversarialPort:
    made = AdversarialPort()
    monkeypatch.setitem(device.PORTS, "cpu", lambda _: made)
    return made


class Worker:
    """A worker half whose pages are on the late device."""

    def __init__(self, archive: Archive, port: AdversarialPort, order: str = "LBNHC", **shape: int) -> None:
        shape = {"layers": 4} | shape
        self.port = port
        self.memory, self.views = views(order, **shape)
        self._adopted = port.adopt(self.memory)
        self.half = WorkerHalf(archive, namespace(), 0, PAGE, timeout=20.0, keeps=False)
        self.half.register({f"layer {at}": view for at, view in enumerate(self.views)})

    def at(self, layer: int, page: int) -> torch.Tensor:
        """What kernels see of a page of vLLM's."""
        cuts = PAGE // self.views[layer].shape[2]
        return self.views[layer][page * cuts : (page + 1) * cuts]

    def compute(self, pages: tuple[int, ...], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for page in pages:
            for layer in range(len(self.views)):
                target = self.at(layer, page)
                self.port.use(target, writes=True)
                target.copy_(torch.randn(target.shape, generator=generator))

    def content(self, pages: tuple[int, ...]) -> torch.Tensor:
        """What a step that attends to these pages reads."""
        for page in pages:
            for layer in range(len(self.views)):
                self.port.use(self.at(layer, page), writes=False)
        return torch.stack([self.at(layer, page) for page in pages for layer in range(len(self.views))]).clone()

    def save(self, save: Save) -> None:
        self.half.save(Step(saves=[save]))
        self.half.start(Step())

    def load(self, archive: Archive, first: int = 0, *, apart: bool = True) -> None:
        blocks = chain(TOKENS, range(PAGE, len(TOKENS) + 1, PAGE), namespace())
        refs = archive.lookup([block.exact for block in blocks])
        assert len(refs) == len(TO)
        self.half.start(Step(loads=[Load(prefix(TO), first * PAGE, (refs[first:],), apart)]))
        deadline = time.monotonic() + 20
        while apart and not self.half.take_arrived():
            for stream in self.port.busy():
                stream.advance()
            assert time.monotonic() < deadline


def prefix(pages: tuple[int, ...], request: str = "request") -> Prefix:
    return Prefix(request, TOKENS, pages, {}, "none", BEFORE)


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    with Archive.open(tmp_path, max_ram=1 << 24, max_disk=1 << 26) as opened:
        yield opened


def test_vllm_is_not_needed() -> None:
    assert not [name for name in sys.modules if name.split(".")[0] == "vllm"]


@pytest.mark.parametrize("shape", [{}, {"layers": 3}, {"layers": 1}, {"cuts": 2}, {"padding": 40}])
@pytest.mark.parametrize("order", list(ORDERS))
def test_every_layout_comes_back(order: str, shape: dict[str, int], archive: Archive, port: AdversarialPort) -> None:
    if "cuts" in shape and order not in ("LBHNC", "LBNHC"):
        pytest.skip("vLLM cuts only pages that lie dense")
    writer, reader = Worker(archive, port, order, **shape), Worker(archive, port, order, **shape)
    writer.compute(FROM, 1)
    writer.save(Save(prefix(FROM), 0, last=True))
    archive.flush()
    assert writer.half.take_saved() == {"request"}
    reader.load(archive)
    assert torch.equal(reader.content(TO), writer.content(FROM))
    rest = sorted(set(range(PAGES)) - set(TO))
    assert not reader.content(tuple(rest)).any()
    assert reader.half.take_failed() == set()
    assert port.faults == []


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("first", [0, 2])
def test_in_pieces(first: int, apart: bool, archive: Archive, port: AdversarialPort, monkeypatch: Any) -> None:
    """Each copied while the next one is read; a step that waits for a load waits before it begins."""
    monkeypatch.setattr(DeviceLoading.pieces, "__defaults__", (3 * PAGE * HEADS * WIDTH * 2 * 4,))
    writer, reader = Worker(archive, port), Worker(archive, port)
    writer.compute(FROM, 1)
    writer.save(Save(prefix(FROM), 0))
    archive.flush()
    reader.load(archive, first, apart=apart)
    assert torch.equal(reader.content(TO[first:]), writer.content(FROM[first:]))
    assert not reader.content(TO[:first]).any() if first else True
    assert port.faults == []


def test_nothing_begins_after_a_load_was_given_up(archive: Archive, port: AdversarialPort) -> None:
    """And what began is waited for by whatever is computed next."""
    worker = Worker(archive, port)
    memory = worker.half._pages
    assert isinstance(memory, DevicePages)
    loading = DeviceLoading(memory, TO, range(len(TO) * PAGE), time.monotonic() + 60, port.current().record())
    pieces = loading.pieces(2 * PAGE * memory.geometry.bytes_per_token)
    first = next(pieces)
    first.staged.plane(0, 0)[...] = 7
    first.arrived()
    second = next(pieces)
    loading._give_up()
    with pytest.raises(Late):
        second.arrived()
    with pytest.raises(Late):
        next(pieces)
    assert worker.content(TO[:2]).any()
    assert not worker.content(TO[2:]).any()
    assert port.faults == []


def test_copies_of_a_plan_that_failed_are_waited_for(archive: Archive, port: AdversarialPort) -> None:
    """A part of them may be queued, and the pages belong to others soon."""
    worker = Worker(archive, port)
    memory, real = worker.half._pages, port.copy_all
    assert isinstance(memory, DevicePages)
    loading = DeviceLoading(memory, TO, range(len(TO) * PAGE), time.monotonic() + 60, port.current().record())

    def half(plan: Copies, stream: Any) -> None:
        cut = len(plan) // 2
        real(Copies(plan.sources[:cut], plan.targets[:cut], plan.sizes[:cut], plan.inward), stream)
        raise RuntimeError("the second call failed")

    port.copy_all = half  # type: ignore[method-assign]
    (piece,) = loading.pieces()
    piece.staged.plane(0, 0)[...] = 7
    with pytest.raises(RuntimeError):
        piece.arrived()
    loading._give_up()
    worker.compute(TO, 5)
    expected = worker.content(TO)
    for stream in port.busy():
        stream.run_to(None)
    assert torch.equal(worker.content(TO), expected)
    assert port.faults == []


def test_a_load_stages_only_a_few_pieces_before_their_copies_are_done(archive: Archive, port: AdversarialPort) -> None:
    worker = Worker(archive, port)
    memory, pages = worker.half._pages, tuple(range(PAGES))
    assert isinstance(memory, DevicePages)
    loading = DeviceLoading(memory, pages, range(PAGES * PAGE), time.monotonic() + 60, port.current().record())
    blocks = set()
    for piece in loading.pieces(1):
        piece.staged.plane(0, 0)[...] = 7
        piece.arrived()
        piece.staged.release()
        blocks.add(id(piece.staged._block))
    assert len(loading._copied) == PAGES
    assert len(blocks) <= 5
    loading._give_up()
    assert port.faults == []


def test_pinned_memory_is_used_again_when_its_copies_are_done(port: AdversarialPort) -> None:
    pool, stream = PinnedPool(port, kept=3 << 20), port.stream()
    first = pool.take(1 << 20)
    stream.give(lambda: None)
    event = stream.record()
    nothing = Copies.between(*[np.zeros(0, np.int64)] * 3, inward=True)
    pool.give(first, [(event, nothing)])
    other = pool.take(1 << 20)
    assert other is not first
    event.synchronize()
    assert pool.take(1 << 20) is first
    blocks = [pool.take(1 << 20) for _ in range(5)]
    for block in blocks:
        pool.give(block, [])
    kept = [pool.take(1 << 20) for _ in range(5)]
    assert sum(block in blocks for block in kept) == 3


def test_saves_wait_for_the_next_step_and_preempted_pages_for_saves(archive: Archive, port: AdversarialPort) -> None:
    worker = Worker(archive, port)
    worker.compute(FROM, 1)
    expected = worker.content(FROM)
    worker.half.save(Step(saves=[Save(prefix(FROM), 0)]))
    assert port.busy() == []
    worker.half.fence(Step(preempted=frozenset({"request"})))
    worker.compute(FROM, 2)  # they are somebody else's now
    archive.flush()
    worker.load(archive)
    assert torch.equal(worker.content(TO), expected)
    assert port.faults == []


def test_saves_do_not_pile_up_in_pinned_memory(archive: Archive, port: AdversarialPort, monkeypatch: Any) -> None:
    """What does not fit is not saved, and the request's pages are given back all the same."""
    worker, puts = Worker(archive, port), []
    monkeypatch.setattr("keepwarm.integrations.vllm.deferred_saves.MOST", 1 << 20)
    monkeypatch.setattr(archive, "put", lambda *_, on_copied, **__: puts.append(on_copied))
    worker.compute(FROM, 1)
    for name in ("one", "two"):
        worker.save(Save(prefix(FROM, name), 0, last=True))
    for stream in port.busy():
        stream.run_to(None)
    assert worker.half.take_saved() == {"one", "two"}
    assert len(puts) == 1
    puts[0]()
    worker.save(Save(prefix(FROM, "three"), 0))
    assert len(puts) == 2
    puts[1]()


def test_what_ended_is_reported_when_its_last_copy_is_done(archive: Archive, port: AdversarialPort) -> None:
    worker = Worker(archive, port)
    worker.compute(FROM, 1)
    worker.half.save(Step(saves=[Save(prefix(FROM), 0), Save(prefix(FROM), len(TOKENS), last=True)]))
    assert worker.half.take_saved() == set()
    worker.half.start(Step())
    archive.flush()
    assert worker.half.take_saved() == {"request"}
    assert worker.half.take_saved() == set()


def test_a_load_that_fails_gives_its_pages_back(archive: Archive, port: AdversarialPort) -> None:
    worker = Worker(archive, port)
    worker.compute(FROM, 1)
    worker.save(Save(prefix(FROM), 0))
    archive.flush()
    blocks = chain(TOKENS, range(PAGE, len(TOKENS) + 1, PAGE), namespace())
    refs = archive.lookup([block.exact for block in blocks])
    real, go_on = archive.load, threading.Event()

    def load(*arguments: Any) -> dict[str, int]:
        assert go_on.wait(20)
        return real(*arguments)

    archive.load = load  # type: ignore[method-assign]
    worker.half._timeout = 0.0
    worker.half.start(Step(loads=[Load(prefix(TO), 0, (refs,), apart=True)]))
    assert worker.half.take_arrived() == {"request"}
    assert worker.half.take_failed() == set(TO)
    worker.compute(TO, 5)
    expected = worker.content(TO)
    go_on.set()
    worker.half.close()
    port.synchronize()
    assert torch.equal(worker.content(TO), expected)
    assert port.faults == []
