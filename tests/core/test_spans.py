"""Labels of exactness, their order, and the modes a request may ask for."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepwarm.core.results import Explanation, Generation
from keepwarm.core.spans import Exactness, MissReason, Reuse, Segment, SegmentKind, weakest
from keepwarm.errors import ConfigError


def test_labels_are_ordered_from_strongest_to_weakest() -> None:
    assert [label.label for label in sorted(Exactness)] == ["exact", "prefix", "quantized", "blended"]


@given(st.lists(st.sampled_from([*Exactness])), st.sampled_from([*Exactness]))
def test_a_part_never_makes_the_whole_stronger(labels: list[Exactness], another: Exactness) -> None:
    assert weakest([*labels, another]) == max(weakest(labels), another)


def test_nothing_reused_is_exact() -> None:
    assert weakest([]) is Exactness.EXACT


@pytest.mark.parametrize("mode", ["off", "exact", "prefix", "chunks"])
def test_modes_parse(mode: str) -> None:
    assert Reuse.parse(mode) is Reuse(mode)
    assert Reuse.parse(Reuse(mode)) is Reuse(mode)


@pytest.mark.parametrize("mode", ["EXACT", "", "fuzzy"])
def test_unknown_modes_are_refused_with_the_known_ones(mode: str) -> None:
    with pytest.raises(ConfigError, match="'off', 'exact', 'prefix', 'chunks'"):
        Reuse.parse(mode)


def test_results_are_json() -> None:
    segment = Segment(SegmentKind.SYSTEM, 0, 4)
    explanation = Explanation(9, 4, {"ram": 4}, "exact", (segment,), (4, 9), 4, None)
    assert json.loads(json.dumps(explanation.to_dict()))["segments"][0]["kind"] == "system"
    assert json.loads(json.dumps(MissReason.CUTS)) == "cuts_differ"


def test_rates_of_a_generation() -> None:
    made = Generation("ab", (1, 2, 3), 10, 4, {"ram": 4}, 100.0, 1100.0, {}, "exact", "length", 4)
    assert made.kv_reuse_ratio == 0.4
    assert made.tokens_per_sec == 2.0
    one = Generation("a", (1,), 10, 0, {}, 100.0, 100.0, {}, "exact", "length", 4)
    assert one.tokens_per_sec == 0.0
    assert json.loads(json.dumps(made.to_dict()))["kv_reuse_ratio"] == 0.4
