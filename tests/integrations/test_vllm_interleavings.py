"""The connector's transfers on a device, in every order that vLLM, the loaders' threads and the device may take.

A small model of vLLM hands out pages and makes steps. The device does copies as late as it may, or earlier where
hypothesis says so, and notes by vector clocks what reads or writes bytes without waiting for who did before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from keepwarm.core.blocks import chain, token_ids
from keepwarm.integrations.vllm.device_loading import DeviceLoading
from keepwarm.integrations.vllm.messages import Load, Prefix, Save, Step
from keepwarm.integrations.vllm.worker import WorkerHalf
from keepwarm.runtime import device
from keepwarm.store import Archive
from keepwarm.store.admin.purge_epochs import Began
from keepwarm.testing.device import AdversarialPort
from keepwarm.testing.kv import namespace

PAGE, HEADS, WIDTH, LAYERS, PAGES = 4, 2, 2, 3, 9
MOST = 4  # pages of a prompt
BEFORE = Began("another store", 0)


class Gated:
    """Runs each load in a thread of its own, which goes on from one gate to the next when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[threading.Semaphore, threading.Semaphore]] = []
        self._local = threading.local()
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        gates = threading.Semaphore(0), threading.Semaphore(0)

        def run() -> None:
            self._local.gates = gates
            self.gate()
            try:
                future.set_result(work(*arguments))
            except BaseException as error:
                future.set_exception(error)
            gates[1].release()

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()
        gates[1].acquire()
        return future

    def gate(self) -> None:
        go, paused = self._local.gates
        self.waiting.append((go, paused))
        paused.release()
        assert go.acquire(timeout=60)

    def advance(self, which: int) -> None:
        """Let one thread go on to its next gate, or its end."""
        go, paused = self.waiting.pop(which % len(self.waiting))
        go.release()
        assert paused.acquire(timeout=60)

    def shutdown(self, **_: Any) -> None:
        while self.waiting:
            self.advance(0)
        for thread in self._threads:
            thread.join()


class Store:
    """An archive that takes KV, and gives it, when it is told to."""

    def __init__(self, archive: Archive, gated: Gated) -> None:
        self._archive, self._gated = archive, gated
        self.puts: list[Callable[[], Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._archive, name)

    def load(self, *arguments: Any) -> Any:
        self._gated.gate()
        return self._archive.load(*arguments)

    def put(self, *arguments: Any, **named: Any) -> None:
        self.puts.append(lambda: self._archive.put(*arguments, **named))


@dataclass
class Request:
    """One of vLLM's."""

    name: str
    seed: int
    pages: list[int]
    computed: int = 0  # pages
    saved: int = 0  # pages whose save was planned

    @property
    def tokens(self) -> Any:
        return tokens_of(self.seed, len(self.pages))

    def prefix(self, count: int) -> Prefix:
        return Prefix(self.name, tokens_of(self.seed, count), tuple(self.pages[:count]), {}, "none", BEFORE)


def tokens_of(seed: int, pages: int) -> Any:
    return token_ids([1000 * (seed + 1) + at for at in range(pages * PAGE)])


def kv(seed: int, page: int, layer: int) -> torch.Tensor:
    """What a model computes for a page of a prompt."""
    generator = torch.Generator().manual_seed(seed * 1000 + page * 10 + layer)
    return torch.randn((HEADS, PAGE, WIDTH), generator=generator).half()


@dataclass
class Plan:
    """What happens in the next step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)


class Transfers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.port, self.before = AdversarialPort(), device.PORTS["cpu"]
        device.PORTS["cpu"] = lambda _: self.port
        self.gated = Gated()
        self.archive = Archive.open(None, max_ram=1 << 22, max_disk=0)
        self.store = Store(self.archive, self.gated)
        self.memory = torch.zeros(LAYERS, PAGES, PAGE, HEADS, WIDTH, dtype=torch.float16)  # LBNHC
        self.adopted = self.port.adopt(self.memory)
        self.views = [layer.transpose(1, 2) for layer in self.memory]
        self.half: Any = WorkerHalf(self.store, namespace(), 0, PAGE, timeout=1e6, keeps=False)  # type: ignore[arg-type]
        self.half._loader.shutdown()
        self.half._loader = self.gated
        self.half.register({f"layer {at}": view for at, view in enumerate(self.views)})
        self.half._pages.pinned._kept = 0  # so that a block is at hand only while copies from it may run
        self.free = list(range(PAGES))
        self.running: list[Request] = []
        self.loading: dict[str, Request] = {}
        self.held: dict[str, Request] = {}
        self.stored: set[int] = set()  # seeds whose whole prompt was handed to the store
        self.plan, self.count = Plan(), 0
        pieces = DeviceLoading.pieces.__defaults__
        self._pieces, DeviceLoading.pieces.__defaults__ = pieces, (2 * PAGE * HEADS * WIDTH * 2 * LAYERS,)

    def teardown(self) -> None:
        try:
            for _ in range(3):
                self.step(True)
            self.run_puts()
            while self.loading:
                while self.gated.waiting:
                    self.gated.advance(0)
                for stream in self.port.busy():
                    stream.run_to(None)
                self.step(True)
            self.port.synchronize()  # the checks write over pages of requests
            for seed in sorted(self.stored):
                self.check_stored(seed)
            assert self.port.faults == []
        finally:
            self.half.close()
            self.archive.close()
            device.PORTS["cpu"] = self.before
            DeviceLoading.pieces.__defaults__ = self._pieces

    # ---- vLLM ----

    def allocate(self, seed: int, count: int) -> Request:
        self.count += 1
        taken, self.free = self.free[:count], self.free[count:]
        return Request(f"request {self.count}", seed, taken)

    @precondition(lambda self: len(self.free) >= MOST)
    @rule(seed=st.integers(0, 3), count=st.integers(1, MOST))
    def arrive(self, seed: int, count: int) -> None:
        self.running.append(self.allocate(seed, count))

    @precondition(lambda self: self.stored and len(self.free) >= MOST)
    @rule(data=st.data())
    def hit(self, data: Any) -> None:
        """A request that is found in the store."""
        seed = data.draw(st.sampled_from(sorted(self.stored)))
        blocks = chain(tokens_of(seed, MOST), range(PAGE, MOST * PAGE + 1, PAGE), namespace())
        refs = self.archive.lookup([block.exact for block in blocks])
        if len(refs) == MOST:
            request = self.allocate(seed, MOST)
            self.loading[request.name] = request
            self.plan.loads.append(Load(request.prefix(MOST), 0, (refs,), apart=True))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9))
    def preempt(self, which: int) -> None:
        """Its pages are anybody's from now on."""
        request = self.running.pop(which % len(self.running))
        self.plan.preempted.add(request.name)
        self.plan.saves = [save for save in self.plan.saves if save.prefix.request_id != request.name]
        self.free += request.pages

    @precondition(lambda self: any(request.computed for request in self.running))
    @rule()
    def finish(self) -> None:
        request = next(request for request in self.running if request.computed)
        self.running.remove(request)
        self.held[request.name] = request
        end = request.saved
        self.plan.saves.append(Save(request.prefix(end), end * PAGE, last=True))

    @rule(loads_first=st.booleans())
    def step(self, loads_first: bool) -> None:
        """One step of vLLM, with the calls of its runner in their order."""
        plan, self.plan = self.plan, Plan()
        step = Step(loads=plan.loads, saves=plan.saves, preempted=frozenset(plan.preempted))
        self.half.fence(step)
        if loads_first:
            self.half.start(step)
        for request in self.running:
            self.compute(request)
            if request.computed > request.saved:
                step.saves.append(Save(request.prefix(request.computed), request.saved * PAGE))
                request.saved = request.computed
                if request.saved == MOST:
                    self.stored.add(request.seed)
        if not loads_first:
            self.half.start(step)
        self.half.save(step)
        for name in self.half.take_saved():
            self.free += self.held.pop(name).pages
        arrived, failed = self.half.take_arrived(), self.half.take_failed()
        for name in arrived:
            request = self.loading.pop(name)
            if failed.isdisjoint(request.pages):
                request.computed = request.saved = len(request.pages)
                self.running.append(request)
            else:
                self.free += request.pages

    def compute(self, request: Request) -> None:
        """Attend to what a request has, which must be right, and compute its next page."""
        for page in range(request.computed):
            for layer, view in enumerate(self.views):
                there = view[request.pages[page]]
                self.port.use(there, writes=False)
                assert torch.equal(there, kv(request.seed, page, layer)), (request, page, layer)
        if request.computed < len(request.pages):
            for layer, view in enumerate(self.views):
                there = view[request.pages[request.computed]]
                self.port.use(there, writes=True)
                there.copy_(kv(request.seed, request.computed, layer))
            request.computed += 1

    # ---- the others ----

    @precondition(lambda self: self.gated.waiting)
    @rule(which=st.integers(0, 9))
    def loader_goes_on(self, which: int) -> None:
        self.gated.advance(which)

    @precondition(lambda self: self.port.busy())
    @rule(which=st.integers(0, 9))
    def device_goes_on(self, which: int) -> None:
        busy = self.port.busy()
        busy[which % len(busy)].advance()

    @precondition(lambda self: self.half._apart)
    @rule(which=st.integers(0, 9))
    def time_is_over(self, which: int) -> None:
        loads = list(self.half._apart.values())
        loads[which % len(loads)]._deadline = 0.0

    @rule()
    def run_puts(self) -> None:
        puts, self.store.puts = self.store.puts, []
        for put in puts:
            put()
        self.archive.flush()

    def check_stored(self, seed: int) -> None:
        """What is stored of a prompt is what was computed."""
        blocks = chain(tokens_of(seed, MOST), range(PAGE, MOST * PAGE + 1, PAGE), namespace())
        refs = self.archive.lookup([block.exact for block in blocks])
        loading = DeviceLoading(
            self.half._pages, list(range(len(refs))), range(len(refs) * PAGE), 1e18, self.port.current().record()
        )
        for piece in loading.pieces(1 << 20):
            self.archive.load(refs, tokens_of(seed, len(refs)), len(refs) * PAGE, piece)
            piece.arrived()
        loading._give_up()
        for page in range(len(refs)):
            for layer, view in enumerate(self.views):
                assert torch.equal(view[page], kv(seed, page, layer)), (seed, page, layer)

    @initialize()
    def something_is_stored(self) -> None:
        """A prompt, so that there are hits from the beginning."""
        self.arrive(0, MOST)
        for _ in range(MOST + 1):
            self.step(False)
        self.run_puts()


Transfers.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTransfers = Transfers.TestCase
