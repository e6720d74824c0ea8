"""Steps that are repeated by graphs have the bits of single launches, and write nothing else. `recorder` stands for
CUDA's graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.models import tiny
from tests.helpers.on_triton import SMALL, OnTriton
from tests.helpers.prompts import ids
from tests.triton.recorder import Recorder

from keepwarm import Batcher, Engine
from keepwarm.core.blocks import token_ids
from keepwarm.runtime import device
from keepwarm.runtime.gpu_kernels import graphs
from keepwarm.runtime.gpu_kernels.graphs import Graphs, form_of, padded, repeats
from keepwarm.runtime.gpu_kernels.launch import Launch
from keepwarm.runtime.gpu_kernels.step import Plan, arranged
from keepwarm.runtime.gpu_kernels.tiles import Tiles
from keepwarm.runtime.native.places import MOVE, NO_MOVES, PAGE, Region, Sequenced, works
from keepwarm.runtime.native.proof import variance
from keepwarm.testing.device import AdversarialPort

CPU = torch.device("cpu")
FAMILIES = [
    ("qwen3", torch.float32),
    ("gemma2", torch.bfloat16),
    ("cohere2", torch.float32),
    ("olmo2", torch.float16),
    ("qwen2-moe", torch.float32),
]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda p: f"{p[0]}-{p[1]}")
def each_family(request: pytest.FixtureRequest) -> OnTriton:
    return OnTriton(*request.param)


@pytest.fixture(scope="module")
def made() -> OnTriton:
    return OnTriton("qwen3", num_hidden_layers=1)


class Memory:
    """Pages of random keys and values in two regions. Sequences `a` and `b` begin with the same 64 positions, and `c`
    is in the other region."""

    def __init__(self, made: OnTriton, pages: int) -> None:
        layer, size = made.geometry.layers[0], made.geometry.itemsize
        shape = 2, len(made.geometry.layers), 2, layer.kv_heads, pages * PAGE, layer.key_dim
        self.numbers = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(made.decoder.dtype)
        head = pages * PAGE * layer.key_dim * size
        self.regions = [Region.even(half.data_ptr(), layer.kv_heads * head, head) for half in self.numbers]
        half = pages // 2
        self.tables = {"a": [*range(half)], "b": [*range(8), *range(half, pages)], "c": [*range(pages)][::-1]}

    def sequence(self, name: str, moves: Any = NO_MOVES) -> Sequenced:
        places = np.array(self.tables[name], dtype=np.int64) * PAGE
        first, other = self.regions if name != "c" else self.regions[::-1]
        return Sequenced((first, other) if len(moves) else (first,), places, moves)

    def row(self, name: str, position: int) -> torch.Tensor:
        """The keys and values of a position."""
        return self.numbers[int(name == "c"), ..., self.tables[name][position // PAGE] * PAGE + position % PAGE, :]


class Beside:
    """A decoder with graphs beside one without, each over memory of its own that begins alike."""

    def __init__(self, made: OnTriton, pages: int = 32, recorder: Any = None) -> None:
        self.recorder = recorder or Recorder()
        self.mine, self.theirs = made.decoder.apart(), made.decoder.apart()
        self.mine._graphs = Graphs(CPU, lambda: self.recorder)
        self.memories = Memory(made, pages), Memory(made, pages)
        self._logits: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._steps = 0

    def run(self, *, rows: int = 1, moves: Any = NO_MOVES, **positions: int) -> bool:
        """Run some tokens of sequences, and want the logits of each one's last. Return whether logits and all memory
        are the same, and logits of earlier steps still what they were. What a graph's step does not bring there is
        garbage."""
        for graph in self.mine._graphs._kept.values():
            graph.numbers.fill_(-1)
        self._steps += 1
        tokens = [
            token_ids([(self._steps * 7919 + at) % SMALL for at in range(first, first + rows)])
            for first in positions.values()
        ]
        starts, wanted = list(positions.values()), range(rows - 1, rows * len(positions), rows)
        with torch.inference_mode():
            mine, theirs = (
                decoder.step(tokens, starts, [memory.sequence(name, moves) for name in positions], wanted)
                for decoder, memory in zip((self.mine, self.theirs), self.memories, strict=True)
            )
        self._logits.append((mine, mine.clone()))
        same = all(torch.equal(logits, copy) for logits, copy in self._logits)
        return same and torch.equal(mine, theirs) and torch.equal(*(memory.numbers for memory in self.memories))

    @property
    def graphs(self) -> int:
        return len(self.mine._graphs._kept)


def test_several_tokens_of_which_the_last_is_wanted(made: OnTriton) -> None:
    beside = Beside(made)
    assert all(beside.run(rows=5, a=first) for first in (70, 76, 81))
    assert (beside.recorder.recorded, beside.recorder.replays) == (1, 2)
    assert all(beside.run(rows=3, a=first, c=first - 9) for first in (90, 93, 96))
    assert beside.recorder.replays >= 4


def test_moves_are_made_before_a_graph(made: OnTriton) -> None:
    beside = Beside(made)
    for source in (100, 120, 140, 150):
        assert beside.run(a=50, moves=np.array([(1 << 32 | source, 16, 5), (1 << 32 | source + 9, 40, 3)], MOVE))
    assert (beside.recorder.recorded, beside.recorder.replays) == (1, 3)


def test_two_sequences(made: OnTriton) -> None:
    beside = Beside(made)
    assert all(beside.run(a=position, c=position + 40) for position in (22, 23, 24))
    assert (beside.recorder.recorded, beside.recorder.replays) == (1, 2)


@pytest.mark.slow
def test_batches_that_change(each_family: OnTriton) -> None:
    """Sequences grow past units and parts of positions, come and go, and change places."""
    beside = Beside(each_family, 160)
    assert beside.run(a=100, b=70, c=9)
    assert beside.run(a=101, b=71, c=10)
    assert beside.run(c=11)
    assert beside.run(a=127, b=72, c=12)
    assert beside.run(c=13)
    assert beside.run(a=511, b=191, c=63)
    assert beside.run(a=512, b=192, c=64)
    assert beside.run(c=65)
    assert beside.run(c=66, b=193, a=513)
    assert (beside.recorder.recorded, beside.recorder.replays) == (2, 7)


@pytest.mark.slow
def test_forms_that_change(made: OnTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the least room for each array, growing sequences pass from graph to graph."""
    for name in ("_PAGES", "_REGIONS", "_MEMBERS", "_JOBS", "_RESULTS"):
        monkeypatch.setattr(graphs, name, 1)
    beside = Beside(made, 160)
    assert all(beside.run(a=position) for position in (62, 63, 64, 65, 510, 511, 512, 513, 514))
    assert beside.graphs == 4
    assert all(beside.run(a=position) for position in (66, 67, 60))
    assert beside.recorder.recorded == 4


def test_graphs_go_when_the_rotary_tables_grow(made: OnTriton) -> None:
    beside = Beside(made, 1040)
    assert all(beside.run(c=position) for position in (20, 21, 22))
    assert beside.graphs == 1
    assert beside.run(a=4099)
    assert beside.graphs == 0
    assert all(beside.run(c=position) for position in (23, 24, 25))
    assert (beside.recorder.recorded, beside.recorder.replays) == (2, 4)


def test_the_stand_in_keeps_what_python_and_the_host_told_it() -> None:
    """As a CUDA graph does: numbers on the device are read anew, all else is as it was."""
    table, tokens, factors = torch.randn(8, 16), torch.tensor([1, 2]), [2.0]
    launch = Launch(torch.float32, False, Tiles.of(torch.float32, 1))
    replay, found = Recorder().record(lambda: launch.embed(tokens, table, factors[0]))
    factors[0] = 3.0
    tokens.copy_(torch.tensor([5, 6]))
    replay()
    assert torch.equal(found, table[5:7] * 2.0)
    replay, narrow = Recorder().record(lambda: found.to(torch.float16)[1:])
    replay()
    assert torch.equal(narrow, found[1:].half())
    with pytest.raises(AssertionError, match="waits for the device"):
        Recorder().record(lambda: launch.embed(tokens, table, float(tokens[0])))


def test_the_stand_in_keeps_tables_that_were_replaced(made: OnTriton) -> None:
    """So the test of growing tables shows something."""
    beside = Beside(made)
    assert all(beside.run(c=position) for position in (20, 21, 22))
    for decoder in (beside.mine, beside.theirs):
        decoder._tables.pairs = [(cosine.roll(1, 0), sine.roll(1, 0)) for cosine, sine in decoder._tables.pairs]
    assert not beside.run(c=23)
    beside.mine._graphs.drop()
    assert beside.run(c=23)


class Damaging(Recorder):
    """A replay is followed by a damage to its result."""

    def __init__(self, damage: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self._damage = damage

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        replay, found = super().record(run)

        def damaged() -> None:
            replay()
            with torch.inference_mode():
                self._damage(found)

        return damaged, found


@pytest.mark.parametrize("what", ["a row", "a key"])
def test_a_graph_with_other_bits_is_not_used(made: OnTriton, what: str, caplog: pytest.LogCaptureFixture) -> None:
    beside = Beside(made)
    key = beside.memories[0].row("c", 21)[0, 0, 0]
    beside.recorder = Damaging(lambda rows: (rows[0] if what == "a row" else key)[0].add_(1.0))
    assert all(beside.run(c=position) for position in (20, 21, 22, 23))
    assert (beside.recorder.recorded, beside.recorder.replays, beside.graphs) == (1, 1, 0)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "please report this" in caplog.text


def test_steps_go_on_where_nothing_can_be_recorded(made: OnTriton, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Recorder):
        def record(self, run: Callable[[], torch.Tensor]) -> Any:
            super().record(run)
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    beside = Beside(made, recorder=Failing())
    assert all(beside.run(c=position) for position in (20, 21, 22, 23))
    assert (beside.recorder.recorded, beside.graphs) == (1, 0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "not permitted" in caplog.text


def test_few_graphs_are_kept(made: OnTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    """One makes way for a form that comes often."""
    monkeypatch.setattr(graphs, "_MOST", 1)
    monkeypatch.setattr(graphs, "_OFTEN", 3)
    beside = Beside(made)
    assert all(beside.run(c=position) for position in (20, 21))
    assert all(beside.run(a=20, c=position) for position in (22, 23))
    assert beside.run(c=24)
    assert (beside.recorder.recorded, beside.recorder.replays) == (1, 2)
    assert beside.run(a=21, c=25)
    assert (beside.recorder.recorded, beside.graphs) == (2, 1)
    assert all(beside.run(c=position) for position in (26, 27))
    assert (beside.recorder.recorded, beside.recorder.replays) == (2, 3)


def test_without_memory_a_step_is_recorded_later(made: OnTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Recorder):
        tries = 0

        def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
            self.tries += 1
            if self.tries == 1:
                raise torch.OutOfMemoryError("out of memory")
            return super().record(run)

    monkeypatch.setattr(graphs, "_OFTEN", 1)
    recorder = Full()
    beside = Beside(made, recorder=recorder)
    assert all(beside.run(c=position) for position in range(20, 24))
    assert (recorder.tries, recorder.recorded) == (1, 0)
    assert all(beside.run(c=position) for position in (24, 25))
    assert (recorder.tries, recorder.recorded) == (2, 1)


def test_decoders_apart_share_no_graphs(made: OnTriton) -> None:
    beside = Beside(made)
    assert all(beside.run(c=position) for position in (20, 21))
    other = beside.mine.apart()
    assert other._graphs._kept == {}
    other._graphs.drop()
    assert beside.graphs == 1


def planned(
    starts: list[int],
    ends: list[int],
    wanted: Any = None,
    most: int = 1000,
    moves: Any = NO_MOVES,
    *,
    whole: bool = False,
) -> Plan:
    """A step of sequences that have their own pages."""
    region = Region(0, 0, 0, (0, 0))
    tables = [np.arange(i << 16, (i << 16) + end, PAGE, dtype=np.int64) for i, end in enumerate(ends)]
    placed = works(starts, ends, [Sequenced((region,), table, moves) for table in tables])
    at = np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)])
    return arranged(at, at, placed, range(len(at)) if wanted is None else wanted, {None, 70}, 16, most, whole=whole)


def test_which_steps_are_repeated() -> None:
    assert repeats(planned([9], [10]))
    assert repeats(planned([9] * 256, [10] * 256))
    assert not repeats(planned([9] * 257, [10] * 257))
    assert repeats(planned([9], [15], wanted=[5], whole=True))
    assert not repeats(planned([9], [15], wanted=[5])), "not all rows go through the last layer"
    assert not repeats(planned([600] * 3, [601] * 3, most=4)), "attention takes several goes"
    moved = planned([9], [10], moves=np.array([(8, 0, 1)], MOVE))
    assert repeats(moved)
    assert not padded(moved).moves.size


def test_steps_of_one_form() -> None:
    """Rows come in powers of two, and positions in large steps."""
    forms = {form_of(padded(planned([9] * rows, [10] * rows))) for rows in range(1, 65)}
    assert len(forms) < 15
    assert {form[0] for form in forms} == {1, 2, 4, 8, 16, 32, 64}
    assert len({form_of(padded(planned([at], [at + 1]))) for at in range(0, 4096, 37)}) == 1


@pytest.mark.slow
def test_the_self_test_at_load_runs_through_graphs(each_family: OnTriton) -> None:
    recorder, decoder = Recorder(), each_family.decoder.apart()
    decoder._graphs = Graphs(CPU, lambda: recorder)
    assert variance(decoder, each_family.geometry, SMALL, form=each_family.form, least=300) == ""
    assert recorder.replays > recorder.recorded > 0


def test_copies_under_way_are_waited_for() -> None:
    port, recorder, prompt = AdversarialPort(), Recorder(), ids(30, 1, SMALL)
    made = OnTriton("qwen3", port=port)
    first, last = made.arena(32), len(prompt) - 1
    logits = made.run(prompt, [], first)[last:]
    rows = [layer.plane(kv).save(0, last).copy() for layer in first.layers for kv in (0, 1)]
    made.decoder._graphs = Graphs(CPU, lambda: recorder)
    for _ in range(3):
        arena = made.arena(32)
        for number, data in enumerate(rows):
            arena.layers[number // 2].plane(number % 2).fill(0, data)
        arena.advance(last)
        step = [token_ids(prompt[last:])], [last], [arena.sequenced()], [0]
        assert torch.equal(made.decoder.step(*step, arena.arriving), logits)
    assert (recorder.recorded, recorder.replays, port.faults) == (1, 2, [])


@pytest.mark.slow
@pytest.mark.parametrize("port", ["host", "adversarial"])
def test_requests_answer_alike(port: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and in a batch, with graphs and without."""
    if port == "adversarial":
        monkeypatch.setitem(device.PORTS, "cpu", AdversarialPort)
    recorder, how = Recorder(), {"max_new_tokens": 6, "ignore_eos": True, "trace": True}
    prompts = [[*ids(48, 1, SMALL), *ids(5 + i, 10 + i, SMALL)] for i in range(3)]
    model = tiny("llama", vocab_size=SMALL)
    with Engine.from_pretrained((model, tokenizer), attention="triton", store=tmp_path, max_pages="2MiB") as engine:
        alone = [engine.generate(prompt, reuse="off", **how) for prompt in prompts]
        decoder: Any = engine.pipeline.model.runner.lean
        decoder._graphs = Graphs(CPU, lambda: recorder)
        found = [engine.generate(prompt, **how) for prompt in prompts]
        assert recorder.replays > recorder.recorded == 1
        with Batcher(engine) as batcher:
            found += [ticket.result(120) for ticket in [batcher.submit(prompt, **how) for prompt in prompts]]
        assert recorder.recorded > 1, "steps of the batch are recorded, too"
    assert [each.logits_digest for each in found] == [each.logits_digest for each in alone] * 2
