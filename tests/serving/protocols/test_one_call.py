"""One call where a client asks for one, by the clients' own packages, of a model whose family writes several."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from tests.helpers.models import tiny
from tests.helpers.processes import DEADLINE, ServerProcess
from tests.helpers.services import weather

pytestmark = pytest.mark.slow

TEMPLATE = (  # of the Qwen family, as its adapter knows it
    "{% for tool in tools or [] %}<tools>{{ tool | tojson }}</tools>{% endfor %}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# <tool_call> #}"
)
QUESTION = [{"role": "user", "content": "Is it raining in Oslo, and in Bergen?"}]
SEEDS = range(4)


def look(name: str = "look") -> dict[str, Any]:
    """Short to call: a model of random weights is through in time."""
    parameters = {"type": "object", "properties": {"wet": {"type": "boolean"}}, "required": ["wet"]}
    return {"name": name, "description": "Looks out of the window.", "input_schema": parameters}


def function(tool: dict[str, Any]) -> dict[str, Any]:
    described = {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
    return {"type": "function", "function": described}


class Sky(BaseModel):
    """What the sky looks like."""

    wet: bool


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[ServerProcess]:
    """A tiny Qwen with a template that writes several calls in one answer."""
    folder = tmp_path_factory.mktemp("qwen")
    tiny("qwen2").save_pretrained(folder)
    marked = copy.deepcopy(tokenizer)
    marked.chat_template = TEMPLATE
    marked.save_pretrained(folder)
    process = ServerProcess(
        folder, tmp_path_factory.mktemp("calls"), environment={"KEEPWARM__SERVER__MODEL_NAMES": '["demo"]'}
    ).ready()
    yield process
    assert process.stop() == 0


@pytest.fixture(scope="module")
def of_openai(caller: ServerProcess) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{caller.url}/v1", api_key="none", timeout=DEADLINE, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def of_anthropic(caller: ServerProcess) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=caller.url, api_key="none", timeout=DEADLINE, max_retries=0) as client:
        yield client


def test_openai(of_openai: Any) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": QUESTION,
        "tools": [function(look()), function(look("peer"))],
        "tool_choice": "required",
        "max_tokens": 200,
        "temperature": 1.0,
    }

    def calls(seed: int) -> list[Any]:
        return list(of_openai.chat.completions.create(**asked, seed=seed).choices[0].message.tool_calls)

    goes_on = next(seed for seed in range(200, 1000) if len(calls(seed)) > 1)  # one in a hundred and fifty does
    for seed in (goes_on, *SEEDS):
        one = asked | {"seed": seed, "parallel_tool_calls": False}
        choice = of_openai.chat.completions.create(**one).choices[0]
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert isinstance(json.loads(call.function.arguments)["wet"], bool)
        parts = [
            part
            for chunk in of_openai.chat.completions.create(**one, stream=True)
            for part in chunk.choices[0].delta.tool_calls or ()
        ]
        assert {part.index for part in parts} == {0}
        told = of_openai.chat.completions.create(**one, logprobs=True).choices[0]
        sampled = b"".join(bytes(each.bytes) for each in told.logprobs.content).decode()
        assert f'"arguments": {call.function.arguments}' in sampled, "as it was sampled"
        assert "".join(part.function.arguments for part in parts) == call.function.arguments


def test_anthropic(of_anthropic: Any) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": QUESTION,
        "tools": [look(), look("peer")],
        "max_tokens": 200,
        "extra_body": {"temperature": 1.0},
    }
    for choice in ({"type": "any"}, {"type": "tool", "name": "peer"}):
        for _ in SEEDS:
            answer = of_anthropic.messages.create(**asked, tool_choice=choice | {"disable_parallel_tool_use": True})
            assert answer.stop_reason == "tool_use"
            (use,) = answer.content
            assert use.name in ("look", "peer")[choice["type"] == "tool" :]
            assert isinstance(use.input["wet"], bool)
    free = of_anthropic.messages.create(
        **asked | {"max_tokens": 8}, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    )
    assert free.stop_reason in ("end_turn", "max_tokens", "tool_use")


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_openai(caller: ServerProcess, method: Any) -> None:
    model = ChatOpenAI(base_url=f"{caller.url}/v1", api_key="none", model="demo", max_tokens=64, temperature=1.0)  # type: ignore[arg-type,call-arg]
    for _ in SEEDS:
        assert isinstance(model.with_structured_output(Sky, method=method).invoke("Is it raining?"), Sky)


def test_langchain_anthropic(caller: ServerProcess) -> None:
    model = ChatAnthropic(base_url=caller.url, api_key="none", model="demo", max_tokens=64)  # type: ignore[call-arg,arg-type]
    for _ in SEEDS:
        assert isinstance(model.with_structured_output(Sky).invoke("Is it raining?"), Sky)
    bound = model.bind_tools([function(look()), weather()], tool_choice="any", parallel_tool_calls=False)
    assert len(bound.invoke("Is it raining?").tool_calls) <= 1
