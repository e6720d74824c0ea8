"""Forms that the tiny models do not have: cells in another order, keys alone, other sequences, bytes cut off."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepwarm.integrations.llamacpp.form import CELL, Form, Plane, Section, lay_out, read_state
from keepwarm.integrations.llamacpp.memory import StateSink, StateSource

TOKENS = 7
ROWS = Section(False, (Plane(1, 12), Plane(8, 10)), (Plane(1, 8), Plane(8, 6)))
TURNED = Section(True, (Plane(1, 12),), (Plane(1, 8, 2),))
KEYS = Section(False, (Plane(1, 13), Plane(1, 6)), ())
TAIL = np.frombuffer(b"\xffwhat a recurrent layer keeps", np.uint8)


def filled(form: Form, tail: np.ndarray = TAIL) -> np.ndarray:
    data, parts = lay_out(form, TOKENS, b"", tail)
    random = np.random.default_rng(0)
    for part in (each for section in parts for each in section):
        part[:] = random.integers(0, 256, len(part))
    return data


@given(st.lists(st.sampled_from([ROWS, TURNED, KEYS]), max_size=3), st.booleans())
def test_what_is_put_together_is_what_was_read(sections: list[Section], with_tail: bool) -> None:
    tail = TAIL if with_tail else TAIL[:0]
    form = Form(tuple(sections), with_tail)
    data = filled(form, tail)
    state = read_state(data, TOKENS, 9)
    assert state.form == form
    source, sink = StateSource(state), StateSink(form, TOKENS, b"", state.tail)
    for layer in range(len(form.geometry.layers)):
        for kv in (0, 1):
            for start, end in ((0, 3), (3, TOKENS)):
                sink.fill(layer, kv, start, source.read(layer, kv, start, end))
    assert np.array_equal(sink.finish(), data)


@pytest.mark.parametrize("section", [ROWS, TURNED, KEYS])
def test_rows_come_in_the_order_of_positions(section: Section) -> None:
    data = filled(Form((section,), False), TAIL[:0])
    straight = StateSource(read_state(data, TOKENS, 1))
    order = np.random.default_rng(1).permutation(TOKENS)
    cells = data[8 : 8 + CELL.itemsize * TOKENS].view(CELL)
    cells["position"] = order
    shuffled = StateSource(read_state(data, TOKENS, 1))
    for layer in range(len(straight.geometry.layers)):
        for kv in (0, 1):
            whole = straight.read(layer, kv, 0, TOKENS)
            assert np.array_equal(shuffled.read(layer, kv, 0, TOKENS)[:, order], whole)


def test_cells_of_others_and_missing_bytes_are_no_section() -> None:
    form = Form((ROWS,), False)
    for change in ("sequences", "sequence", "position"):
        data = filled(form, TAIL[:0])
        data[8 : 8 + CELL.itemsize * TOKENS].view(CELL)[change][3] = 5
        assert read_state(data, TOKENS, 9).sections == ()
    data = filled(form, TAIL[:0])
    assert read_state(data[:60], TOKENS, 9).sections == ()
    assert read_state(data, TOKENS - 1, 9).sections == ()
    assert len(read_state(data, TOKENS, 0).tail) == len(data)
