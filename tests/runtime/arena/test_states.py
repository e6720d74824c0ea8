"""Recurrent state in an arena: copied both ways, dropped by `seek`, and never followed by what does not follow it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.every_model import make
from tests.helpers.prompts import ids

from keepwarm.core.blocks import token_ids
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.ports import OpenSink
from keepwarm.errors import CorruptRun
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.arena.states import Snapshot, SnapshotSink
from keepwarm.runtime.probe import probe
from keepwarm.runtime.runner import Runner

TOKENS = token_ids(ids(40, 3, 100))


@pytest.fixture(scope="module", params=["qwen3_5_text", "falcon_h1", "lfm2", "nemotron_h"])
def runner(request: pytest.FixtureRequest) -> Runner:
    return Runner(make(request.param), None)


@pytest.fixture
def arena(runner: Runner) -> Callable[[], Arena]:
    kept = probe(runner)
    return lambda: Arena(kept.geometry, len(TOKENS), runner.port, form=kept.form)


def moved(one: Arena, other: Arena, length: int) -> None:
    """Have another arena go on where this one is."""
    snapshot = one.states.take()
    other.take_over(one, length)
    other.seek(length)
    other.states.put(snapshot)


def test_what_was_taken_goes_on_as_what_it_was_taken_of(runner: Runner, arena: Callable[[], Arena]) -> None:
    one, other = arena(), arena()
    runner.extend(TOKENS[:17], one.cache, 0)
    moved(one, other, 17)
    first = runner.step(TOKENS[17:], one.cache, 17)  # changes its own state in place, and no other
    assert torch.equal(first, runner.step(TOKENS[17:], other.cache, 17))


def test_a_snapshot_is_a_copy(runner: Runner, arena: Callable[[], Arena]) -> None:
    one = arena()
    runner.extend(TOKENS[:9], one.cache, 0)
    snapshot = one.states.take()
    before = [layer.copy() for layer in snapshot.layers]
    runner.extend(TOKENS[9:], one.cache, 9)
    assert all(map(np.array_equal, before, snapshot.layers))
    assert any(not np.array_equal(a, b) for a, b in zip(before, one.states.take().layers, strict=True))


def test_it_is_taken_where_it_is_wanted_and_dropped_by_seek(runner: Runner, arena: Callable[[], Arena]) -> None:
    one = arena()
    one.states.wanted = frozenset({9, 30})
    runner.extend(TOKENS[:9], one.cache, 0)
    runner.extend(TOKENS[9:20], one.cache, 9)
    assert [*one.states.taken] == [9]
    one.seek(9)
    assert one.states.position is None
    assert not one.states.taken
    with pytest.raises(RuntimeError, match="would follow the recurrent state of None"):
        runner.extend(TOKENS[9:], one.cache, 9)


def test_an_arena_at_0_begins_anew(runner: Runner, arena: Callable[[], Arena]) -> None:
    one, other = arena(), arena()
    runner.extend(TOKENS[:9], one.cache, 0)
    one.seek(0)
    assert torch.equal(runner.step(TOKENS, one.cache, 0), runner.step(TOKENS, other.cache, 0))


def test_a_step_elsewhere_is_refused(runner: Runner, arena: Callable[[], Arena]) -> None:
    one = arena()
    runner.extend(TOKENS[:9], one.cache, 0)
    with pytest.raises(RuntimeError, match="position 12 would follow the recurrent state of 9"):
        runner.step(TOKENS[12:], one.cache, 12)


def test_one_of_another_form_is_corrupt(runner: Runner, arena: Callable[[], Arena]) -> None:
    wide = Runner(runner.model.to(torch.bfloat16), None)
    try:
        kept = probe(wide)
        other = Arena(kept.geometry, len(TOKENS), wide.port, form=kept.form)
        wide.extend(TOKENS[:9], other.cache, 0)
    finally:
        runner.model.to(torch.float32)
    with pytest.raises(CorruptRun, match="other shapes or dtypes"):
        arena().states.put(other.states.take())


def damaged(snapshot: Snapshot, change: Callable[[Any], Any]) -> Snapshot:
    return replace(snapshot, layers=(change(snapshot.layers[0].copy()), *snapshot.layers[1:]))


def test_what_cannot_be_read_is_corrupt(runner: Runner, arena: Callable[[], Arena]) -> None:
    one = arena()
    runner.extend(TOKENS[:9], one.cache, 0)
    snapshot = one.states.take()

    def other_text(data: Any) -> Any:
        data[8:12] = ord("#")
        return data

    def far(data: Any) -> Any:
        data[:8] = 255
        return data

    for change in (
        lambda data: data[:-4],
        lambda data: np.append(data, data[:3]),
        lambda data: data[:5],
        other_text,
        far,
    ):
        with pytest.raises(CorruptRun, match="recurrent state cannot be read"):
            one.states.put(damaged(snapshot, change))
    with pytest.raises(CorruptRun, match="layers, the model has"):
        one.states.put(replace(snapshot, layers=snapshot.layers[:-1]))


def test_a_sink_takes_what_comes_and_no_kv(runner: Runner, arena: Callable[[], Arena]) -> None:
    one = arena()
    runner.extend(TOKENS[:9], one.cache, 0)
    snapshot, sink = one.states.take(), SnapshotSink(9)
    sink.take_form(snapshot.geometry)
    for layer in range(len(snapshot.layers)):
        for kv in (0, 1):
            sink.fill(layer, kv, 8, snapshot.read(layer, kv, 8, 9))
    assert all(map(np.array_equal, sink.snapshot.layers, snapshot.layers))
    assert not isinstance(one, OpenSink)  # an arena takes KV of its own form alone
    with pytest.raises(CorruptRun, match="a recurrent state was expected"):
        sink.take_form(KVGeometry.uniform(2, 2, 16, "float32"))
