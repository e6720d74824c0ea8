"""Tool-calling examples from the Berkeley Function Calling Leaderboard, as its package ships them.

The data is read from the installed package `bfcl-eval` (Apache-2.0) at run time and never copied. Patil et al., "The
Berkeley Function Calling Leaderboard", 2025.

Three splits over sets of `SET_SIZE` tools: `seen` asks a first question of each tool of one catalogue, `held-out`
further questions of the same tools, `unseen` asks of the tools of another. No model is trained here: the first two
differ by question alone, and are named as in the paper whose tables are repeated. Each split has questions that no tool
of the set answers.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

from keepwarm.errors import ConfigError

PACKAGE = "bfcl-eval==2026.3.23"
SPLITS = ("seen", "held-out", "unseen")
SET_SIZE = 20
SETS = 5  # of each catalogue
NO_TOOL = 20  # questions without a fitting tool, in each split, spread over its sets

_CATEGORIES = ("simple_python", "multiple", "live_simple", "live_multiple")
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA = ("items", "additionalProperties", "not", "if", "then", "else")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf")
_SYNONYM = 0.3  # two tools as alike as that do not share a set
_ANSWERABLE = 0.12  # a question as like a tool as that might be meant for it
_LONGEST_TOOL = 650  # characters of a schema: twenty keep to some 2,500 tokens
_LONGEST_QUESTION = 400
# tools that any question may be put to: beside them none is without a fitting tool
_UNIVERSAL = re.compile(
    r"\b(web|internet|google|duckduckgo|wikipedia|search engine|url|llm|chatbot|finish|answer)", re.I
)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_SUFFIXES = ("ations", "ation", "ings", "ing", "ies", "es", "ed", "s", "e", "y")

Tool = dict[str, Any]
Accepted = dict[str, list[Any]]  # by argument: the values that are right; "" among them: it may be left out


@dataclass(frozen=True)
class Example:
    """One question, the set of tools it is asked with, and what a right answer calls."""

    id: str
    split: str
    set_name: str
    question: str
    tool: str | None  # None: no tool of the set fits
    accepted: Accepted


@dataclass(frozen=True)
class Benchmark:
    """Tool sets by name, and the examples in the order they are run: set by set, the splits in turn.

    So every beginning is balanced among splits, and computes the KV of no more sets than it needs.
    """

    sets: dict[str, tuple[Tool, ...]]
    examples: tuple[Example, ...]

    def schema(self, example: Example, name: str) -> Tool | None:
        """A tool of the example's set by name."""
        return next((tool for tool in self.sets[example.set_name] if tool["name"] == name), None)


@dataclass(frozen=True)
class _Case:
    id: str
    question: str
    tool: Tool
    accepted: Accepted


def json_schema(schema: Any) -> Any:
    """A parameter description in JSON Schema: the package names some types as Python does (`dict`, `float`, ...)."""
    if not isinstance(schema, Mapping):
        return schema
    converted: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "type" and isinstance(value, str):
            converted[key] = _TYPES.get(value, value)
        elif key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            converted[key] = {name: json_schema(inner) for name, inner in value.items()}
        elif key in _SCHEMA:
            converted[key] = json_schema(value)
        elif key in _SCHEMA_LISTS and isinstance(value, Sequence):
            converted[key] = [json_schema(inner) for inner in value]
        elif key == "required" and not isinstance(value, list):
            continue  # an old spelling beside a single parameter, which says nothing that the object does not
        else:
            converted[key] = value
    return converted


def tool_schema(function: Mapping[str, Any]) -> Tool:
    """A function of the package as a tool, in MCP's and OpenAI's inner shape."""
    return {
        "name": function["name"],
        "description": function["description"],
        "parameters": json_schema(function["parameters"]),
    }


def load(*, seed: int = 0, set_size: int = SET_SIZE, sets: int = SETS, no_tool: int = NO_TOOL) -> Benchmark:
    """The benchmark: the same for the same arguments and package. Raises ConfigError without the package."""
    cases, idle = _cases(), _questions("irrelevance")
    words = _Words([_tool_text(case[0].tool) for case in cases.values()])
    vectors = {name: words.vector(_tool_text(found[0].tool)) for name, found in cases.items()}
    order = sorted(cases)
    random.Random(seed).shuffle(order)
    order.sort(key=lambda name: len(cases[name]) == 1)  # tools with several questions come first
    catalogue = _fill(sets, set_size, order, vectors)
    taken = {name for names in catalogue for name in names}
    fresh = [
        name
        for name in order
        if name not in taken and all(_likeness(vectors[name], vectors[other]) < _SYNONYM for other in taken)
    ]
    random.Random(seed).shuffle(fresh)
    unseen = _fill(sets, set_size, fresh, vectors)
    chosen = {f"catalogue-{n}": names for n, names in enumerate(catalogue, 1)}
    chosen |= {f"unseen-{n}": names for n, names in enumerate(unseen, 1)}
    random.Random(seed + 1).shuffle(idle)
    rounds: list[list[list[Example]]] = [[] for _ in range(sets)]  # by set, then by split
    for number, split in enumerate(SPLITS):
        mine = {set_name: names for set_name, names in chosen.items() if set_name.startswith("unseen") == (number == 2)}
        without = _without_tool(split, idle[number :: len(SPLITS)], mine, words, vectors, no_tool)
        for turn, (set_name, names) in enumerate(mine.items()):
            asked = [
                Example(case.id, split, set_name, case.question, case.tool["name"], case.accepted)
                for case in _of_set([cases[name] for name in names], further=split == "held-out")
            ]
            random.Random(seed + 2 + number).shuffle(asked)
            rounds[turn].append(_spread(asked, [example for example in without if example.set_name == set_name]))
    examples = tuple(example for turn in rounds for trio in zip_longest(*turn) for example in trio if example)
    return Benchmark({name: tuple(cases[tool][0].tool for tool in names) for name, names in chosen.items()}, examples)


def some_questions(count: int, *, seed: int = 0) -> list[str]:
    """Questions of as many different functions, for measurements of time alone."""
    cases = _cases()
    order = sorted(cases)
    random.Random(seed).shuffle(order)
    return [cases[name][0].question for name in order[:count]]


def _folder() -> Path:
    spec = find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"the examples come from a package that is not installed: pip install --no-deps {PACKAGE}")
    return Path(spec.submodule_search_locations[0]) / "data"


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ConfigError(f"{path} is not there; expected the data of {PACKAGE}")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _plain_question(row: Mapping[str, Any]) -> str | None:
    """The question of a row with one user message; None for conversations and very long ones."""
    turns = row["question"]
    if len(turns) != 1 or len(turns[0]) != 1 or turns[0][0]["role"] != "user":
        return None
    text: str = turns[0][0]["content"].strip()
    return text if 0 < len(text) <= _LONGEST_QUESTION else None


def _cases() -> dict[str, list[_Case]]:
    """Questions with one right call, by function name.

    The data describes some functions in several ways. Of a name the description is taken that most of its questions
    have a right call for; the others' questions are left out.
    """
    folder = _folder()
    found: dict[str, list[_Case]] = {}
    for category in _CATEGORIES:
        rows = _lines(folder / f"BFCL_v4_{category}.json")
        answers = {
            row["id"]: row["ground_truth"] for row in _lines(folder / f"possible_answer/BFCL_v4_{category}.json")
        }
        for row in rows:
            truth = answers.get(row["id"], ())
            question = _plain_question(row)
            if question is None or len(truth) != 1:
                continue
            ((name, accepted),) = truth[0].items()
            function = next((function for function in row["function"] if function["name"] == name), None)
            if function is not None:
                found.setdefault(name, []).append(_Case(row["id"], question, tool_schema(function), accepted))
    chosen = {name: max((_asked_of(case.tool, cases) for case in cases), key=len) for name, cases in found.items()}
    return {name: cases for name, cases in chosen.items() if cases and not _UNIVERSAL.search(_tool_text(cases[0].tool))}


def _asked_of(tool: Tool, cases: Sequence[_Case]) -> list[_Case]:
    """The cases whose right call is one of this very tool, each question once; none of a tool too long to be shown."""
    if len(json.dumps(tool)) > _LONGEST_TOOL:
        return []
    asked = {case.question: replace(case, tool=tool) for case in reversed(cases) if _is_call_of(tool, case)}
    return list(asked.values())[::-1]


def _is_call_of(tool: Tool, case: _Case) -> bool:
    own, other = (shown["parameters"].get("properties", {}) for shown in (tool, case.tool))
    needed = {name for name, values in case.accepted.items() if "" not in values}
    return (
        set(tool["parameters"].get("required", ())) <= needed
        and set(case.accepted) <= set(own)
        and all(_shape(own[name]) == _shape(other[name]) for name in case.accepted if name in other)
    )


def _shape(schema: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a value must be, without the words."""
    items = schema.get("items")
    return schema.get("type"), schema.get("enum"), _shape(items) if isinstance(items, Mapping) else None


def _questions(category: str) -> list[tuple[str, str]]:
    rows = _lines(_folder() / f"BFCL_v4_{category}.json")
    return [(row["id"], question) for row in rows if (question := _plain_question(row)) is not None]


class _Words:
    """Texts as vectors of word stems, weighted by how rare each is among the tools."""

    def __init__(self, texts: Sequence[str]) -> None:
        seen = Counter(stem for text in texts for stem in set(_stems(text)))
        self._rarity = {stem: math.log(len(texts) / count) for stem, count in seen.items()}
        self._unknown = math.log(len(texts))

    def vector(self, text: str) -> dict[str, float]:
        """Unit vector of a text."""
        weights = {stem: count * self._rarity.get(stem, self._unknown) for stem, count in Counter(_stems(text)).items()}
        length = math.sqrt(sum(weight * weight for weight in weights.values())) or 1.0
        return {stem: weight / length for stem, weight in weights.items()}


def _stems(text: str) -> Iterable[str]:
    for word in _WORD.findall(text):
        stem = word.lower()
        for suffix in _SUFFIXES:
            if stem.endswith(suffix) and len(stem) - len(suffix) >= 3:
                stem = stem.removesuffix(suffix)
                break
        yield stem


def _tool_text(tool: Tool) -> str:
    return f"{tool['name']} {tool['description']}"


def _likeness(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Cosine of two unit vectors."""
    shorter, longer = sorted((one, other), key=len)
    return sum(weight * longer.get(stem, 0.0) for stem, weight in shorter.items())


def _fill(sets: int, size: int, names: Sequence[str], vectors: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Sets of `size` names, none of them near-synonyms within a set. Raises ConfigError when names run out."""
    filled: list[list[str]] = [[] for _ in range(sets)]
    for name in names:
        for members in sorted(filled, key=len):
            alike = any(_likeness(vectors[name], vectors[other]) >= _SYNONYM for other in members)
            if len(members) < size and not alike:
                members.append(name)
                break
    if any(len(members) < size for members in filled):
        raise ConfigError(
            f"the data has too few different tools for {sets} sets of {size}: {', '.join(str(len(m)) for m in filled)}"
        )
    return filled


def _of_set(cases: Sequence[Sequence[_Case]], *, further: bool) -> list[_Case]:
    """The first question of each tool of a set; or as many `further` ones: a second of each, then a third, ..."""
    if not further:
        return [each[0] for each in cases]
    most = max(map(len, cases))
    rest = [each[turn] for turn in range(1, most) for each in cases if turn < len(each)]
    return rest[: len(cases)]


def _without_tool(
    split: str,
    questions: Sequence[tuple[str, str]],
    sets: Mapping[str, Sequence[str]],
    words: _Words,
    vectors: Mapping[str, Mapping[str, float]],
    count: int,
) -> list[Example]:
    """Questions, each with the set whose tools are least like it; none that a tool of the set might answer."""
    found: list[Example] = []
    room = dict.fromkeys(sets, count // len(sets))
    for identity, question in questions:
        vector = words.vector(question)
        nearest = {name: max(_likeness(vector, vectors[tool]) for tool in tools) for name, tools in sets.items()}
        fitting = [name for name, likeness in nearest.items() if likeness < _ANSWERABLE and room[name]]
        if fitting:
            chosen = min(fitting, key=lambda name: nearest[name])
            room[chosen] -= 1
            found.append(Example(identity, split, chosen, question, None, {}))
    if any(room.values()):
        raise ConfigError(f"the data has only {len(found)} questions without a fitting tool for {split!r}, not {count}")
    return found


def _spread(asked: Sequence[Example], without: Sequence[Example]) -> list[Example]:
    """The second list spread evenly through the first."""
    total = len(asked) + len(without)
    places = {(2 * n + 1) * total // (2 * len(without)) for n in range(len(without))} if without else set()
    rest, idle = iter(asked), iter(without)
    return [next(idle) if place in places else next(rest) for place in range(total)]
