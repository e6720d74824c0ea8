"""The files of slots, and which slot a request gets: no server is needed."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from keepwarm.core.blocks import token_ids
from keepwarm.integrations.llamacpp.form import Form, Plane, Section, Unreadable, read_state
from keepwarm.integrations.llamacpp.memory import StateSink
from keepwarm.integrations.llamaserver.server import SlotState
from keepwarm.integrations.llamaserver.slot_file import SlotPlace, read_slot
from keepwarm.integrations.llamaserver.table import NOTHING, Slot, Table, choose

HEAD = b"qsgg" + struct.pack("<I", 3)
KEYS, VALUES = Plane(1, 8), Plane(1, 4)


def ids(*given: int) -> object:
    return token_ids([*given])


@pytest.mark.parametrize("streams", [1, 3])
def test_a_file_that_was_written_is_read(tmp_path: Path, streams: int) -> None:
    form = Form((Section(False, (KEYS,), (VALUES,), streams),), False)
    tokens = token_ids(np.arange(5))
    place = SlotPlace(form, HEAD, tmp_path / "slot")
    sink = place.sink(5, np.empty(0, np.uint8))
    rows = np.arange(40, dtype=np.uint8).reshape(1, 5, 8)
    sink.fill(0, 0, 0, rows)
    sink.fill(0, 1, 0, rows[:, :, :4])
    assert place.put(sink.finish(), tokens)
    found = read_slot(tmp_path / "slot")
    assert found.head == HEAD
    assert found.tokens.tolist() == [0, 1, 2, 3, 4]
    assert read_state(found.state, 5, 9).form == form


@pytest.mark.parametrize("at", [0, 1, 2])
def test_the_stream_of_a_slot_does_not_matter(at: int) -> None:
    form = Form((Section(False, (KEYS,), (VALUES,)),), False)
    sink = StateSink(form, 2, b"", np.empty(0, np.uint8))
    sink.fill(0, 0, 0, np.ones((1, 2, 8), np.uint8))
    sink.fill(0, 1, 0, np.ones((1, 2, 4), np.uint8))
    one = sink.finish().tobytes()
    cells = bytearray(one[4:])
    for cell in (12, 24):  # the cells' sequence is the slot's number
        cells[cell : cell + 4] = struct.pack("<I", at)
    several = struct.pack("<I", 3) + bytes(4 * at) + bytes(cells) + bytes(4 * (2 - at))
    found = read_state(np.frombuffer(several, np.uint8), 2, 9)
    assert found.form == Form((Section(False, (KEYS,), (VALUES,), 3),), False)
    assert found.form.describe() == form.describe()


def packed(tokens: list[int], media: int = 0) -> bytes:
    listed = [0xFFFFFFFF, 1, len(tokens), *tokens, media]
    return HEAD + struct.pack(f"<I{len(listed)}I", len(listed), *listed) + b"state"


def test_packed_token_ids_are_read(tmp_path: Path) -> None:
    (tmp_path / "slot").write_bytes(packed([7, 8]))
    found = read_slot(tmp_path / "slot")
    assert found.tokens.tolist() == [7, 8]
    assert found.state.tobytes() == b"state"


@pytest.mark.parametrize(
    "data",
    [b"", b"qs", b"GGUF" + bytes(20), packed([7, 8], media=1), HEAD + struct.pack("<I", 9), HEAD + b"\2\0\0\0\xff\xff"],
)
def test_what_is_no_slot_of_text_is_unreadable(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "slot").write_bytes(data)
    with pytest.raises(Unreadable):
        read_slot(tmp_path / "slot")


def slot(number: int, tokens: list[int], tenant: str | None = None, used: float = 0.0) -> Slot:
    return Slot(number, token_ids(tokens) if tokens else NOTHING, len(tokens), 0, tenant, used)


def test_a_request_gets_the_slot_with_its_longest_beginning() -> None:
    slots = [slot(0, [1, 2]), slot(1, [1, 2, 3, 4]), slot(2, [])]
    assert choose(slots, token_ids([1, 2, 3, 9]), None) == (slots[1], 3)


def test_a_slot_that_goes_on_differently_is_left_alone() -> None:
    slots = [slot(0, [1, 5, 6, 7, 8, 9], used=3.0), slot(1, [], used=4.0)]
    assert choose(slots, token_ids([1, 2, 3]), None) == (slots[1], 0)
    slots = [slot(0, [1, 5, 6, 7, 8, 9], used=3.0), slot(1, [4, 4, 4], used=2.0)]
    assert choose(slots, token_ids([1, 2, 3]), None) == (slots[1], 0)


def test_no_tenant_has_a_beginning_in_anothers_slot() -> None:
    slots = [slot(0, [1, 2, 3], "one"), slot(1, [1, 2], "two")]
    assert choose(slots, token_ids([1, 2, 3, 4]), "two") == (slots[1], 2)
    assert choose(slots, token_ids([1, 2, 3, 4]), "three")[1] == 0


def test_a_server_that_was_started_anew_is_noticed() -> None:
    table = Table(2)
    states = [SlotState(0, 5, 7, False), SlotState(1, 0, -1, False)]
    table.look(states)
    assert not table.is_another(states)
    assert table.is_another([SlotState(0, 0, -1, False), SlotState(1, 0, -1, False)])
    assert table.is_another(states[:1])
