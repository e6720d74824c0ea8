"""Grammars for constrained decoding: what an answer may be, in llguidance's dialect of Lark.

JSON is written on one line, as `json.dumps` writes it. An object holds only what its schema lists, unless the schema
says that more may come. So all that is written satisfies the schema, and a model cannot go on forever.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from keepwarm.core.tools import tool_name
from keepwarm.errors import PromptError
from keepwarm.models.toolcalls import Written

ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# formats of strings that are enforced; any other is only an annotation, as in JSON Schema
_FORMATS = frozenset({"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"})
# words that allow or demand properties of an object that it does not list itself
_JOINED = frozenset({
    "$id",
    "allOf",
    "dependentSchemas",
    "if",
    "minProperties",
    "not",
    "oneOf",
    "unevaluatedProperties",
})
_OF_OBJECTS = frozenset({"additionalProperties", "patternProperties", "properties", "required"})
_BY_NAME = ("$defs", "definitions", "properties", "patternProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")

# A call that begins without a marker stands at the beginning of a line, fenced or not, in a list or not. Text is read
# line by line, because expressions that search for a line's beginning grow beyond what a lexer can hold.
_INDENT = r"[ \t;,]*(```[a-z]*[ \t]*)?"
_OBJECT = r"\{\s*\"name\"\s*:\s*\""
_TERMINALS = (
    f"BARE: /{_INDENT}{_OBJECT}/",
    rf"BARE_LIST: /{_INDENT}\[\s*{_OBJECT}/",
    rf"OPENING: /{_INDENT}(\[\s*)?(\{{\s*)?/",
)


def answer_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of an answer that is JSON of this schema; for an empty schema, any object."""
    return f"%llguidance {{}}\nstart: {_json(schema or {'type': 'object'})}\n"


def calls_grammar(
    written: Written,
    schemas: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, str],
    special: Callable[[str], int | None],
    specials: Iterable[int],
    *,
    several: bool = True,
) -> str:
    """Return the grammar of an answer with calls of these tools (as they are shown) under `choice` (see `Decoding`).
    Without `several` the answer ends after the first call.

    `special` gives the id of a text that is one special token and cannot be written otherwise; `specials` are all these
    ids except those that end an answer. Raises PromptError when `choice` names a tool that is not there.
    """
    if isinstance(choice, Mapping):
        listed = {tool_name(schema): schema for schema in schemas}
        if choice["name"] not in listed:
            raise PromptError(f"tool_choice names {choice['name']!r}; the request's tools are {', '.join(listed)}")
        schemas = [listed[choice["name"]]]
    names = [tool_name(schema) for schema in schemas]
    rules = [f"args_{n}: {_json(_parameters(schema))}" for n, schema in enumerate(schemas)]

    def literal(text: str) -> str:
        """Write a text that may hold special tokens."""
        for marker in written.markers:
            before, found, after = text.partition(marker)
            number = special(marker) if found else None
            if number is not None:
                return f"{literal(before)} <[{number}]> {literal(after)}"
        return json.dumps(text) if text else ""

    def either(rule: str, form: Callable[[str], tuple[str, str]]) -> None:
        """Add a rule for a call of any of the tools."""
        rules.append(f"{rule}: " + " | ".join(f"{rule}_{n}" for n in range(len(names))))
        for n, name in enumerate(names):
            before, after = form(name)
            rules.append(f"{rule}_{n}: {literal(before)} args_{n} {literal(after)}")

    either("call", written.around)
    marker = written.markers[0] if written.markers else None
    between = written.between if isinstance(choice, str) and several else None

    def calls(opening: str) -> str:
        more = f"({literal(between)} call)*" if between is not None else ""
        gap = _gap(written.close, between)  # joined with `close`: the lexer does not go back for it
        close = f"({literal(written.close)} | {literal(written.close + gap)})" if gap else literal(written.close)
        return f"{literal(opening)} call {more} {close}"

    if choice == "required" or isinstance(choice, Mapping):
        return _grammar(f"start: {calls(written.open)}", *rules)

    if marker and between is not None and marker in between:
        between = None  # a second call begins as the first does
    number = special(marker) if marker else None
    spelt = marker is not None and number is None  # then it is text, and may stand anywhere in a line
    kinds = ["bare", "bare_list", *(["marked"] if spelt else [])]
    other = "".join(f" & ~({kind.upper()} /(?s:.*)/)" for kind in kinds)
    others = sorted(set(specials) - {number})
    broken = f"lines LAST? <[{_ranges(others)}]>" if others else ""
    text = [
        f"LINE: OPENING /[^\\n]*\\n/{other}",
        f"LAST: OPENING /[^\\n]+/{other}",
        "lines: LINE*",
        f"before: ({broken})* lines" if broken else "before: lines",
        "free: before LAST?",
        *_TERMINALS,
        *([f"MARKED: /[^\\n]*/ {json.dumps(marker)}"] if spelt else []),
    ]
    if choice == "none":
        return _grammar("start: free", *text)
    whole = Written(arguments=written.arguments)
    either("rest", lambda name: (whole.around(name)[0].removeprefix('{"name": "'), whole.around(name)[1]))
    either("object", whole.around)
    after, again, listed_more = ("after", "start", '(", " object)*') if several else ("", "", "")
    branches = ["free", f"before bare rest {after}", f'before bare_list rest {listed_more} "]" {after}']
    if marker:
        rules.append("after_marker: " + calls(written.open.removeprefix(marker)))
        branches.append(("before marked" if spelt else f"free <[{number}]>") + f" after_marker {again}")
    return _grammar(
        "start: " + " | ".join(branches),
        *(['after: "" | "\\n" start'] if several else []),
        *(f"{kind}[lazy]: {kind.upper()}" for kind in kinds),
        *text,
        *rules,
    )


def writable(schema: Any, *, closed: bool) -> Any:
    """Return a schema that allows the same answers, in words that llguidance knows.

    With `closed` an object has only the properties it lists, unless the schema says something about others.
    """
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    if made.get("uniqueItems") is False:
        del made["uniqueItems"]
    if "format" in made and made["format"] not in _FORMATS:
        del made["format"]
    for word, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):  # as in draft 4
        if isinstance(made.get(word), bool) and made.pop(word) and bound in made:
            made[word] = made.pop(bound)
    if (
        closed
        and "properties" in made
        and not {"additionalProperties", "patternProperties"} & made.keys()
        and set(made.get("required", ())) <= set(made["properties"])
    ):
        made["additionalProperties"] = False
    for word in _BY_NAME:
        if isinstance(made.get(word), Mapping):
            made[word] = {name: writable(value, closed=closed) for name, value in made[word].items()}
    for word in _LISTS:
        if isinstance(made.get(word), list | tuple):
            made[word] = [writable(value, closed=closed) for value in made[word]]
    for word in _SINGLE:
        if isinstance(made.get(word), Mapping):
            made[word] = writable(made[word], closed=closed)
    return made


def closable(schema: Any) -> bool:
    """Whether every object in this schema, at any depth, lists all its properties where it is described."""
    if not isinstance(schema, Mapping):
        return True
    if _JOINED & schema.keys() or ({"$ref", "anyOf"} & schema.keys() and _OF_OBJECTS & schema.keys()):
        return False
    return all(closable(child) for _, child in inside(schema))


def inside(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield the direct subschemas of a schema, with the path to each."""
    for word in _BY_NAME:
        if isinstance(schema.get(word), Mapping):
            yield from (((word, name), value) for name, value in schema[word].items())
    for word in _LISTS:
        if isinstance(schema.get(word), list | tuple):
            yield from (((word, index), value) for index, value in enumerate(schema[word]))
    yield from (((word,), schema[word]) for word in _SINGLE if word in schema)


def _parameters(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    nothing = {"type": "object", "properties": {}}
    return {"type": "object"} | (schema["function"].get("parameters") or nothing)


def _gap(close: str, between: str | None) -> str:
    """Return the white space that a model writes after a call whether or not another one follows. The answer must be
    allowed to end there; otherwise this white space would force another call."""
    if between is None or not close or not between.startswith(close):
        return ""
    rest = between.removeprefix(close)
    return rest[: len(rest) - len(rest.lstrip())]


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps(writable(schema, closed=closable(schema)) | {"x-guidance": ONE_LINE})


def _grammar(*rules: str) -> str:
    return "%llguidance {}\n" + "\n".join(rules) + "\n"


def _ranges(numbers: Sequence[int]) -> str:
    """Write sorted token ids as llguidance takes them: `1-3,7`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{a}-{b}" if a < b else str(a) for a, b in spans)
