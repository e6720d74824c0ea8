"""Finding a stored text that begins like another, and how the two relate."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.core.blocks import token_ids
from keepwarm.core.texts import GRID, Outcome, StoredText, TextIndex, TextMatch


def agreed(a: str, b: str) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize(
    ("stored", "text", "outcome"),
    [
        ("abc", "abc", Outcome.EXACT),
        ("abc", "abcd", Outcome.EXTEND),
        ("abc", "abX", Outcome.DIVERGE),
        ("abc", "ab", Outcome.DIVERGE),
        ("abc", "xyz", Outcome.NEW),
        ("", "abc", Outcome.NEW),
    ],
)
def test_outcomes(stored: str, text: str, outcome: Outcome) -> None:
    match = TextMatch.of(stored, text, agreed(stored, text))
    assert match.outcome is outcome
    assert match.share == (agreed(stored, text) / len(stored) if stored else 0.0)


def test_a_stored_text_needs_a_map_of_every_token() -> None:
    with pytest.raises(ValueError, match=r"2 ids need offsets \[2, 2\]"):
        StoredText("ab", token_ids([1, 2]), np.zeros((1, 2), dtype=np.int64))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_what_is_found_is_the_best_but_for_less_than_a_grid(data: st.DataObject) -> None:
    parts = ["a" * GRID, "b" * GRID, "é" * GRID, "c" * (GRID // 2), "🙂"]
    text = st.lists(st.sampled_from(parts), max_size=6).map("".join)
    index: TextIndex[str] = TextIndex(1 << 20)
    stored = data.draw(st.lists(text, max_size=8))
    for one in stored:
        index.put(one, one)
    wanted = data.draw(text)
    best = max((agreed(one, wanted) for one in stored), default=0)
    found = index.find(wanted)
    assert (0 if found is None else agreed(found, wanted)) > best - GRID or best == 0


def test_the_least_recently_used_goes_first_and_nothing_of_others_with_it() -> None:
    head = "h" * GRID
    index: TextIndex[str] = TextIndex(5 * GRID)
    for name in "abc":
        index.put(head + name * GRID, name)
        index.put(head + "a" * GRID, "a")  # used again and again
    assert len(index) == 2
    assert index.find(head + "b" * GRID + "more") in ("a", "c"), "b went; its head is still known"
    assert index.find(head + "a" * GRID) == "a"
    assert index.find(head + "c" * GRID) == "c"
    index.clear()
    assert len(index) == 0
    assert index.find(head) is None


def test_a_search_does_not_look_at_every_text() -> None:
    draw = random.Random(0)
    head = "".join(draw.choices("abc ", k=8 * GRID))

    def hashes_of_a_search(count: int) -> int:
        index: TextIndex[int] = TextIndex(1 << 30)
        for number in range(count):
            index.put(f"{head}{number:0{GRID}}{head}", number)
        looked: list[int] = []
        owners = index._owners

        class Counted(dict[int, str]):
            def __contains__(self, key: object) -> bool:
                looked.append(1)
                return super().__contains__(key)

        index._owners = Counted(owners)
        assert index.find(f"{head}{count // 2:0{GRID}}{head}") == count // 2
        return len(looked)

    assert hashes_of_a_search(10) == hashes_of_a_search(1000)
