"""OpenAI's own SDK speaks the Responses protocol to real servers: items, events, tools, and what is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from pydantic import BaseModel
from tests.helpers.inside import serving, status
from tests.helpers.processes import DEADLINE, ServerProcess
from tests.helpers.services import Keyed

ASKED: dict[str, Any] = {"model": "demo", "temperature": 0, "max_output_tokens": 8}
QUESTION = "Is it raining in Oslo?"
LOOK: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "description": "Looks out of the window.",
    "parameters": {"type": "object", "properties": {"wet": {"type": "boolean"}}, "required": ["wet"]},
    "strict": False,
}
FORCED = {"tools": [LOOK], "tool_choice": {"type": "function", "name": "look"}, "max_output_tokens": 40}

DRAWN = ("id", "call_id", "parsed_arguments")  # the last one is the SDK's


class Sky(BaseModel):
    """What the sky looks like."""

    wet: bool


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=DEADLINE, max_retries=0) as client:
        yield client


@pytest.fixture
def small(saved: Callable[..., Path], tmp_path: Path) -> Iterator[tuple[Any, int]]:
    """A client of a server whose model has a short window, and the window."""
    models = {"demo": str(saved("llama", max_position_embeddings=1024))}
    with (
        serving(tmp_path / "store", models=models) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=DEADLINE, max_retries=0) as client,
    ):
        yield client, status(url)["context_window"]


def as_typed(event: Any) -> Any:
    """What the SDK read without checking it, checked against its own type."""
    return type(event).model_validate_json(event.to_json(warnings=False, exclude_unset=True))


def same_but_ids(response: Any) -> Any:
    """What a response says, without what is drawn anew for each."""
    items = [item.to_dict() for item in response.output]
    return response.status, [{k: v for k, v in item.items() if k not in DRAWN} for item in items]


def test_an_answer_whole_and_streamed(client: Any) -> None:
    whole = as_typed(
        client.responses.create(**ASKED, input=QUESTION, instructions="You are brief.", metadata={"a": "b"})
    )
    usage = whole.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (whole.metadata, whole.instructions) == ({"a": "b"}, "You are brief.")
    assert whole.keepwarm["exactness"] == "exact"
    events = [
        as_typed(e)
        for e in client.responses.create(**ASKED, input=QUESTION, instructions="You are brief.", stream=True)
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    said = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[4 : 4 + len(said)] == ["output_text.delta"] * len(said)
    ends = ["output_text.done", "content_part.done", "output_item.done"]
    assert kinds[4 + len(said) : -1] == ends
    last = events[-1].response
    assert kinds[-1] == whole.status == last.status
    assert "".join(said) == whole.output_text == last.output_text
    assert same_but_ids(last) == same_but_ids(whole)
    if whole.status == "incomplete":
        assert whole.incomplete_details.reason == "max_output_tokens"


def test_going_on_from_a_response_computes_the_new_message_alone(client: Any) -> None:
    system = {"role": "developer", "content": "You are the clerk of a harbour. " * 10}
    first = client.responses.create(**ASKED, input=[system, {"role": "user", "content": "How deep is pier one?"}])
    more = ASKED | {"input": "And pier two?"}
    second = client.responses.create(**more, previous_response_id=first.id)
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
    assert second.previous_response_id == first.id
    listed = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.role for item in listed] == ["developer", "user", "assistant", "user"]
    assert [item.id for item in client.responses.input_items.list(second.id, limit=2)] == [i.id for i in listed[::-1]]
    again = [system, listed[1].to_dict(), *first.output, {"role": "user", "content": "And pier two?"}]
    cold = client.responses.create(**ASKED, input=again, store=False, extra_body={"reuse": "off"})
    assert cold.output_text == second.output_text
    assert cold.usage.input_tokens_details.cached_tokens == 0
    client.responses.delete(first.id)  # what goes on from it stays
    third = client.responses.create(**more, previous_response_id=second.id, stream=True)
    assert [event.type for event in third][-1] in ("response.completed", "response.incomplete")
    told = client.responses.retrieve(second.id)
    assert told.to_dict() == second.to_dict()
    for gone in (first.id, cold.id, "resp_0"):
        with pytest.raises(openai.NotFoundError, match="there is no response") as caught:
            client.responses.create(**more, previous_response_id=gone)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
        for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                ask(gone)


def test_a_call_and_its_result(client: Any) -> None:
    whole = as_typed(client.responses.create(**ASKED | FORCED, input=QUESTION))
    (call,) = whole.output
    assert (whole.status, call.name, list(json.loads(call.arguments))) == ("completed", "look", ["wet"])
    with client.responses.stream(**ASKED | FORCED, input=QUESTION) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type.removeprefix("response.") for event in events]
    arguments = [f"function_call_arguments.{end}" for end in ("delta", "done")]
    assert kinds[2:] == ["output_item.added", *arguments, "output_item.done", "completed"]
    assert json.loads(final.output[0].arguments) == json.loads(call.arguments)
    assert same_but_ids(final) == same_but_ids(whole)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It is dry."}
    kept = client.responses.create(**ASKED, input=[result], tools=[LOOK], previous_response_id=whole.id)
    asked = [{"role": "user", "content": QUESTION}, {"type": "reasoning", "summary": []}, *whole.output, result]
    sent = client.responses.create(**ASKED, input=asked, tools=[LOOK])
    assert same_but_ids(kept) == same_but_ids(sent)
    assert sent.keepwarm["left_out"] == ["input (reasoning)"]
    with pytest.raises(openai.BadRequestError, match="no function_call before it"):
        client.responses.create(**ASKED, input=[result])


def test_structured_output(client: Any) -> None:
    found = client.responses.parse(**ASKED | {"max_output_tokens": 40}, input=QUESTION, text_format=Sky)
    assert isinstance(found.output_parsed, Sky)
    more = client.responses.create(
        **ASKED, input=[*found.output, {"role": "user", "content": "Why?"}], include=["message.output_text.logprobs"]
    )
    assert len(more.output[0].content[0].logprobs) == more.usage.output_tokens


def test_what_codex_always_sends_is_taken(client: Any, server: ServerProcess) -> None:
    """The oddities of bodies that Codex CLI 0.169 sent."""
    others = [
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "agents", "tools": [LOOK]},
    ]
    text = {"type": "input_text", "text": "You are a coding agent."}
    items = [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [text]},
        {"type": "message", "id": "msg_2", "role": "developer", "content": [text, text]},
        {"type": "message", "id": "msg_3", "role": "user", "content": [{"type": "input_text", "text": "Say hello"}]},
        {
            "type": "function_call",
            "status": "completed",
            "id": "fc_1",
            "name": "look",
            "arguments": "{}",
            "call_id": "c",
        },
        {"type": "function_call_output", "id": "fco_1", "call_id": "c", "output": "Wall time: 0"},
    ]
    body = {"model": "demo", "stream": True, "input": items, "tools": [LOOK, *others], "tool_choice": "auto"}
    body |= {"parallel_tool_calls": True, "reasoning": {"summary": "auto"}, "store": False}
    body |= {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "01a2", "max_output_tokens": 4}
    body |= {"client_metadata": {"session_id": "01a2", "x-codex-turn-metadata": "{}"}}
    answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=DEADLINE)
    assert answer.status_code == 200, answer.text
    last = json.loads(answer.text.strip().rpartition("data: ")[2])["response"]
    assert last["keepwarm"]["left_out"] == ["tools[1] (web_search)", "tools[2] (namespace agents)", "reasoning.summary"]
    assert last["store"] is False
    forced = ASKED | {"input": "Hi", "tools": others, "tool_choice": "required"}
    with pytest.raises(openai.BadRequestError, match="tool_choice needs tools"):
        client.responses.create(**forced)


@pytest.mark.slow
def test_an_answer_ends_where_it_is_cut_to_the_window(small: tuple[Any, int]) -> None:
    client, window = small
    prompt = "word " * (window - 80)  # nearly all of the window
    asked = ASKED | {"max_output_tokens": 10**9, "input": prompt, "extra_body": {"ignore_eos": True}}
    whole = as_typed(client.responses.create(**asked))
    left = window - whole.usage.input_tokens
    assert whole.keepwarm["max_tokens_cut_to"] == left == whole.usage.output_tokens
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.max_output_tokens == 10**9, "it is told as it was asked"
    last = as_typed(list(client.responses.create(**asked, stream=True))[-1])
    assert last.type == "response.incomplete"
    assert last.response.keepwarm["max_tokens_cut_to"] == left
    assert client.responses.retrieve(whole.id).to_dict() == whole.to_dict()


@pytest.mark.slow
def test_an_answer_of_no_stated_length_is_a_long_one(small: tuple[Any, int]) -> None:
    """Codex states none, and takes an answer that is cut for an error."""
    client, window = small
    found = client.responses.create(
        model="demo", input="word " * (window - 560), temperature=0, store=False, extra_body={"ignore_eos": True}
    )
    assert found.usage.output_tokens == window - found.usage.input_tokens > 512
    assert "max_tokens_cut_to" not in found.keepwarm, "nobody asked for more"


def test_fields_of_other_servers(client: Any) -> None:
    """Those that chat takes: they change an answer as there, or are named, or change nothing."""
    chosen = {"min_p": 0.01, "top_k": -1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"50": -100}}
    others = {"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [2], "seed": 3, "repetition_penalty": 1.05}
    taken = {"cache_prompt": True, "id_slot": -1, "enable_thinking": False, "thinking": {"type": "adaptive"}}
    more = {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}, "service_tier": "flex"}
    asked: dict[str, Any] = {"input": "Hi", "temperature": 0.7, "model": "demo", "max_output_tokens": 4}
    found = client.responses.create(**asked, **more, extra_body=chosen | others | taken)
    assert found.usage.output_tokens == 4
    assert found.keepwarm["left_out"] == ["thinking", "reasoning.effort", "text.verbosity"]
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": "Hi"}],
        model="demo",
        temperature=0.7,
        max_tokens=4,
        extra_body=chosen | others,
    )
    assert chat.choices[0].message.content == found.output_text, "a seed draws the same"
    ended = client.responses.create(**asked, extra_body=others | {"stop": [" ", "e", "a", "i", "o"], "min_tokens": 0})
    assert ended.status == "completed", "a stop text ends it"
    assert "left_out" not in ended.keepwarm


@pytest.mark.parametrize(
    ("more", "named", "told"),
    [
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools.0", "type 'function'"),
        ({"tools": [LOOK], "tool_choice": {"type": "web_search"}}, "tool_choice", "one function"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "send the item itself"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://a/"}]}]}, "input", "URL"),
        ({"truncation": "auto"}, "truncation", "fewer items"),
        ({"extra_body": {"logit_bias": {"999999": 1}}}, "None", "vocabulary"),
        ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, "chat_template_kwargs", "leave it out"),
        ({"extra_body": {"skip_special_tokens": False}}, "skip_special_tokens", "True"),
        ({"top_logprobs": 2}, "top_logprobs", "needs include"),
        ({"background": True}, "background", "False"),
        ({"extra_body": {"beam_width": 3}}, "beam_width", "not known"),
        ({"input": "word " * 9000}, "input", "context window"),
    ],
)
def test_what_is_not_supported_is_told(client: Any, more: dict[str, Any], named: str, told: str) -> None:
    with pytest.raises(openai.BadRequestError, match=told) as caught:
        client.responses.create(**ASKED | {"input": "Hi"} | more)
    assert str(caught.value.param).startswith(named)


def test_another_tenants_response_is_unknown(keyed: Keyed) -> None:
    def ask(key: str, method: str, path: str = "", **more: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.request(method, f"{keyed.url}/v1/responses{path}", headers=headers, timeout=DEADLINE, **more)

    body = {"model": "tiny", "input": "Hello", "max_output_tokens": 4}
    number = ask(keyed.acme, "POST", json=body).json()["id"]
    onward = body | {"previous_response_id": number}
    for theirs in (number, "resp_0"):
        found = [ask(keyed.umbrella, method, f"/{theirs}") for method in ("GET", "DELETE")]
        found += [ask(keyed.umbrella, "POST", json=onward | {"previous_response_id": theirs})]
        assert [answer.status_code for answer in found] == [404] * 3
        assert {answer.json()["error"]["type"] for answer in found} == {"invalid_request_error"}
    assert ask(keyed.acme, "POST", json=onward).status_code == 200
    headers = {"authorization": f"Bearer {keyed.acme}"}
    assert number not in httpx.get(f"{keyed.url}/v1/sessions", headers=headers, timeout=DEADLINE).text
    purged = httpx.post(f"{keyed.url}/v1/cache/purge", headers=headers, timeout=DEADLINE)
    assert purged.status_code == 200
    assert ask(keyed.acme, "GET", f"/{number}").status_code == 404
