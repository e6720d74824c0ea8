"""The benchmark made of Berkeley's data: types, splits, sets, determinism."""

from __future__ import annotations

from collections import Counter

import pytest

from keepwarm.errors import ConfigError
from keepwarm.models.schemas import checked_tools
from papers import bfcl
from papers.run import chosen_examples


def test_types_become_json_schemas() -> None:
    function = {
        "name": "f",
        "description": "d",
        "parameters": {
            "type": "dict",
            "required": ["type"],
            "properties": {
                "type": {"type": "string", "default": "dict"},
                "pair": {"type": "tuple", "items": {"type": "float"}},
                "deep": {"type": "dict", "properties": {"x": {"type": "any", "enum": ["any", "float"]}}},
                "odd": {"type": "integer", "required": True},
            },
        },
    }
    assert bfcl.tool_schema(function) == {
        "name": "f",
        "description": "d",
        "parameters": {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"type": "string", "default": "dict"},
                "pair": {"type": "array", "items": {"type": "number"}},
                "deep": {"type": "object", "properties": {"x": {"type": "string", "enum": ["any", "float"]}}},
                "odd": {"type": "integer"},
            },
        },
    }


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfcl, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps bfcl-eval"):
        bfcl.load()


@pytest.fixture(scope="module")
def benchmark() -> bfcl.Benchmark:
    pytest.importorskip("bfcl_eval")
    return bfcl.load()


def test_three_splits_with_a_hundred_questions_and_some_that_no_tool_fits(benchmark: bfcl.Benchmark) -> None:
    counts = Counter((example.split, example.tool is not None) for example in benchmark.examples)
    assert {split: counts[split, True] for split in bfcl.SPLITS} == dict.fromkeys(bfcl.SPLITS, 100)
    assert {split: counts[split, False] for split in bfcl.SPLITS} == dict.fromkeys(bfcl.SPLITS, bfcl.NO_TOOL)
    assert len({example.question for example in benchmark.examples}) == len(benchmark.examples)


def test_sets_are_of_twenty_valid_tools_and_hold_the_one_asked_for(benchmark: bfcl.Benchmark) -> None:
    assert len(benchmark.sets) == 2 * bfcl.SETS
    for tools in benchmark.sets.values():
        assert len(checked_tools(tools)) == bfcl.SET_SIZE
    for example in benchmark.examples:
        if example.tool is not None:
            tool = benchmark.schema(example, example.tool)
            assert tool is not None
            assert set(example.accepted) <= set(tool["parameters"]["properties"])


def test_unseen_tools_are_in_no_catalogue_and_held_out_questions_are_of_seen_tools(benchmark: bfcl.Benchmark) -> None:
    of = {split: [e for e in benchmark.examples if e.split == split and e.tool] for split in bfcl.SPLITS}
    tools = {split: {example.tool for example in examples} for split, examples in of.items()}
    assert tools["held-out"] <= tools["seen"]
    assert not tools["unseen"] & tools["seen"]
    assert not {e.question for e in of["seen"]} & {e.question for e in of["held-out"]}


def test_no_set_holds_near_synonyms(benchmark: bfcl.Benchmark) -> None:
    words = bfcl._Words([bfcl._tool_text(cases[0].tool) for cases in bfcl._cases().values()])
    for tools in benchmark.sets.values():
        vectors = [words.vector(bfcl._tool_text(tool)) for tool in tools]
        for number, vector in enumerate(vectors):
            assert all(bfcl._likeness(vector, other) < bfcl._SYNONYM for other in vectors[:number])


@pytest.mark.slow
def test_the_same_seed_gives_the_same_benchmark_and_another_one_another(benchmark: bfcl.Benchmark) -> None:
    assert bfcl.load() == benchmark
    assert bfcl.load(seed=1).sets != benchmark.sets


def test_every_beginning_is_balanced(benchmark: bfcl.Benchmark) -> None:
    for count in (3, 30, 72, 200):
        counts = Counter(example.split for example in benchmark.examples[:count])
        assert max(counts.values()) - min(counts.values()) <= 1
    first = benchmark.examples[:36]
    assert {example.split for example in first if example.tool is None} == set(bfcl.SPLITS)
    assert len({example.set_name for example in first}) == 2


def test_limit_is_per_split(benchmark: bfcl.Benchmark) -> None:
    chosen = chosen_examples(benchmark, ("seen", "unseen"), 4)
    assert Counter(example.split for example in chosen) == {"seen": 4, "unseen": 4}
    with pytest.raises(ConfigError, match="unknown split"):
        chosen_examples(benchmark, ("train",), None)
