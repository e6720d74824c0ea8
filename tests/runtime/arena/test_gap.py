"""An arena knows which positions its windowed layers were not given, and whom it serves all the same."""

from __future__ import annotations

from keepwarm.core.blocks import token_ids
from keepwarm.core.geometry import KVGeometry, LayerGeometry
from keepwarm.runtime.arena.gap import NO_GAP, Gap, first_attended
from keepwarm.runtime.arena.held import Held

PLAIN = KVGeometry((LayerGeometry(1, 8, 8),), "float32")
WINDOWS = KVGeometry((LayerGeometry(1, 8, 8), LayerGeometry(1, 8, 8, 10), LayerGeometry(1, 8, 8, 30)), "float32")


def held(length: int, gap: Gap = NO_GAP) -> Held:
    return Held(b"root", {}, token_ids(range(length)), tuple(range(20, length + 1, 20)), gap)


def test_a_window_begins_before_where_steps_go_on() -> None:
    assert first_attended(None, 100) == 0
    assert first_attended(10, 100) == 91  # the position itself is the tenth
    assert first_attended(10, 5) == 0
    assert first_attended(1, 7) == 7


def test_a_load_leaves_out_what_the_narrowest_window_passed() -> None:
    assert NO_GAP.grown(0, 100, PLAIN) == NO_GAP
    assert NO_GAP.grown(0, 9, WINDOWS) == NO_GAP
    assert NO_GAP.grown(95, 100, WINDOWS) == NO_GAP
    assert NO_GAP.grown(40, 100, WINDOWS) == Gap(40, 91, 100)


def test_gaps_add_up_until_what_lies_before_is_taken_anew() -> None:
    gap = Gap(40, 91, 100)
    assert gap.grown(100, 105, WINDOWS) == gap
    assert gap.grown(100, 200, WINDOWS) == Gap(40, 191, 200)
    assert gap.cut(120) == gap.cut(100) == gap
    assert gap.cut(40) == gap.cut(0) == NO_GAP


def test_a_prompt_is_served_beside_the_gap() -> None:
    arena = held(200, Gap(40, 91, 100))
    served = {length: arena.common(held(length)) for length in (20, 40, 60, 80, 100, 160)}
    assert served == {20: 20, 40: 40, 60: 40, 80: 40, 100: 100, 160: 160}
    assert arena.cut(60).common(held(200)) == 40
    assert held(200).common(held(80)) == 80
