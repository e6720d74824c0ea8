"""Scores of tool-calling answers, each with its denominator and a confidence interval.

* TSA, tool selection accuracy: the first call names the right tool; of the questions that need one.
* PF1, parameter F1: of the arguments, over the answers whose first call names the right tool.
* EM, exact match: one call, of the right tool, with every argument right; of the questions that need a tool.
* FPR, false positives: a call where no tool fits; of those questions.
* FNR, false negatives: no call where one was needed; of those questions.

What counts as a right argument follows the data's own checker (Berkeley Function Calling Leaderboard): one of the
accepted values, of the type the schema asks for; texts without regard to case, spaces and punctuation.
"""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from keepwarm.core.tools import ToolCall

_IGNORED = re.compile(r"[ ,./\-_*^]")
_NORMAL_95 = 1.959963984540054
_RESAMPLES = 2000


class Outcome(StrEnum):
    """What became of one question, for the breakdown of errors."""

    RIGHT = "right call"
    ARGUMENTS = "wrong arguments"
    OTHER_TOOL = "another tool"
    NO_SUCH_TOOL = "a tool that is not there"
    NO_CALL = "no call"
    REFRAINED = "rightly no call"
    NEEDLESS = "needless call"


@dataclass(frozen=True)
class Score:
    """One answer, judged."""

    outcome: Outcome
    needed: bool  # whether the question needs a tool
    selected: bool  # the first call names the right tool
    exact: bool
    f1: float | None  # of the arguments; None unless the right tool was called


@dataclass(frozen=True)
class Measure:
    """A mean with its denominator and its 95 % confidence interval; all None over nothing."""

    value: float | None
    n: int
    low: float | None = None
    high: float | None = None


def score(
    calls: Sequence[ToolCall],
    tool: str | None,
    accepted: Mapping[str, Sequence[Any]],
    parameters: Mapping[str, Any],
    listed: Sequence[str],
) -> Score:
    """Judge an answer's calls. `parameters` is the right tool's JSON Schema, `listed` names the tools of the prompt."""
    if tool is None:
        return Score(Outcome.NEEDLESS if calls else Outcome.REFRAINED, False, False, not calls, None)
    if not calls:
        return Score(Outcome.NO_CALL, True, False, False, None)
    first = calls[0]
    if first.name != tool:
        other = Outcome.OTHER_TOOL if first.name in listed else Outcome.NO_SUCH_TOOL
        return Score(other, True, False, False, None)
    properties = parameters.get("properties", {})
    f1 = argument_f1(first.arguments, accepted, properties)
    exact = len(calls) == 1 and arguments_right(first.arguments, accepted, properties)
    return Score(Outcome.RIGHT if exact else Outcome.ARGUMENTS, True, True, exact, f1)


def arguments_right(
    given: Mapping[str, Any], accepted: Mapping[str, Sequence[Any]], properties: Mapping[str, Any]
) -> bool:
    """Whether every given argument is right and none is missing that may not be."""
    right = all(
        name in accepted and _one_of(value, accepted[name], properties.get(name, {})) for name, value in given.items()
    )
    return right and all(name in given or "" in values for name, values in accepted.items())


def argument_f1(
    given: Mapping[str, Any], accepted: Mapping[str, Sequence[Any]], properties: Mapping[str, Any]
) -> float:
    """F1 of name-value pairs; 1 where none is wanted and none given. What may be left out is wanted only if given."""
    wanted = [name for name, values in accepted.items() if "" not in values or name in given]
    right = sum(
        name in accepted and _one_of(value, accepted[name], properties.get(name, {})) for name, value in given.items()
    )
    return 2 * right / (len(given) + len(wanted)) if given or wanted else 1.0


def _one_of(value: Any, accepted: Sequence[Any], schema: Mapping[str, Any]) -> bool:
    return any(_same(value, candidate, schema) for candidate in accepted if candidate != "" or value == "")


def _same(value: Any, accepted: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a given value is the accepted one; in objects each key has a list of accepted values of its own."""
    if isinstance(value, bool) or isinstance(accepted, bool):
        return value is accepted
    if isinstance(value, int | float) and isinstance(accepted, int | float):
        whole = schema.get("type") == "integer"
        return value == accepted and not (whole and isinstance(value, float))
    if isinstance(value, str) and isinstance(accepted, str):
        return _plain(value) == _plain(accepted)
    if isinstance(value, list) and isinstance(accepted, list):
        items = schema.get("items") or {}
        return len(value) == len(accepted) and all(_same(v, a, items) for v, a in zip(value, accepted, strict=True))
    if isinstance(value, dict) and isinstance(accepted, dict):
        properties = schema.get("properties") or {}
        lists = {key: each if isinstance(each, list) else [each] for key, each in accepted.items()}
        return arguments_right(value, lists, properties)
    return value is None and accepted is None


def _plain(text: str) -> str:
    return _IGNORED.sub("", text).lower().replace("'", '"')


def proportion(hits: int, n: int) -> Measure:
    """A share with Wilson's interval (Wilson 1927)."""
    if n == 0:
        return Measure(None, 0)
    share, z2 = hits / n, _NORMAL_95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _NORMAL_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return Measure(share, n, max(0.0, centre - half), min(1.0, centre + half))


def mean(values: Sequence[float], seed: int = 0) -> Measure:
    """A mean with the percentile bootstrap's interval (Efron 1979), the same for the same values."""
    if not values:
        return Measure(None, 0)
    draw = random.Random(seed)
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    low, high = means[int(0.025 * _RESAMPLES)], means[int(0.975 * _RESAMPLES) - 1]
    return Measure(statistics.fmean(values), len(values), low, high)


def summary(scores: Sequence[Score]) -> dict[str, Measure]:
    """TSA, PF1, EM, FPR and FNR of a list of answers."""
    needed = [each for each in scores if each.needed]
    idle = [each for each in scores if not each.needed]
    return {
        "TSA": proportion(sum(each.selected for each in needed), len(needed)),
        "PF1": mean([each.f1 for each in needed if each.f1 is not None]),
        "EM": proportion(sum(each.exact for each in needed), len(needed)),
        "FPR": proportion(sum(each.outcome is Outcome.NEEDLESS for each in idle), len(idle)),
        "FNR": proportion(sum(each.outcome is Outcome.NO_CALL for each in needed), len(needed)),
    }
