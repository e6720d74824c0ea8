"""The worst bodies that were found: as much of something as fits into 4 MiB, and what is worst within the limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SIZE = 4 << 20  # bytes: the default of limits.max_body
CACHED = {"type": "ephemeral"}


@dataclass(frozen=True)
class Hostile:
    """A request that no friend would send."""

    name: str
    path: str
    body: bytes


def worst(model: str, size: int = SIZE) -> list[Hostile]:
    """All of them, for a service that calls its model so and takes bodies of so many bytes."""
    found = [
        *_counted(model, size),
        *_texts(model, size),
        *_schemas(model, size),
        *_tools(model, size),
        *_long(model, size),
    ]
    return [Hostile(name, path, json.dumps(body).encode()[:size]) for name, path, body in found]


_Body = tuple[str, str, dict[str, Any]]
_CHAT = "/v1/chat/completions"


def _user(content: Any = "hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


def _counted(model: str, size: int) -> Iterator[_Body]:
    """More of everything than may be, and as much as may be."""
    empty = {"role": "user", "content": ""}
    yield "20,000 empty messages", "/query", {"messages": [empty] * 20_000}
    yield "4,096 empty messages", "/query", {"messages": [empty] * 4096, "max_new_tokens": 1}
    turns = [{"role": ("user", "assistant")[n % 2], "content": "a"} for n in range(4001)]
    yield "4,001 turns", _CHAT, {"model": model, "messages": turns, "max_tokens": 1}
    stops = [f"{n:06d}" for n in range(size // 12)]
    yield "stop strings", _CHAT, {"model": model, "messages": [_user()], "stop": stops}
    long_stops = ["a" * 999 + chr(97 + n) for n in range(16)]
    yield "16 long stops", _CHAT, {"model": model, "messages": [_user()], "stop": long_stops[:4], "max_tokens": 200}
    results = [{"type": "tool_result", "tool_use_id": f"t{n}", "content": "x"} for n in range(2000)]
    calls = [{"type": "tool_use", "id": f"t{n}", "name": "f", "input": {}} for n in range(2000)]
    told = [_user(), {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    yield "tool results", "/v1/messages", {"model": model, "max_tokens": 1, "messages": told}
    marked = [{"type": "text", "text": "x", "cache_control": CACHED}] * 4000
    yield "cache_control", "/v1/messages", {"model": model, "max_tokens": 1, "messages": [_user(marked)]}
    values = [0] * (size // 4)
    yield "values", _CHAT, {"model": model, "messages": [_user()], "logit_bias": values}
    yield "ids", "/v1/completions", {"model": model, "prompt": [1] * 190_000, "max_tokens": 1}


def _texts(model: str, size: int) -> Iterator[_Body]:
    """Texts that take long to tokenize."""
    kinds = {
        "one word": "a" * (size - 1000),
        "spaces": " " * (size - 1000),
        "digits": "7" * (size - 1000),
        "tags": "<|im_end|>" * (size // 10 - 100),
        "accents": "e\u0301" * (size // 8),
        "lines": "\n" * (size // 2 - 999),
        "words": "word " * (size // 5 - 100),
        "mixed": "aA1 _-!\t" * (size // 9 - 100),
        "combining": "a" + "\u0316\u0301" * (size // 13),
        "emoji": "\U0001f469\u200d" * (size // 20),
    }
    for name, text in kinds.items():
        yield f"text of {name}", _CHAT, {"model": model, "messages": [_user(text)], "max_tokens": 1}
    yield "counted words", "/v1/messages/count_tokens", {"model": model, "messages": [_user(kinds["words"])]}
    yield "explained words", "/v1/cache/explain", {"messages": [_user(kinds["words"])]}
    pieces = [{"type": "text", "text": "a b"}] * 4000
    yield "parts", _CHAT, {"model": model, "messages": [_user(pieces)], "max_tokens": 1}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _wide(count: int, name: str = "property_{}") -> dict[str, Any]:
    names = [name.format(n) for n in range(count)]
    return {"type": "object", "properties": {one: {"type": "string"} for one in names}, "required": names}


def _asking(model: str, schema: dict[str, Any]) -> dict[str, Any]:
    format_ = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return {"model": model, "messages": [_user()], "max_tokens": 16, "response_format": format_}


def _schemas(model: str, size: int) -> Iterator[_Body]:
    """Schemas of answers that are hard to check, to compile or to follow."""
    doubling: dict[str, Any] = {"d0": {"type": "string"}}
    for n in range(1, 40):
        doubling[f"d{n}"] = {
            "anyOf": [{"$ref": f"#/$defs/d{n - 1}"}, {"type": "array", "items": {"$ref": f"#/$defs/d{n - 1}"}}]
        }
    either = [{"type": "object", "properties": {f"p{n}": {"const": n}}, "required": [f"p{n}"]} for n in range(2000)]
    all_of = [{"anyOf": [{"required": [f"a{n}"]}, {"required": [f"b{n}"]}]} for n in range(24)]
    schemas = {
        "deep": _nested(40),
        "wide": _wide(30_000),
        "optional": _wide(5000) | {"required": []},
        "names": _wide(2200, "x" * 900 + "{}"),
        "doubling": {"$defs": doubling, "$ref": "#/$defs/d39"},
        "either": {"anyOf": either},
        "all of": {"type": "object", "allOf": all_of},
        "enum": {"enum": [f"value {n}" for n in range(150_000)]},
        "alike": {"enum": ["a" * n for n in range(1, 2500)]},
        "pattern": {"type": "string", "pattern": "^(a+)+$"},
        "counted": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}b$"},
        "alternatives": {"type": "string", "pattern": "(" + "|".join(f"(a|b){{{n}}}c" for n in range(1, 400)) + ")*"},
        "lengths": {
            "type": "array",
            "items": {"type": "string", "minLength": 5000, "maxLength": 9000},
            "minItems": 900,
        },
        "large": {"type": "array", "minItems": 1_000_000, "maxItems": 100_000_000, "items": {"type": "integer"}},
        "unions": {
            "type": "object",
            "patternProperties": {f"^(a|b|{n})*{n}$": {"type": "integer"} for n in range(200)},
        },
    }
    for name, schema in schemas.items():
        yield f"schema {name}", _CHAT, _asking(model, schema)


def _tool(name: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}} | more


def _tools(model: str, size: int) -> Iterator[_Body]:
    """Tools by number, by size, and with ends that are asked for."""
    asked: dict[str, Any] = {"model": model, "messages": [_user()], "max_tokens": 16}
    many = [_tool(f"tool_{n}", _wide(50)) for n in range(1024)]
    yield "1,024 tools", _CHAT, asked | {"tools": many}
    yield (
        "required tools",
        _CHAT,
        asked | {"tools": [_tool(f"t{n}", _wide(2)) for n in range(300)], "tool_choice": "required"},
    )
    claude = [{"name": f"tool_{n}", "input_schema": _wide(50)} for n in range(1024)]
    for n in (1020, 1021, 1022, 1023):
        claude[n] = claude[n] | {"cache_control": CACHED}
    yield "cached tools", "/v1/messages", {"model": model, "max_tokens": 1, "messages": [_user()], "tools": claude}
    yield "deep tool", _CHAT, asked | {"tools": [_tool("deep", _nested(30))]}
    yield "wide tool", _CHAT, asked | {"tools": [_tool("wide", _wide(40_000))]}
    named = _wide(4, "x" * (size // 10) + "{}")
    yield "long names", _CHAT, asked | {"tools": [_tool("named", named)]}
    deep_names: dict[str, Any] = {"type": "object"}
    for n in range(40):
        deep_names = {"type": "object", "properties": {"y" * (size // 60) + str(n): deep_names}}
    yield "deep names", _CHAT, asked | {"tools": [_tool("named", deep_names)]}
    yield "a set", "/tools", {"name": "hostile", "tools": [_tool(f"tool_{n}", _wide(3)) for n in range(100)]}


def _long(model: str, size: int) -> Iterator[_Body]:
    """Requests that may be, and take long to answer."""
    for name, prompt, more in (
        ("long prompts", "Tell it again. " * 1900, {"max_tokens": 8}),
        ("long answers", "Count. " * 20, {"max_tokens": 4096, "n": 16, "temperature": 1.0}),
        ("both", "Tell it again. " * 900, {"max_tokens": 4096, "n": 16, "temperature": 1.0}),
    ):
        yield name, _CHAT, {"model": model, "messages": [_user(prompt)], "reuse": "off", **more}
    texts = {"type": "array", "items": {"type": "string"}}
    more = {"n": 16, "temperature": 1.0, "max_tokens": 2000}
    yield "long constrained", _CHAT, _asking(model, texts) | more
