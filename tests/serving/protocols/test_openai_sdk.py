"""OpenAI's own SDK against a real server with the embedded model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import openai
import pytest
from tests.helpers.processes import DEADLINE, ServerProcess, chat
from tests.helpers.services import weather

MESSAGES = [{"role": "system", "content": "You answer in one word."}, {"role": "user", "content": "Capital of France?"}]
ASKED: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=DEADLINE, max_retries=0) as client:
        yield client


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["demo", "gpt-4o"]
    assert client.models.retrieve("gpt-4o").owned_by == "keepwarm"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.models.retrieve("gpt-5")


def test_a_chat_and_its_stream_say_the_same(client: Any) -> None:
    whole = client.chat.completions.create(**ASKED)
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens > 0
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-2].keepwarm["exactness"] == "exact"


def test_a_prediction(client: Any) -> None:
    """It changes nothing of the answer, and the usage tells how much of it was right."""
    plain = client.chat.completions.create(**ASKED | {"max_tokens": 40})
    said = plain.choices[0].message.content
    assert plain.usage.completion_tokens_details is None
    for content in (said, [{"type": "text", "text": said}], "A text that is nothing like it."):
        asked = ASKED | {"max_tokens": 40, "prediction": {"type": "content", "content": content}}
        found = client.chat.completions.create(**asked)
        assert found.choices[0].message.content == said
        assert found.usage.completion_tokens_details.accepted_prediction_tokens >= 0
        *_, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        assert last.usage.completion_tokens_details.rejected_prediction_tokens >= 0


def test_a_reply_goes_back_as_it_came(client: Any) -> None:
    first = client.chat.completions.create(**ASKED)
    more = [*MESSAGES, first.choices[0].message, {"role": "user", "content": "And of Spain?"}]
    second = client.chat.completions.create(**ASKED | {"messages": more})
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_choices_stop_and_seed(client: Any) -> None:
    hot = ASKED | {"temperature": 1.0, "seed": 7, "n": 2}
    first, second = (client.chat.completions.create(**hot) for _ in range(2))
    assert [c.message.content for c in first.choices] == [c.message.content for c in second.choices]
    assert [c.index for c in first.choices] == [0, 1]
    texts = ["", ""]
    for chunk in client.chat.completions.create(**hot, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in first.choices]
    whole = client.chat.completions.create(**ASKED).choices[0].message.content
    letter = whole.strip()[1]
    cut = client.chat.completions.create(**ASKED, stop=[letter]).choices[0]
    assert cut.message.content == whole[: whole.index(letter)]
    assert cut.finish_reason == "stop"


def test_completions_of_texts_and_token_ids(client: Any) -> None:
    asked = {"model": "demo", "max_tokens": 3, "temperature": 0}
    one = client.completions.create(**asked, prompt="One, two, three,")
    two = client.completions.create(**asked, prompt=["One, two, three,", "Red, green,"])
    assert two.choices[0].text == one.choices[0].text
    assert two.usage.prompt_tokens > one.usage.prompt_tokens
    ids = client.completions.create(**asked, prompt=[504, 28, 827, 28])
    assert ids.usage.prompt_tokens == 4
    streamed = "".join(
        chunk.choices[0].text for chunk in client.completions.create(**asked, prompt="One, two, three,", stream=True)
    )
    assert streamed == one.choices[0].text


def test_what_is_wrong_is_told_as_openai_does(client: Any, server: ServerProcess) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**ASKED | {"model": "gpt-5"})
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASKED | {"messages": [{"role": "user", "content": "word " * 9000}]})
    assert caught.value.code == "context_length_exceeded"
    for more, named in (
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"extra_body": {"include_stop_str_in_output": True}}, "include_stop_str_in_output"),
        ({"extra_body": {"beam_width": 3}}, "beam_width"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"max_completion_tokens": 3}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**ASKED | more)
        assert caught.value.param == named, more
        assert named in caught.value.message
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}]
    with pytest.raises(openai.BadRequestError, match="fetches no URL"):
        client.chat.completions.create(**ASKED | {"messages": image})
    error = chat(server.url, "hi", model="gpt-5").json()["error"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.slow
def test_many_at_once_answer_as_one_alone(server: ServerProcess) -> None:
    async def ask(client: Any, number: int) -> str:
        messages = [MESSAGES[0], {"role": "user", "content": f"What is {number} plus one?"}]
        if number % 2:
            stream = await client.chat.completions.create(**ASKED | {"messages": messages}, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        answer = await client.chat.completions.create(**ASKED | {"messages": messages})
        return str(answer.choices[0].message.content)

    async def both() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=DEADLINE) as client:
            together = await asyncio.gather(*(ask(client, number) for number in range(8)))
            return list(together), [await ask(client, number) for number in range(8)]

    together, alone = asyncio.run(both())
    assert together == alone


@pytest.mark.slow
def test_a_forced_call_is_valid_whole_and_streamed(client: Any) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    asked = ASKED | {"tools": [weather(), weather("get_time")], "max_tokens": 60}
    for choice in (named, "required"):
        whole = client.chat.completions.create(**asked, tool_choice=choice).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        call = whole.message.tool_calls[0]
        assert isinstance(json.loads(call.function.arguments)["city"], str)
        name, arguments = "", ""
        for chunk in client.chat.completions.create(**asked, tool_choice=choice, stream=True):
            for part in chunk.choices[0].delta.tool_calls or ():
                name, arguments = part.function.name, arguments + part.function.arguments
            assert not chunk.choices[0].delta.content
        assert (name, arguments) == (call.function.name, call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
    more = client.chat.completions.create(**asked | {"messages": [*MESSAGES, whole.message, result], "max_tokens": 4})
    assert more.usage.prompt_tokens > 0
    with pytest.raises(openai.BadRequestError, match="get_news"):
        client.chat.completions.create(**asked, tool_choice={"type": "function", "function": {"name": "get_news"}})


def test_tools_without_a_call_are_answered_in_text(client: Any) -> None:
    asked = ASKED | {"tools": [weather()], "tool_choice": "none"}
    whole = client.chat.completions.create(**asked).choices[0]
    assert not whole.message.tool_calls
    chunks = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content


def test_answers_of_a_schema(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"days": {"type": "integer"}},
        "required": ["days"],
        "additionalProperties": False,
    }
    strict = {"type": "json_schema", "json_schema": {"name": "stay", "schema": schema, "strict": True}}
    said = client.chat.completions.create(**ASKED | {"max_tokens": 40}, response_format=strict).choices[0]
    assert isinstance(json.loads(said.message.content)["days"], int)
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**ASKED, response_format=bad)


def test_logprobs(client: Any) -> None:
    asked = ASKED | {"logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    choice = client.chat.completions.create(**asked).choices[0]
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens if not token.token.startswith("<|")) == choice.message.content
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in tokens)
    assert tokens[0].logprob == tokens[0].top_logprobs[0].logprob
    streamed = [
        token
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert [token.logprob for token in streamed] == [token.logprob for token in tokens]
    old = client.completions.create(model="demo", prompt="One, two,", max_tokens=2, temperature=0, logprobs=1).choices[
        0
    ]
    assert len(old.logprobs.tokens) == len(old.logprobs.token_logprobs) == 2


def test_offsets_of_a_streamed_completion_are_the_whole_ones(client: Any) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": ["One, two,", "Red, green,"], "max_tokens": 4, "temperature": 0}
    whole = client.completions.create(**asked, logprobs=1)
    offsets: list[list[int]] = [[], []]
    for chunk in client.completions.create(**asked, logprobs=1, stream=True):
        for choice in chunk.choices:
            offsets[choice.index] += choice.logprobs.text_offset if choice.logprobs else []
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]
    assert offsets[0][-1] > 0


def test_ids_are_told(client: Any) -> None:
    """As vLLM tells them. The prompt's ids and half of the answer's are a prompt that is answered by the other half."""
    ids: dict[str, Any] = {"extra_body": {"return_token_ids": True}}
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 6, "temperature": 0}
    prompts = ["One, two, three,", "Red, green,"]
    whole = client.completions.create(**asked, prompt=prompts, **ids).choices
    streamed: list[dict[str, list[int]]] = [{}, {}]
    for chunk in client.completions.create(**asked, prompt=prompts, stream=True, **ids):
        for choice in chunk.choices:
            for name in {"prompt_token_ids", "token_ids"} & set(choice.model_extra):
                streamed[choice.index].setdefault(name, []).extend(choice.model_extra[name])
    assert streamed == [{"prompt_token_ids": one.prompt_token_ids, "token_ids": one.token_ids} for one in whole]
    begun = [one.prompt_token_ids + one.token_ids[:3] for one in whole]
    rest = client.completions.create(**asked | {"max_tokens": 3}, prompt=begun, **ids).choices
    assert [one.token_ids for one in rest] == [one.token_ids[3:] for one in whole]
    chat = client.chat.completions.create(**ASKED, **ids)
    chunks = list(client.chat.completions.create(**ASKED, stream=True, **ids))
    assert len(chat.choices[0].token_ids) == chat.usage.completion_tokens
    told = [token for chunk in chunks for token in chunk.choices[0].model_extra.get("token_ids", ())]
    assert told == chat.choices[0].token_ids
    told = [chunk.prompt_token_ids for chunk in chunks if "prompt_token_ids" in chunk.model_extra]
    assert told == [chat.prompt_token_ids]
    plain = client.completions.create(**asked, prompt="One, two,")
    assert not {"prompt_token_ids", "token_ids"} & set(plain.choices[0].model_extra)


def test_why_it_missed(client: Any) -> None:
    def ask(system: str, compared: str | None) -> Any:
        messages = [{"role": "system", "content": system * 30}, MESSAGES[1]]
        more = {"prompt_cache_options": {"comparison_response_id": compared}} if compared else {}
        return client.chat.completions.create(**ASKED | {"messages": messages}, extra_body=more)

    first = ask("Be exact. ", None)
    assert ask("Be exact. ", first.id).prompt_cache_diagnostics["type"] == "cache_hit"
    missed = ask("Be quick. ", first.id).prompt_cache_diagnostics
    assert (missed["type"], missed["reason"]) == ("cache_miss", "input_changed")
    assert missed["cache_missed_tokens"] > 0
    assert ask("Be exact. ", "chatcmpl-0").prompt_cache_diagnostics == {"type": "comparison_response_not_found"}


def test_tools_are_shown_as_they_are_sent(client: Any, server: ServerProcess) -> None:
    """The order of keys reaches the prompt through every layer: what one request stores, only its like finds."""
    properties = {"reasoning": {"type": "string"}, "answer": {"type": ["string", "null"], "default": None}}
    schema = {"type": "object", "properties": properties, "required": ["reasoning", "answer"]}
    function = {"name": "fill", "parameters": schema, "description": "Fills a form. " * 30}
    tool = {"function": function, "type": "function"}
    turned = json.loads(json.dumps(tool, sort_keys=True))
    system = {"role": "system", "content": "You fill in forms."}
    asked = ASKED | {"messages": [system, {"role": "user", "content": "Fill it in."}]}
    client.chat.completions.create(**asked, tools=[tool])

    def reused(tools: list[Any]) -> int:
        prompt = {"messages": [system, {"role": "user", "content": "Fill it in."}], "tools": tools}
        told = httpx.post(f"{server.url}/v1/cache/explain", json=prompt, timeout=DEADLINE)
        return int(told.json()["cached_tokens"])

    assert reused([tool]) > 100
    assert reused([turned]) < reused([tool]), "up to where the order differs"
