"""What agents send unasked: long wishes, large bodies, headers that are no text, fields of other servers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.processes import DEADLINE, ServerProcess, chat
from tests.helpers.services import Keyed, weather

from keepwarm.serving.catalogue import Catalogue
from keepwarm.serving.held import PER_VALUE, Held, HeldBody
from keepwarm.serving.protocols.bodies import read
from keepwarm.serving.protocols.errors import ApiError
from keepwarm.serving.protocols.system import BILLING, system_blocks
from keepwarm.serving.schemas import anthropic, openai
from keepwarm.serving.settings import CatalogueEntry, LimitsSection

HI = [{"role": "user", "content": "Say hi."}]
SOON = ["e", "a", "o", "i", "u", " ", "\n"]  # one of them ends an answer at once
WISH = 10**6


def post(url: str, path: str, key: str = "none", **body: Any) -> dict[str, Any]:
    headers = {"x-api-key": key}
    answer = httpx.post(f"{url}{path}", json={"model": "demo"} | body, headers=headers, timeout=DEADLINE)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_longer_wish_is_cut_to_what_the_window_leaves(server: ServerProcess) -> None:
    window = httpx.get(f"{server.url}/status", timeout=DEADLINE).json()["context_window"]
    asked: dict[str, Any] = {"messages": HI, "max_tokens": WISH, "stop": SOON}
    found = post(server.url, "/v1/chat/completions", **asked)
    cut = window - found["usage"]["prompt_tokens"]
    assert found["keepwarm"]["max_tokens_cut_to"] == cut
    newer = {"messages": HI, "max_completion_tokens": WISH, "stop": SOON}
    assert post(server.url, "/v1/chat/completions", **newer)["keepwarm"]["max_tokens_cut_to"] == cut
    streamed = httpx.post(
        f"{server.url}/v1/chat/completions", json={"model": "demo", "stream": True} | asked, timeout=DEADLINE
    )
    assert f'"max_tokens_cut_to":{cut}' in streamed.text.replace(" ", "")
    found = post(server.url, "/v1/messages", messages=HI, max_tokens=WISH, stop_sequences=SOON)
    assert found["keepwarm"]["max_tokens_cut_to"] == cut
    found = post(server.url, "/v1/responses", input=HI, max_output_tokens=WISH, stop=SOON)
    assert found["keepwarm"]["max_tokens_cut_to"] == cut
    found = post(server.url, "/v1/completions", prompt="Say hi.", max_tokens=WISH, stop=SOON)
    assert found["keepwarm"]["max_tokens_cut_to"] == window - found["usage"]["prompt_tokens"]
    told = httpx.post(
        f"{server.url}/query", json={"messages": HI, "max_new_tokens": WISH, "stop": SOON}, timeout=DEADLINE
    ).json()
    assert told["max_tokens_cut_to"] == cut
    assert "max_tokens_cut_to" not in post(server.url, "/v1/chat/completions", **asked | {"max_tokens": 9})["keepwarm"]
    assert "max_tokens_cut_to" not in post(server.url, "/v1/chat/completions", messages=HI, stop=SOON)["keepwarm"]
    long = chat(server.url, "word " * 9000, max_tokens=WISH)
    assert long.status_code == 400
    assert f"> {window} maximum" in long.json()["error"]["message"] or f"> {window - 1} m" in long.text


def test_a_keys_limit_cuts_too(keyed: Keyed) -> None:
    for path, name in (("/v1/chat/completions", "stop"), ("/v1/messages", "stop_reason")):
        found = post(keyed.url, path, keyed.short, model="tiny", messages=HI, max_tokens=9)
        assert found["keepwarm"]["max_tokens_cut_to"] == 3, name
    assert found["stop_reason"] == "max_tokens"
    assert found["usage"]["output_tokens"] == 3
    found = post(keyed.url, "/v1/responses", keyed.short, model="tiny", input=HI, max_output_tokens=9)
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (found["keepwarm"]["max_tokens_cut_to"], found["usage"]["output_tokens"]) == (3, 3)
    found = post(keyed.url, "/v1/chat/completions", keyed.short, model="tiny", messages=HI)
    assert found["choices"][0]["finish_reason"] == "length"
    assert "max_tokens_cut_to" not in found["keepwarm"], "nobody asked for more"
    assert len(post(keyed.url, "/v1/messages", keyed.acme, model="tiny", messages=HI, max_tokens=4)["content"]) == 1


def billed(cch: str) -> str:
    return f"{BILLING}: cc_version=2.1.0.{cch}; cc_entrypoint=cli; cch={cch};"


def test_requests_that_differ_in_the_billing_header_share_all_tokens(server: ServerProcess) -> None:
    text = "You are the clerk of a harbour, and answer in one word. " * 30

    def blocks(cch: str) -> list[dict[str, Any]]:
        kept = {"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
        return [{"type": "text", "text": billed(cch)}, kept]

    asked: dict[str, Any] = {"messages": HI, "max_tokens": 2, "temperature": 0}
    plain = post(server.url, "/v1/messages", system=[blocks("a")[1]], **asked)
    assert "left_out" not in plain["keepwarm"]
    for system in (blocks("abcd1"), blocks("fe987"), f"{billed('77777')}\n{text}"):
        found = post(server.url, "/v1/messages", system=system, **asked)
        assert found["keepwarm"]["left_out"] == [BILLING]
        usage = found["usage"]
        total = sum(usage[name] for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"))
        assert usage["cache_read_input_tokens"] == total - 1, "all but the token that is computed in any case"
        counted = post(server.url, "/v1/messages/count_tokens", system=system, messages=HI)
        assert counted == {"input_tokens": total}
        assert found["content"] == plain["content"]
    metrics = httpx.get(f"{server.url}/metrics", timeout=DEADLINE).text
    assert "keepwarm_billing_headers_total 3.0" in metrics


def test_a_system_message_in_mid_chat_is_shown_and_reused(server: ServerProcess) -> None:
    """Where the operator allows it."""
    told = {"role": "system", "content": [{"type": "text", "text": "Today is a quiet day. " * 20}]}
    asked: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
    plain = post(server.url, "/v1/messages", messages=HI, **asked)
    first = post(server.url, "/v1/messages", messages=[*HI, told], **asked)
    assert tokens(first) > tokens(plain) + 100
    same = {"messages": [*HI, {"role": "system", "content": "Today is a quiet day. " * 20}]}
    assert post(server.url, "/v1/messages/count_tokens", **same)["input_tokens"] == tokens(first)
    turn = [*HI, told, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Again."}]
    since = {"diagnostics": {"previous_message_id": first["id"]}}
    second = post(server.url, "/v1/messages", messages=turn, **since, **asked)
    assert second["usage"]["cache_read_input_tokens"] >= tokens(first) - 8, "all but how an answer begins"
    changed = second["diagnostics"]["cache_miss_reason"] or {}
    assert changed.get("type") != "system_changed", "only what begins a conversation is its system prompt"


def test_a_system_message_in_mid_chat_is_refused_in_words_that_claude_code_knows(keyed: Keyed) -> None:
    late = [{"role": "system", "content": "Be brief."}, *HI, {"role": "system", "content": "Today is Monday."}]
    headers = {"x-api-key": keyed.acme}
    body = {"model": "tiny", "max_tokens": 1, "messages": late}
    answer = httpx.post(f"{keyed.url}/v1/messages", json=body, headers=headers, timeout=DEADLINE)
    assert answer.status_code == 400
    assert "role 'system' behind other messages is not supported" in answer.json()["error"]["message"]
    post(keyed.url, "/v1/messages", keyed.acme, model="tiny", max_tokens=1, messages=late[:2])


def tokens(answer: dict[str, Any]) -> int:
    """The tokens of an answer's prompt."""
    return sum(answer["usage"][f"{name}input_tokens"] for name in ("", "cache_read_", "cache_creation_"))


def test_what_stands_behind_a_billing_header_stays() -> None:
    def left(*texts: str) -> list[str]:
        return [block.text for block in system_blocks([anthropic.TextBlock(type="text", text=t) for t in texts])[0]]

    assert left(billed("1"), "Be brief.") == ["Be brief."]
    assert left(f"{billed('1')}\r\n\nBe brief.\nBe kind.") == ["Be brief.\nBe kind."]
    assert left(f"Be brief. {BILLING}") == [f"Be brief. {BILLING}"]
    assert system_blocks(billed("1")) == ([], True)
    assert system_blocks("") == system_blocks(None) == ([], False)


OTHERS: dict[str, Any] = {  # of OpenAI, vLLM, llama.cpp and SGLang: what changes no answer, and what does as it says
    "user": "me",
    "safety_identifier": "me",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "priority",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "in_memory",
    "n": 1,
    "seed": 3,
    "top_p": 0.9,
    "top_k": -1,
    "min_p": 0.01,
    "repetition_penalty": 1.05,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"50": -100},
    "min_tokens": 2,
    "ignore_eos": True,
    "stop_token_ids": [2],
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "cache_prompt": True,
    "id_slot": -1,
    "timings_per_token": True,
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "reasoning_effort": "low",
    "verbosity": "low",
    "thinking": {"type": "enabled", "budget_tokens": 512},
    "chat_template_kwargs": {"enable_thinking": False},
    "logprobs": False,
}
ROUTERS: dict[str, Any] = {  # what vLLM's and SGLang's routers add to every request that passes them
    "logprobs": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "include_reasoning": True,
    "priority": 0,
}


def test_fields_that_routers_add_change_nothing(server: ServerProcess) -> None:
    plain, routed = (
        post(server.url, "/v1/chat/completions", messages=HI, max_tokens=3, temperature=0, **more)
        for more in ({}, ROUTERS)
    )
    assert routed["choices"][0]["message"] == plain["choices"][0]["message"]


def test_fields_of_other_servers(server: ServerProcess) -> None:
    found = post(server.url, "/v1/chat/completions", messages=HI, max_tokens=3, **OTHERS)
    assert found["usage"]["completion_tokens"] == 3
    left = ["thinking", "reasoning_effort", "verbosity", "chat_template_kwargs.enable_thinking"]
    assert found["keepwarm"]["left_out"] == left, "this model's template has no place for them"
    for _ in range(2):
        cold = post(server.url, "/v1/chat/completions", messages=HI, max_tokens=1, cache_prompt=False)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    named: dict[str, Any] = {
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "betas": ["interleaved-thinking-2025-05-14"],
        "anthropic_beta": ["x"],
        "metadata": {"user_id": "user_" + "0" * 200},
    }
    found = post(server.url, "/v1/messages?beta=true", messages=HI, max_tokens=2, **named)
    assert found["keepwarm"]["left_out"] == ["reasoning_effort"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"no_stop_trim": True}, "no_stop_trim"),
        ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "leave out one or the other"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "vocabulary"),
        ({"chat_template_kwargs": {"messages": []}}, "leave it out"),
        ({"chat_template_kwargs": {f"v{number}": 1 for number in range(65)}}, "chat_template_kwargs"),
        ({"stop_token_ids": [5] * 1025}, "stop_token_ids"),
        ({"guided_regex": "a"}, "guided_regex"),
    ],
)
def test_what_is_refused_says_why(server: ServerProcess, body: dict[str, Any], said: str) -> None:
    answer = chat(server.url, "hi", **body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_bodies_of_real_agents_are_taken() -> None:
    """200 tools and a conversation of some megabytes: what is larger is refused with what may be and what was sent."""
    limits = LimitsSection()
    tools = [weather(f"tool_{number}", 40) for number in range(200)]
    call = {"id": "c1", "type": "function", "function": {"name": "tool_1", "arguments": '{"city": "Oslo"}'}}
    turns = [
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": None, "tool_calls": [call] * 4},
        *[{"role": "tool", "tool_call_id": "c1", "content": "line of a file\n" * 100}] * 4,
    ]
    body = {"model": "demo", "messages": [*turns * 400, HI[0]], "tools": tools}
    text = json.dumps(body).encode()
    assert 2 << 20 < len(text) < limits.max_body
    assert isinstance(read(text, openai.ChatRequest, limits), openai.ChatRequest)
    for many in ({"logit_bias": {f"x{n}": "y" for n in range(2000)}}, {"modalities": [1] * 2000}):
        with pytest.raises(ApiError, match=r"the body has [24]00\d faults"):
            read(json.dumps(body | many).encode(), openai.ChatRequest, limits)
    for more in ({"tools": tools * 6}, {"messages": turns * 2000}):
        with pytest.raises(ApiError, match=r"more than \d+ .*: \d+ are sent \(limits.max_"):
            read(json.dumps(body | more).encode(), openai.ChatRequest, limits)


# ---- variables of the chat template ----


@pytest.mark.slow
def test_effort_is_for_the_template_in_every_protocol(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    template = "{% if enable_thinking is defined and enable_thinking %}Think.{% endif %}{% for m in messages %}"
    template += "[{{ m.role }}] {{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    server = ServerProcess(tmp_path / "model", tmp_path / "store").ready()
    try:
        found = {}
        for effort in ("none", "high"):
            words: dict[str, dict[str, Any]] = {
                "chat/completions": {"reasoning_effort": effort, "messages": HI, "max_tokens": 1},
                "responses": {"reasoning": {"effort": effort}, "input": HI, "max_output_tokens": 1},
                "messages": {"output_config": {"effort": effort}, "messages": HI, "max_tokens": 1},
            }
            told = [post(server.url, f"/v1/{path}", model="model", **more) for path, more in words.items()]
            assert not any("left_out" in one["keepwarm"] for one in told)
            usage = [one["usage"] for one in told]
            counts = [usage[0]["prompt_tokens"], usage[1]["input_tokens"]]
            names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
            counts.append(sum(usage[2][name] for name in names))
            assert len(set(counts)) == 1
            assert usage[1]["input_tokens_details"]["cached_tokens"] == counts[0] - 1, "the same prompt as in chat"
            found[effort] = counts[0]
        assert found["high"] > found["none"]
    finally:
        assert server.stop() == 0


def test_what_a_tenant_says_to_the_template_is_in_no_public_header() -> None:
    catalogue = Catalogue.read([CatalogueEntry(name="desk", system="You are a clerk.")], "as_sent")
    asked: dict[str, Any] = {"messages": [{"role": "system", "content": "You are a clerk."}, *HI]}
    assert catalogue.find(asked) is not None
    for harmless in ({}, {"enable_thinking": True}, {"reasoning_effort": "high"}):
        assert catalogue.find(asked | {"template_args": harmless}) is not None
    for text in ("the tenant's own words", 7, ["none"]):
        assert catalogue.find(asked | {"template_args": {"reasoning_effort": text}}) is None


# ---- what may be held at once ----


def test_bodies_have_bounds_together_and_for_each_tenant() -> None:
    limits = LimitsSection(max_body=1000, max_values=1)
    largest = limits.max_body + PER_VALUE
    held = Held(limits)
    bodies = [HeldBody(held, "acme") for _ in range(13)]
    for body in bodies[:12]:
        body.take(largest)
    with pytest.raises(ApiError, match="this tenant's, and .* may: ask again later") as caught:
        bodies[12].take(largest)
    assert caught.value.kind == "overloaded"
    other = HeldBody(held, "umbrella")
    other.take(largest)
    with pytest.raises(ApiError):
        other.take(100 * largest)
    for body in (*bodies, other):
        body.close()
        body.take(10**9)  # its request has ended, and nothing more is counted
    everybody = HeldBody(held, "")
    everybody.take(16 * largest)
    with pytest.raises(ApiError):
        everybody.take(1)
    everybody.close()
    HeldBody(held, "acme").take(largest)


@pytest.mark.slow
def test_a_kept_conversation_grows_no_larger_than_a_body(tmp_path: Path) -> None:
    """Else each turn could add as much as a body holds, and the next one would read all of it."""
    server = ServerProcess("demo", tmp_path, environment={"KEEPWARM__LIMITS__MAX_BODY": "20000"}).ready()
    try:
        asked: dict[str, Any] = {"max_output_tokens": 1, "temperature": 0}
        unread = {"type": "reasoning", "summary": [], "encrypted_content": "x" * 12_000}
        first = post(server.url, "/v1/responses", input=[unread, *HI], **asked)
        assert first["store"]
        more = {"input": [unread, *HI], "previous_response_id": first["id"]}
        second = post(server.url, "/v1/responses", **more, **asked)
        assert not second["store"]
        assert second["output"][0]["content"][0]["text"] is not None
        third = post(server.url, "/v1/responses", **more | {"input": HI}, **asked)
        assert third["store"]
    finally:
        assert server.stop() == 0
