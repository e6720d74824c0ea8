"""Scores against cases worked out by hand, and against the data's own checker."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from keepwarm.core.tools import ToolCall
from papers.metrics import Measure, Outcome, Score, argument_f1, mean, proportion, score, summary

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "limit": {"type": "number"},
        "metric": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {"type": "object", "properties": {"zip": {"type": "integer"}}},
    },
    "required": ["city"],
}
ACCEPTED: dict[str, list[Any]] = {"city": ["New York", "NYC"], "days": [3], "limit": ["", 2]}
LISTED = ("weather", "news")


def judged(*calls: ToolCall, tool: str | None = "weather", accepted: dict[str, list[Any]] | None = None) -> Score:
    return score(calls, tool, ACCEPTED if accepted is None else accepted, PARAMETERS, LISTED)


def weather(**arguments: Any) -> ToolCall:
    return ToolCall("weather", arguments)


@pytest.mark.parametrize(
    ("calls", "tool", "outcome"),
    [
        ((weather(city="new york", days=3),), "weather", Outcome.RIGHT),
        ((weather(city="NYC", days=3, limit=2.0),), "weather", Outcome.RIGHT),
        ((weather(city="NYC", days=4),), "weather", Outcome.ARGUMENTS),
        ((weather(city="NYC"),), "weather", Outcome.ARGUMENTS),
        ((weather(city="NYC", days=3, extra=1),), "weather", Outcome.ARGUMENTS),
        ((weather(city="NYC", days=3), weather(city="NYC", days=3)), "weather", Outcome.ARGUMENTS),
        ((ToolCall("news", {}),), "weather", Outcome.OTHER_TOOL),
        ((ToolCall("wether", {}),), "weather", Outcome.NO_SUCH_TOOL),
        ((), "weather", Outcome.NO_CALL),
        ((), None, Outcome.REFRAINED),
        ((weather(city="NYC"),), None, Outcome.NEEDLESS),
    ],
)
def test_outcomes(calls: tuple[ToolCall, ...], tool: str | None, outcome: Outcome) -> None:
    assert judged(*calls, tool=tool).outcome is outcome


@pytest.mark.parametrize(
    ("name", "given", "accepted", "right"),
    [
        ("city", "new-york", ["New York"], True),
        ("city", "it's", ['it"s'], True),
        ("city", "York", ["New York"], False),
        ("city", "", ["", "x"], True),
        ("days", 3.0, [3], False),
        ("days", True, [1], False),
        ("days", "3", [3], False),
        ("limit", 2, [2.0], True),
        ("metric", True, [True], True),
        ("metric", "true", [True], False),
        ("tags", ["A b", "c"], [["ab", "C"]], True),
        ("tags", ["c", "ab"], [["ab", "c"]], False),
        ("tags", [], [[]], True),
        ("place", {"zip": 1}, [{"zip": [1, 2]}], True),
        ("place", {"zip": 3}, [{"zip": [1, 2]}], False),
        ("place", {}, [{"zip": [1, ""]}], True),
    ],
)
def test_what_counts_as_the_accepted_value(name: str, given: Any, accepted: list[Any], right: bool) -> None:
    assert judged(weather(**{name: given}), accepted={name: accepted}).exact is right


def test_argument_f1_by_hand() -> None:
    properties = PARAMETERS["properties"]
    assert isinstance(properties, dict)
    assert argument_f1({"city": "NYC", "days": 3}, ACCEPTED, properties) == 1
    assert argument_f1({"city": "NYC"}, ACCEPTED, properties) == pytest.approx(2 / 3)  # 1 right of 1 given, 2 wanted
    assert argument_f1({"city": "NYC", "days": 9, "limit": 2}, ACCEPTED, properties) == pytest.approx(4 / 6)
    assert argument_f1({"nothing": 1}, ACCEPTED, properties) == 0
    assert argument_f1({}, {"limit": ["", 2]}, properties) == 1


def test_wilson_interval_by_hand() -> None:
    found = proportion(15, 20)  # published tables: 0.5313 to 0.8881
    assert (found.value, found.n) == (0.75, 20)
    assert found.low == pytest.approx(0.5313, abs=5e-5)
    assert found.high == pytest.approx(0.8881, abs=5e-5)
    assert proportion(0, 10).low == 0
    assert proportion(10, 10).high == pytest.approx(1)
    assert proportion(0, 0) == Measure(None, 0)


def test_bootstrap_is_the_same_every_time_and_holds_the_mean() -> None:
    values = [0.0, 0.5, 1.0, 1.0, 0.25]
    found = mean(values)
    assert found == mean(values)
    assert found.value == pytest.approx(0.55)
    assert found.low is not None
    assert found.high is not None
    assert 0 <= found.low < 0.55 < found.high <= 1
    assert mean([]) == Measure(None, 0)


def test_summary_has_the_right_denominators() -> None:
    scores = [
        judged(weather(city="NYC", days=3)),
        judged(weather(city="NYC")),
        judged(ToolCall("news", {})),
        judged(),
        judged(tool=None),
        judged(weather(city="x"), tool=None),
    ]
    found = summary(scores)
    assert {name: (measure.value, measure.n) for name, measure in found.items()} == {
        "TSA": (0.5, 4),
        "PF1": (pytest.approx((1 + 2 / 3) / 2), 2),
        "EM": (0.25, 4),
        "FPR": (0.5, 2),
        "FNR": (0.25, 4),
    }


def test_agrees_with_the_datas_own_checker(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every question's right call, and on calls made wrong in one argument."""
    pytest.importorskip("bfcl_eval")
    models = types.ModuleType("bfcl_eval.constants.model_config")
    models.MODEL_CONFIG_MAPPING = {"m": types.SimpleNamespace(underscore_to_dot=False)}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, models.__name__, models)
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import simple_function_checker

    from papers import bfcl

    sources = {}
    for category in ("simple_python", "multiple"):
        for row in bfcl._lines(bfcl._folder() / f"BFCL_v4_{category}.json"):
            sources[row["id"]] = row["function"]
    compared = 0
    for cases in bfcl._cases().values():
        for case in cases:
            function = next((f for f in sources.get(case.id, ()) if f["name"] == case.tool["name"]), None)
            if function is None:
                continue
            right = {name: values[0] for name, values in case.accepted.items() if "" not in values}
            if any(isinstance(value, dict | list) for value in right.values()):
                continue  # their shape in the data is that of alternatives, not of a value
            wrong = [right | {name: "surely wrong"} for name in right]
            for arguments in (right, *wrong, {**right, "not there": 1}):
                theirs = simple_function_checker(
                    function, {case.tool["name"]: arguments}, {case.tool["name"]: case.accepted}, Language.PYTHON, "m"
                )["valid"]
                call = ToolCall(case.tool["name"], arguments)
                ours = score([call], case.tool["name"], case.accepted, case.tool["parameters"], ()).exact
                assert ours == theirs, (case.id, arguments, case.accepted)
                compared += 1
    assert compared > 500
