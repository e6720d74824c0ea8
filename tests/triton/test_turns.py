"""A step that reads and writes a device's memory by address waits for who used it before, layer by layer."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.helpers.on_triton import SMALL, OnTriton
from tests.helpers.prompts import ids

from keepwarm.core.blocks import token_ids
from keepwarm.core.ports import Bytes
from keepwarm.runtime.arena.arena import Arena
from keepwarm.testing.device import AdversarialPort

PROMPT = ids(30, 1, SMALL)
START = 20


@pytest.fixture(scope="module")
def made() -> OnTriton:
    return OnTriton("qwen3", port=AdversarialPort())


@pytest.fixture(scope="module")
def stored(made: OnTriton) -> tuple[list[Bytes], torch.Tensor]:
    """The keys and values of a prompt's beginning, and the logits after it."""
    arena = made.arena(32)
    logits = made.run(PROMPT, [START], arena)[START:]
    return [layer.plane(kv).save(0, START).copy() for layer in arena.layers for kv in (0, 1)], logits


def loaded(made: OnTriton, rows: list[Bytes]) -> Arena:
    """An arena to which copies are under way. They begin when something waits for them."""
    arena = made.arena(32)
    for number, data in enumerate(rows):
        arena.layers[number // 2].plane(number % 2).fill(0, data)
    arena.advance(START)
    return arena


def step(made: OnTriton, arena: Arena, *, asks: bool) -> torch.Tensor:
    rest = [token_ids(PROMPT[START:])]
    arriving = arena.arriving if asks else None
    return made.decoder.step(rest, [START], [arena.sequenced()], range(10), arriving)


def test_copies_under_way_are_waited_for(made: OnTriton, stored: tuple[list[Bytes], torch.Tensor]) -> None:
    rows, logits = stored
    assert torch.equal(step(made, loaded(made, rows), asks=True), logits)
    arena = loaded(made, rows)
    assert not torch.equal(step(made, arena, asks=False), logits), "nothing shows a missing wait"
    for number in range(len(rows)):  # they end before the memory is freed, which later tests would otherwise see
        arena.read(number // 2, number % 2, 0, START)


def test_rows_that_were_put_off_are_copied(made: OnTriton, stored: tuple[list[Bytes], torch.Tensor]) -> None:
    rows, logits = stored
    arena = made.arena(32)
    for number, data in enumerate(rows):
        arena.fill(number // 2, number % 2, 0, data)
    for layer in arena.layers:
        layer.length = START
    assert arena.is_late
    assert torch.equal(step(made, arena, asks=True), logits)
    assert not arena.is_late


def test_what_a_step_wrote_is_read_by_other_threads(made: OnTriton, stored: tuple[list[Bytes], torch.Tensor]) -> None:
    rows, _ = stored
    arena = loaded(made, rows)
    step(made, arena, asks=True)
    found: list[Bytes] = []
    thread = threading.Thread(target=lambda: found.append(arena.read(0, 0, 0, len(PROMPT))))
    thread.start()
    thread.join()
    whole = made.arena(32)
    made.run(PROMPT, [], whole)
    assert (found[0] == whole.read(0, 0, 0, len(PROMPT))).all()
    assert isinstance(made.port, AdversarialPort)
    assert made.port.faults == []
