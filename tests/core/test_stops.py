"""Stop strings in a growing text: where they are first, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepwarm.core.request import MAX_STOP_LENGTH, MAX_STOPS, Decoding
from keepwarm.core.stops import StopString, StopStrings
from keepwarm.errors import ConfigError

FEW = st.text(alphabet="ab", max_size=12)


@given(pieces=st.lists(FEW, max_size=12), texts=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4))
def test_the_first_stop_is_found_and_what_may_begin_one_is_held(pieces: list[str], texts: list[str]) -> None:
    stops, said = StopStrings(texts), ""
    for piece in pieces:
        begins = stops.read(piece)
        before, said = len(said), said + piece
        found = [at for text in texts if (at := said.find(text)) >= 0]
        assert begins == (min(found) - before if found else None)
        if found:
            return
        beginnings = [text[:size] for text in texts for size in range(1, len(text))]
        assert stops.held == max((len(one) for one in beginnings if said.endswith(one)), default=0)


class Looked(str):
    """Counts how often somebody looks into it."""

    __slots__ = ("looks",)
    looks: int

    def __getitem__(self, key: Any) -> str:
        self.looks = getattr(self, "looks", 0) + 1
        return super().__getitem__(key)


@pytest.mark.parametrize("text", ["a" * 999 + "b", "ab" * 499 + "c"])
def test_the_work_grows_with_the_text_and_not_with_the_stop(text: str) -> None:
    """Thousands of tokens that all but end the answer: each character is looked at a few times."""
    watched, said = Looked(text), text[:-1] * 20
    stop = StopString(watched)
    for at in range(0, len(said), 3):
        assert stop.read(said[at : at + 3]) < 0
    assert watched.looks < 8 * len(said)


def test_stops_are_bounded() -> None:
    assert len(Decoding(stop=["x"] * MAX_STOPS).stop_strings) == MAX_STOPS
    with pytest.raises(ConfigError, match="stop may hold 64 texts, got 65"):
        Decoding(stop=["x"] * (MAX_STOPS + 1))
    with pytest.raises(ConfigError, match="1000 characters, got one of 1001"):
        Decoding(stop="x" * (MAX_STOP_LENGTH + 1))
