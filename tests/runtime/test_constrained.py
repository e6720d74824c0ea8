"""Constrained answers and log-probabilities: valid, the same alone and in a batch, and without effect on reuse."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tests.helpers.models import tiny

from keepwarm import Batcher, Engine, Generation
from keepwarm.core.request import Decoding, Request
from keepwarm.core.tools import ToolCall
from keepwarm.errors import ConfigError, PromptError

SECONDS = 60
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Zürich", '日本 "x"']},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "near": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "word": {"type": "string", "maxLength": 6},
    },
    "required": ["city", "days", "word"],
}
TOOLS = [{"name": f"tool_{n}", "description": f"Does {n}.", "input_schema": PARAMETERS} for n in range(4)]
MESSAGES = [{"role": "system", "content": "You call tools."}, {"role": "user", "content": "What now?"}]
ASKED: list[dict[str, Any]] = [
    {"tool_choice": "required"},
    {"tool_choice": "required", "temperature": 1.0, "seed": 1},
    {"tool_choice": {"name": "tool_2"}, "temperature": 1.5, "seed": 2, "top_k": 20},
    {"tool_choice": {"name": "tool_1"}, "repetition_penalty": 1.3},
    {"tool_choice": "auto", "temperature": 1.0, "seed": 3, "max_new_tokens": 9},
    {"tool_choice": "none", "max_new_tokens": 6},
    {"response_schema": PARAMETERS, "temperature": 1.0, "seed": 4, "top_p": 0.9},
    {"tool_choice": "required", "max_new_tokens": 5},
    {"max_new_tokens": 7},
]


@pytest.fixture(
    scope="module",
    params=[
        "llama-float32",
        pytest.param("qwen3-bfloat16", marks=pytest.mark.slow),
        pytest.param("gpt2-float32", marks=pytest.mark.slow),
    ],
)
def engine(request: pytest.FixtureRequest, tokenizer: Any) -> Iterator[Engine]:
    family, _, dtype = request.param.partition("-")
    model = tiny(family, getattr(torch, dtype))
    with Engine.from_pretrained((model, tokenizer), step=64, min_step=4, max_pages="2MiB") as engine:
        yield engine


@pytest.fixture(scope="module")
def llama(tokenizer: Any) -> Iterator[Engine]:
    with Engine.from_pretrained((tiny("llama"), tokenizer), step=64, min_step=4, max_pages="2MiB") as engine:
        yield engine


def asked(**choice: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "tools": TOOLS, "max_new_tokens": 400, "trace": True, "logprobs": 3} | choice


def valid(answer: Generation, schemas: dict[str, Any]) -> ToolCall:
    """The first call; where several are allowed, a random model may begin one more than there is room for."""
    assert answer.tool_calls, answer.text
    for call in answer.tool_calls:
        jsonschema.validate(call.arguments, schemas[call.name])
    return answer.tool_calls[0]


@pytest.mark.slow
def test_answers_are_valid_and_the_same_alone_and_in_a_batch(engine: Engine) -> None:
    alone = [engine.generate(**asked(**choice)) for choice in ASKED]
    with Batcher(engine, max_batch=6, max_prefill_tokens=20) as batcher:
        tickets = [batcher.submit(**asked(**choice)) for choice in ASKED]
        together = [ticket.result(SECONDS) for ticket in tickets]
    for one, other in zip(alone, together, strict=True):
        for name in ("text", "token_ids", "logits_digest", "finish_reason", "tool_calls", "logprobs", "exactness"):
            assert getattr(one, name) == getattr(other, name), name
    listed = {tool["name"]: PARAMETERS for tool in TOOLS}
    calls = [valid(answer, listed) for answer in alone[:4]]
    assert [call.name for call in calls[2:]] == ["tool_2", "tool_1"]
    assert "constrain" in alone[0].timings
    jsonschema.validate(json.loads(alone[6].text), PARAMETERS)
    assert alone[6].tool_calls == ()
    assert (alone[7].finish_reason, alone[7].tool_calls) == ("length", ()), "cut in the middle of a call"


def test_reuse_and_labels_stay_as_they_are(engine: Engine) -> None:
    plain = engine.generate(**asked(max_new_tokens=1))
    for choice in ASKED:
        answer = engine.generate(**asked(**choice))
        cold = engine.generate(**asked(**choice), reuse="off")
        assert answer.exactness == "exact"
        assert answer.cached_tokens == engine.generate(**asked(max_new_tokens=1)).cached_tokens > 0
        for name in ("token_ids", "logits_digest", "tool_calls", "logprobs"):
            assert getattr(answer, name) == getattr(cold, name)
        first = answer.logprobs, plain.logprobs
        assert first[0] is not None
        assert first[1] is not None
        assert first[0][0].top == first[1][0].top, "the model's own probabilities, whatever is allowed"


def test_log_probabilities(llama: Engine) -> None:
    answer = llama.generate(**asked(max_new_tokens=5, logprobs=4))
    pieces = list(llama.stream(**asked(max_new_tokens=5, logprobs=4)))
    assert answer.logprobs is not None
    assert [piece.logprob for piece in pieces[:-1]] == list(answer.logprobs)
    for token, found in zip(answer.token_ids, answer.logprobs, strict=True):
        assert found.token_id == token
        assert found.top[0] == (token, found.logprob), "greedy takes the likeliest"
        assert [p for _, p in found.top] == sorted((p for _, p in found.top), reverse=True)
        assert len(found.top) == 4
        assert sum(math.exp(p) for _, p in found.top) <= 1 + 1e-6
    assert llama.generate(**asked(max_new_tokens=2, logprobs=0)).logprobs[0].top == ()  # type: ignore[index]
    assert llama.generate(**asked(max_new_tokens=2, logprobs=None)).logprobs is None
    hot = llama.generate(**asked(max_new_tokens=2, temperature=5.0, seed=1, repetition_penalty=2.0))
    assert hot.logprobs is not None
    assert hot.logprobs[0].top == answer.logprobs[0].top[:3], "before temperature and penalties"


def test_a_call_in_an_unconstrained_answer_is_read(llama: Engine) -> None:
    """The constraint writes a call; the same request without one answers with what `stop` leaves of text."""
    answer = llama.generate(**asked(tool_choice="required"))
    assert answer.tool_calls == tuple(llama.pipeline.adapter.parse_tool_calls(answer.text, TOOLS))
    assert llama.generate(**asked()).tool_calls == ()


def test_a_stop_string_cuts_a_call(llama: Engine) -> None:
    answer = llama.generate(**asked(tool_choice="required", stop='"arguments"'))
    assert (answer.finish_reason, answer.tool_calls) == ("stop", ())
    assert answer.text.endswith(", ")


def node(**more: Any) -> dict[str, Any]:
    properties = {"value": {"type": "integer", "minimum": 0, "maximum": 9}, "next": {"$ref": "#/$defs/node"}}
    return {"type": "object", "properties": properties, "required": ["value"]} | more


HOSTILE: dict[str, dict[str, Any]] = {
    "recursive": {"type": "object", "properties": {"head": {"$ref": "#/$defs/node"}}, "$defs": {"node": node()}},
    "self": {"type": "object", "properties": {"again": {"$ref": "#"}}, "additionalProperties": False},
    "long enum": {"properties": {"a": {"enum": [f"wert {n} ü" for n in range(100)]}}, "required": ["a"]},
    "unicode": {"properties": {"größe 🙂": {"const": '\n\t"\\ \u2028 中'}}, "required": ["größe 🙂"]},
    "many properties": {"properties": {f"p{n}": {"type": "boolean"} for n in range(60)}},
    "words as names": {"properties": {"not": {"type": "null"}, "if": {"type": "null"}}, "required": ["not", "if"]},
    "draft 4": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "required": ["n"],
        "properties": {"n": {"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 5}},
    },
    "unknown formats": {
        "properties": {
            "a": {"type": "string", "format": "password", "maxLength": 3},
            "b": {"type": "integer", "format": "int32", "maximum": 3, "minimum": 0},
        }
    },
    "closed by hand": {"properties": {}, "additionalProperties": False},
    "nothing": {},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas(llama: Engine, name: str) -> None:
    """Random answers of a model that knows nothing: whatever ends is a valid call."""
    tools = [{"name": 'größe "x" 🙂', "input_schema": HOSTILE[name]}, {"name": "other", "input_schema": {}}]
    choice = {"name": tools[0]["name"]}
    ended = 0
    for seed in range(3):
        answer = llama.generate(
            messages=MESSAGES, tools=tools, tool_choice=choice, temperature=3.0, seed=seed, max_new_tokens=120
        )
        if answer.finish_reason == "stop":
            ended += 1
            assert valid(answer, {tools[0]["name"]: HOSTILE[name]}).name == tools[0]["name"]
        else:
            assert answer.tool_calls == ()
    if name not in ("recursive", "self", "many properties", "nothing"):
        assert ended


def written(engine: Engine, tools: list[dict[str, Any]], seed: int) -> str:
    """What random scores write under a constraint: more tools than the model's context window could show."""
    constraint = engine.pipeline.constraints.of(Request(tools=tools), Decoding(tool_choice="required"))
    assert constraint is not None
    chance = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    while not constraint.ended and len(ids) < 300:
        scores = torch.randn(engine.pipeline.model.runner.vocabulary, generator=chance).numpy()
        ids.append(int(np.where(constraint.allowed(len(scores)), scores, -np.inf).argmax()))
        constraint.take(ids[-1])
    return engine.pipeline.tokenizer.decode(ids)


def test_a_hundred_tools_and_huge_schemas(llama: Engine) -> None:
    long = {"properties": {"a": {"enum": [f"wert {n} ü" for n in range(5000)]}}, "required": ["a"]}
    wide = {"properties": {f"p{n}": {"const": n} for n in range(500)}, "required": ["p7", "p499"]}
    schemas = {f"tool_{n}": PARAMETERS for n in range(98)} | {"tool_98": long, "tool_99": wide}
    tools = [{"name": name, "input_schema": schema} for name, schema in schemas.items()]
    called = set()
    for chosen, seed in ((tools, 1), (tools, 2), (tools, 3), (tools[98:99], 4), (tools[99:], 5)):
        for call in llama.pipeline.adapter.parse_tool_calls(written(llama, chosen, seed), chosen):
            jsonschema.validate(call.arguments, schemas[call.name])
            called.add(call.name)
    assert len(called) > 2
    assert "tool_98" in called


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"tool_choice": "any"}, ConfigError, "tool_choice must be 'none', 'auto', 'required' or"),
    ({"tool_choice": {"type": "function"}}, ConfigError, "tool_choice must be"),
    ({"tool_choice": "required", "tools": None}, ConfigError, "needs tools to choose from"),
    ({"tool_choice": {"name": "tool_9"}}, PromptError, "'tool_9'; the request's tools are tool_0, tool_1"),
    ({"tool_choice": "auto", "response_schema": {}}, ConfigError, "exclude each other"),
    ({"response_schema": "json"}, ConfigError, "must be a JSON Schema object, got str"),
    ({"response_schema": {"properties": {"a": {"type": "objec"}}}}, PromptError, r"response_schema: \$\.properties\.a"),
    ({"response_schema": {"properties": {"a": {"not": {}}}}}, PromptError, r"schema: \$\.properties\.a cannot"),
    ({"response_schema": {"const": object()}}, PromptError, "plain JSON"),
    ({"response_schema": {"$ref": "#"}}, PromptError, "no answer satisfies it"),
    ({"response_schema": {"$ref": "https://example.org/s"}}, PromptError, r"response_schema: \$ cannot"),
    ({"logprobs": -1}, ConfigError, "logprobs must be a whole number from 0"),
    ({"logprobs": True}, ConfigError, "logprobs must be a whole number from 0"),
]


@pytest.mark.parametrize(("choice", "error", "message"), REFUSED)
def test_what_cannot_be_followed_is_refused_at_once(
    llama: Engine, choice: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llama.generate(**asked(**choice))
    with Batcher(llama) as batcher, pytest.raises(error, match=message):
        batcher.submit(**asked(**choice))


def test_an_unsupported_schema_names_tool_and_path(llama: Engine) -> None:
    inner = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    deep = {"properties": {"list": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$defs": {"n": inner}}
    tools = [TOOLS[0], {"name": "unique", "input_schema": deep}]
    message = r"tool 'unique': \$\.parameters\.\$defs\.n\.properties\.x cannot be followed .*uniqueItems"
    with pytest.raises(PromptError, match=message):
        llama.generate(**asked(tools=tools, tool_choice="required"))
    llama.generate(**asked(tools=tools, max_new_tokens=1))
    llama.generate(**asked(tools=tools, max_new_tokens=1, tool_choice={"name": "tool_0"}))


def test_inline_tools_are_checked_as_registered_ones(llama: Engine) -> None:
    with pytest.raises(PromptError, match=r"tool 'bad': \$\.parameters\.properties\.x\.type is no valid"):
        llama.generate(
            **asked(tools=[TOOLS[0], {"name": "bad", "input_schema": {"properties": {"x": {"type": "dict"}}}}])
        )


@pytest.mark.slow
def test_tables_are_built_once(tokenizer: Any) -> None:
    with Engine.from_pretrained((tiny("llama"), tokenizer)) as engine:
        engine.generate(messages=MESSAGES, max_new_tokens=1)
        assert engine.stats().constraint_tables_ms == 0.0
        engine.generate(messages=MESSAGES, response_schema={}, max_new_tokens=1)
        took = engine.stats().constraint_tables_ms
        again = engine.generate(messages=MESSAGES, response_schema={}, max_new_tokens=1)
        assert engine.stats().constraint_tables_ms == took > again.timings["constrain"] > 0


def test_a_tokenizer_may_have_more_tokens_than_the_model_knows(tokenizer: Any) -> None:
    with Engine.from_pretrained((tiny("llama", vocab_size=300), tokenizer)) as engine:
        engine.pipeline.constraints.prepare()
        digit = {"type": "integer", "minimum": 0, "maximum": 9}
        answer = engine.generate([7, 8, 9], response_schema=digit, max_new_tokens=8)
        assert 0 <= json.loads(answer.text) <= 9
        assert max(answer.token_ids) < 300


def test_a_stop_string_in_the_last_token_is_not_part_of_the_text(llama: Engine) -> None:
    pieces = list(llama.stream(**asked(response_schema=PARAMETERS, stop=["}"], temperature=1.0, seed=4)))
    result = pieces[-1].result
    assert result is not None
    assert result.finish_reason == "stop"
    assert "}" not in result.text
    assert "".join(piece.text for piece in pieces) == result.text
