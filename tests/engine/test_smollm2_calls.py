"""The embedded model with 20 real tools: it has no skill with them, and yet every constrained answer is a call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from keepwarm import Engine
from keepwarm.cli.demo.command import questions, requests, tools

pytestmark = pytest.mark.host_memory("so large a model takes minutes through transformers; tiny ones of its class run")

CHOICES = ({"name": "get_exchange_rate"}, {"name": "get_weather_forecast"}, "required")
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools()}


@pytest.fixture(scope="module")
def engine(demo_folder: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(demo_folder, dtype="float32") as engine:
        yield engine


@pytest.mark.slow
def test_every_constrained_answer_is_a_valid_call(engine: Engine) -> None:
    finished = 0
    for number, request in enumerate(requests(questions()[: len(CHOICES)])):
        answer = engine.generate(**request, tool_choice=CHOICES[number], max_new_tokens=120, repetition_penalty=1.3)
        assert (answer.cached_tokens > 2000) is (number > 0), "the constraint leaves reuse alone"
        if answer.finish_reason == "length":  # it need not come to an end, but then it is no call
            assert answer.tool_calls == ()
            continue
        (call,) = answer.tool_calls
        jsonschema.validate(call.arguments, SCHEMAS[call.name])
        assert json.loads(answer.text) == {"name": call.name, "arguments": call.arguments}
        finished += 1
    assert finished


@pytest.mark.slow
def test_an_answer_follows_a_schema(engine: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "dry": {"type": "boolean"}},
        "required": ["city", "dry"],
    }
    prompt = [{"role": "user", "content": "Is it dry in Lisbon?"}]
    answer = engine.generate(messages=prompt, response_schema=schema, max_new_tokens=40)
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text), schema)
    assert "".join(piece.text for piece in engine.stream(messages=prompt, response_schema=schema)) == answer.text
