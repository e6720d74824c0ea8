"""SGLang's own protocol against a real server. SGLang's own test of it is in tests/sglang."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.processes import DEADLINE, ServerProcess
from tests.helpers.services import Keyed

from keepwarm.core.results import Piece, TokenLogprob
from keepwarm.serving.answers import Answers
from keepwarm.serving.app import create_app
from keepwarm.serving.protocols import sglang
from keepwarm.serving.protocols.errors import ApiError
from keepwarm.serving.schemas.sglang import GenerateRequest
from keepwarm.serving.settings import ServeConfig

IDS = [7 + i * 31 % 900 for i in range(90)]
GREEDY = {"temperature": 0, "max_new_tokens": 5}


def generated(server: ServerProcess, expected: int = 200, **body: Any) -> Any:
    answer = httpx.post(f"{server.url}/generate", json={"sampling_params": GREEDY} | body, timeout=DEADLINE)
    assert answer.status_code == expected, answer.text
    return answer.json()


def streamed(server: ServerProcess, **body: Any) -> list[dict[str, Any]]:
    asked = {"sampling_params": GREEDY, "stream": True} | body
    with httpx.stream("POST", f"{server.url}/generate", json=asked, timeout=DEADLINE) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_an_answer_whole_and_streamed(server: ServerProcess) -> None:
    whole = generated(server, input_ids=IDS, return_logprob=True, top_logprobs_num=2, rid="mine")
    assert len(whole["output_ids"]) == 5
    meta = whole["meta_info"]
    assert (meta["id"], meta["finish_reason"]) == ("mine", {"type": "length", "length": 5})
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (90, 5)
    assert [token for _, token, _ in meta["output_token_logprobs"]] == whole["output_ids"]
    assert [top[0] for top in meta["output_top_logprobs"]] == meta["output_token_logprobs"]
    chunks = streamed(server, input_ids=IDS, return_logprob=True)
    assert (chunks[-1]["text"], chunks[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    assert chunks[-1]["meta_info"]["output_token_logprobs"] == meta["output_token_logprobs"]
    assert chunks[-1]["meta_info"]["cached_tokens"] == 89
    assert [chunk["meta_info"]["completion_tokens"] for chunk in chunks[:5]] == [1, 2, 3, 4, 5]


def test_several_prompts_are_a_list(server: ServerProcess) -> None:
    each = generated(server, text=["The sea is", "The sky is"], sampling_params=GREEDY | {"n": 2})
    assert [one["meta_info"]["completion_tokens"] for one in each] == [5] * 4
    assert each[0]["text"] == each[1]["text"] == generated(server, text="The sea is")["text"]
    last = {chunk["index"]: chunk["text"] for chunk in streamed(server, text=["The sea is", "The sky is"])}
    assert last == {0: each[0]["text"], 1: each[2]["text"]}
    assert isinstance(generated(server, input_ids=[IDS]), list)


def test_what_is_flushed_is_computed_again_and_is_the_same(server: ServerProcess) -> None:
    before = generated(server, input_ids=IDS, return_logprob=True)
    assert generated(server, input_ids=IDS)["meta_info"]["cached_tokens"] == 89
    flushed = httpx.post(f"{server.url}/flush_cache", timeout=DEADLINE).json()
    assert flushed["success"]
    again = generated(server, input_ids=IDS, return_logprob=True)
    assert again["meta_info"]["cached_tokens"] == 0
    assert again["meta_info"]["output_token_logprobs"] == before["meta_info"]["output_token_logprobs"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "exactly one of text and input_ids"),
        ({"text": "a", "input_ids": [1]}, "exactly one of text and input_ids"),
        ({"text": "a", "logprob_start_len": 0}, "logprob_start_len"),
        ({"text": "a", "sampling_params": {"json_schema": "{}"}}, "json_schema"),
        ({"text": "a", "lora_path": "b"}, "lora_path"),
        ({"text": "a", "model": "b"}, "not served here"),
    ],
)
def test_what_would_change_an_answer_is_an_error(server: ServerProcess, body: dict[str, Any], says: str) -> None:
    assert says in json.dumps(generated(server, 404 if "model" in body else 400, **body))


@pytest.mark.slow
def test_what_says_nothing_is_accepted_as_sglangs_clients_send_it(server: ServerProcess) -> None:
    """`sglang.benchmark.serving` sends the first three with every request; SGLang reads null as left out."""
    unsaid: dict[str, Any] = {
        "lora_path": None,
        "return_routed_experts": False,
        "logprob_start_len": -1,
        "top_logprobs_num": None,
    }
    unsaid |= {"image_data": None, "return_logprob": None, "rid": None, "log_metrics": True}
    chosen = GREEDY | dict.fromkeys(("n", "top_p", "json_schema", "regex", "stop_regex", "min_new_tokens"))
    answer = generated(server, text="The sea is", sampling_params=chosen, **unsaid)
    assert answer["text"] == generated(server, text="The sea is")["text"]
    nothing_said = httpx.post(f"{server.url}/generate", json={"text": "a", "sampling_params": None}, timeout=DEADLINE)
    assert nothing_said.json()["meta_info"]["completion_tokens"] <= 128


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": 5}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", ""]}, "text.1"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids.1"),
        ({"input_ids": [True]}, "input_ids.0"),
        ({"input_ids": [10**100]}, "input_ids.0"),
    ],
)
def test_an_error_names_what_was_sent(server: ServerProcess, body: dict[str, Any], param: str) -> None:
    assert generated(server, 400, **body)["error"]["param"] == param


def test_a_conversation_is_refused_and_not_ignored(server: ServerProcess) -> None:
    asked = {"text": "The sea is", "sampling_params": GREEDY}
    answer = httpx.post(f"{server.url}/generate", json=asked, headers={"x-session-id": "mine"}, timeout=DEADLINE)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-session-id")


@pytest.mark.parametrize("path", ["/flush_cache", "/v1/cache/purge"])
def test_a_page_of_another_origin_removes_nothing(server: ServerProcess, path: str) -> None:
    for origin in ("https://elsewhere.example", "null", "http://127.0.0.1:1"):
        assert httpx.post(f"{server.url}{path}", headers={"origin": origin}, timeout=DEADLINE).status_code == 403
    assert httpx.get(f"{server.url}{path}", timeout=DEADLINE).status_code == 405  # a picture's address could ask so


def test_a_silent_stream_sends_events_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's benchmark parses each line as JSON, so a comment would end it."""
    monkeypatch.setattr(sglang, "HEARTBEAT", 0.01)
    (silent,) = asyncio.run(chunks_of(0))
    assert json.loads(silent.removeprefix(b"data: "))["output_ids"] == []


def test_the_events_of_a_long_answer_grow_slowly() -> None:
    """Each has the whole answer so far; one for every token would weigh 500 times the answer."""
    found = asyncio.run(chunks_of(1000))
    assert len(found) < 300
    counts = [len(json.loads(chunk.removeprefix(b"data: "))["output_ids"]) for chunk in found]
    assert counts[:64] == list(range(1, 65))
    assert counts[-1] > 980


async def chunks_of(tokens: int) -> list[bytes]:
    """The chunks of an answer that has so many tokens and goes on; the first alone if it has none yet."""
    service = create_app(ServeConfig.load(None, {"engine.store": None}, {})).state.service
    body = GenerateRequest.model_validate({"text": "a", "return_logprob": True})
    answers = Answers(1, lambda *_: None, asyncio.get_running_loop().time() + (0.5 if tokens else 60))
    tell: Any = answers.listener(answers.each[0])  # the batch gives a ticket, too
    for index in range(tokens):
        tell(None, Piece("a", index, index, logprob=TokenLogprob(index, -0.5, ())))
    found = []
    with contextlib.suppress(ApiError):
        async for chunk in sglang._chunks(answers, sglang._Shown(body, service), many=False):
            found.append(chunk)
            if not tokens:
                break
    return found


def test_a_key_is_needed_and_flushing_is_each_tenants_own(keyed: Keyed) -> None:
    def asked(path: str, key: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{keyed.url}{path}", json=body, headers={"x-api-key": key}, timeout=DEADLINE)

    prompt = {"input_ids": IDS, "sampling_params": GREEDY}
    assert asked("/generate", "wrong", **prompt).status_code == asked("/flush_cache", "wrong").status_code == 401
    for key in (keyed.acme, keyed.umbrella):
        asked("/generate", key, **prompt).raise_for_status()
    asked("/flush_cache", keyed.umbrella).raise_for_status()
    found = [asked("/generate", key, **prompt).json() for key in (keyed.acme, keyed.umbrella)]
    assert [one["meta_info"]["cached_tokens"] for one in found] == [89, 0]
    assert asked("/generate", keyed.short, **prompt).json()["meta_info"]["completion_tokens"] == 3
