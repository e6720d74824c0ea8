"""A sampled call comes back as the bytes that were sampled, however the client writes its arguments."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import tokenizers

from keepwarm.errors import TemplateError
from keepwarm.models.choose import choose_adapter
from keepwarm.models.generic import GenericAdapter
from keepwarm.models.spelling import Around, Form, arguments_text, call_ids, form_of, plain_text
from keepwarm.models.template import WrittenObject, message_bytes
from keepwarm.models.tokenizer import HFTokenizer

STYLES: dict[str, dict[str, Any]] = {
    "templates' own": {"ensure_ascii": False},
    "compact": {"ensure_ascii": False, "separators": (",", ":")},
    "escaped": {"ensure_ascii": True},
    "compact, escaped": {"ensure_ascii": True, "separators": (",", ":")},
    "two spaces": {"ensure_ascii": False, "indent": 2},
    "four spaces": {"ensure_ascii": False, "indent": 4},
}
CLIENTS: dict[str, Callable[[str], str]] = {
    "as it came": str,
    "Python": lambda text: json.dumps(json.loads(text)),
    "JavaScript": lambda text: json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":")),
    "Anthropic's": lambda text: plain_text(json.loads(text)),
}
FORMS = {
    "tok-qwen3": ('<tool_call>\n{"name": "alpha", "arguments": ', "}\n</tool_call>"),
    "tok-llama3.2": ('{"name": "alpha", "parameters": ', "}"),
    "tok-mistral-nemo": ('[TOOL_CALLS][{"name": "alpha", "arguments": ', "}]"),  # its template adds an id before them
}
TOOLS = [{"name": "alpha", "parameters": {"type": "object"}}]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda deeper: st.lists(deeper) | st.dictionaries(st.text(), deeper), max_leaves=8)
ARGUMENTS = st.dictionaries(st.text(), VALUES, max_size=4)


@pytest.fixture(scope="module", params=FORMS)
def family(request: pytest.FixtureRequest) -> tuple[str, GenericAdapter]:
    adapter = choose_adapter({}, tokenizers.wrapped(request.param))
    assert isinstance(adapter, GenericAdapter)
    return request.param, adapter


def whole(name: str, text: str) -> str:
    """The call as it is sampled."""
    return text.join(FORMS[name])


def stands(name: str, text: str, prompt: str) -> bool:
    """Whether a prompt holds the call as it is sampled."""
    before, after = FORMS[name]
    return before + text + ("" if name == "tok-mistral-nemo" else after) in prompt


def called(adapter: GenericAdapter, text: str, said: str = "") -> list[dict[str, Any]]:
    """The calls in an answer, as the service gives them to clients."""
    calls = adapter.parse_tool_calls(text, TOOLS)
    return [
        {"id": number, "type": "function", "function": {"name": call.name, "arguments": arguments_text(call)}}
        for number, call in zip(call_ids(text, said, calls), calls, strict=True)
    ]


def shown(adapter: GenericAdapter, calls: list[dict[str, Any]], client: Callable[[str], str], said: str = "") -> str:
    """The prompt after a client sent the calls back."""
    back = [
        call | {"function": call["function"] | {"arguments": client(call["function"]["arguments"])}} for call in calls
    ]
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": said, "tool_calls": back},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "done"},
    ]
    return adapter.render(chat).text


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=5)
@given(arguments=ARGUMENTS)
def test_whatever_the_client_writes(family: tuple[str, GenericAdapter], style: str, arguments: dict[str, Any]) -> None:
    name, adapter = family
    written = json.dumps(arguments, **STYLES[style])
    calls = called(adapter, whole(name, written))
    assert [call["function"]["arguments"] for call in calls] == [written]
    assert re.fullmatch("[A-Za-z0-9]{9}", calls[0]["id"])
    for client in CLIENTS.values():
        assert stands(name, written, shown(adapter, calls, client))


@pytest.mark.parametrize("written", ['{"a" : 1}', '{ "a": [1,2] }', '{"a": 1e2}', '{"a": 1, "a": 2}', '{"\\u0061": 1}'])
def test_a_style_of_its_own_comes_back_from_clients_that_keep_it(
    family: tuple[str, GenericAdapter], written: str
) -> None:
    name, adapter = family
    calls = called(adapter, whole(name, written))
    assert calls[0]["function"]["arguments"] == written
    assert stands(name, written, shown(adapter, calls, str))
    anew = plain_text(json.loads(written))
    for client in (json.dumps, lambda value: json.dumps(value, separators=(",", ":"))):  # as an unknown id would
        assert stands(name, anew, shown(adapter, calls, lambda text, client=client: client(json.loads(text))))


def test_what_clients_cannot_read_is_written_for_them(family: tuple[str, GenericAdapter]) -> None:
    name, adapter = family
    (call,) = called(adapter, whole(name, '{"a": "two\nlines"}'))
    assert json.loads(call["function"]["arguments"]) == {"a": "two\nlines"}


def test_ids_of_other_services_change_nothing(family: tuple[str, GenericAdapter]) -> None:
    name, adapter = family
    prints_texts = name == "tok-qwen3"
    for number in ("call_0", "kw", "kwzz00000", "kw0/00000", "123456789"):
        for sent in ('{"a":1}', '{"a": 1}'):
            call = {"id": number, "type": "function", "function": {"name": "alpha", "arguments": sent}}
            assert stands(name, sent if prints_texts else '{"a": 1}', shown(adapter, [call], str))


OTHERWISE = {  # in the tags of the family
    "on one line": '<tool_call>{"name": "alpha", "arguments": {"a": 1}}</tool_call>',
    "compact": '<tool_call>\n{"name":"alpha","arguments":{"a":[1,2]}}\n</tool_call>',
    "other key": '<tool_call>\n{"name": "alpha", "parameters": {"a": 1}}\n</tool_call>',
    "two": '<tool_call>{"name": "alpha", "arguments": {}}</tool_call>\n'
    '<tool_call>{"name":"alpha","arguments":{}}</tool_call>',
    "indented": '<tool_call>\n{\n    "name": "alpha",\n    "arguments": {\n        "a": 1\n    }\n}\n</tool_call>',
}
UNTAGGED = {  # as small models write calls, or other families
    "without tags": '{"name": "alpha", "arguments": {"a": [1, "ö"]}}',
    "fenced": '```json\n{\n  "name": "alpha",\n  "arguments": {\n    "a": [\n      1\n    ]\n  }\n}\n```',
}


@pytest.mark.parametrize("form", UNTAGGED)
def test_a_call_without_the_tags_of_the_family_is_shown_in_them(form: str) -> None:
    """With its calls shown as they were, Qwen2.5-Coder-0.5B called until the client gave up."""
    adapter = adapter_for("tok-qwen3")
    calls = called(adapter, UNTAGGED[form])
    written = calls[0]["function"]["arguments"]
    assert written in UNTAGGED[form]
    assert stands("tok-qwen3", written, shown(adapter, calls, str))


@pytest.mark.parametrize("said", ["", "Let me look."])
@pytest.mark.parametrize("form", OTHERWISE)
def test_what_stands_around_the_arguments_comes_back(form: str, said: str) -> None:
    adapter = choose_adapter({}, tokenizers.wrapped("tok-qwen3"))
    assert isinstance(adapter, GenericAdapter)
    sampled = f"{said}\n\n{OTHERWISE[form]}" if said else OTHERWISE[form]
    calls = called(adapter, sampled, said)
    for client in CLIENTS.values():
        assert f"assistant\n{sampled}<|im_end|>" in shown(adapter, calls, client, said)


def test_without_all_special_tokens_only_arguments_are_known() -> None:
    adapter = choose_adapter({}, tokenizers.wrapped("tok-qwen3"))
    text = UNTAGGED["without tags"]
    calls = adapter.parse_tool_calls(text, TOOLS)
    (known,), (unknown,) = call_ids(text, "", calls), call_ids(text, "", calls, whole=False)
    around = {number: form.around for number in (known, unknown) if (form := form_of(number)) is not None}
    assert around[known] is not None
    assert around[unknown] is None


def test_an_answer_with_more_than_calls_is_written_by_the_template() -> None:
    adapter = choose_adapter({}, tokenizers.wrapped("tok-qwen3"))
    assert isinstance(adapter, GenericAdapter)
    calls = called(adapter, OTHERWISE["on one line"] + " That was it.")
    assert stands("tok-qwen3", '{"a": 1}', shown(adapter, calls, str))


def test_a_form_that_the_family_does_not_read_as_a_call_is_written_by_the_template() -> None:
    """A client may go on with another model."""
    qwen, llama = (choose_adapter({}, tokenizers.wrapped(name)) for name in ("tok-qwen3", "tok-llama3.2"))
    assert isinstance(qwen, GenericAdapter)
    assert isinstance(llama, GenericAdapter)
    calls = called(qwen, OTHERWISE["on one line"])
    assert "<tool_call>" not in shown(llama, calls, str)
    assert '{"name": "alpha", "parameters": {"a": 1}}' in shown(llama, calls, str)


def test_several_calls_have_each_their_own() -> None:
    adapter = choose_adapter({}, tokenizers.wrapped("tok-qwen3"))
    assert isinstance(adapter, GenericAdapter)
    each = ['{"a":1}', '{"a": 1}', '{"b":{"a":1}}', "{}", '{"a": {}}']
    sampled = "\n".join(whole("tok-qwen3", text) for text in each)
    calls = called(adapter, sampled)
    assert [call["function"]["arguments"] for call in calls] == each
    assert len({call["id"] for call in calls}) == len(each)
    assert sampled in shown(adapter, calls, lambda text: plain_text(json.loads(text)))


def sent(number: str, arguments: str, name: str = "alpha") -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def adapter_for(name: str, template: Any = None) -> GenericAdapter:
    tokenizer = tokenizers.loaded(name)
    if template:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = template
    adapter = choose_adapter({}, HFTokenizer(tokenizer))
    assert isinstance(adapter, GenericAdapter)
    return adapter


def test_a_call_that_a_template_would_take_for_reasoning_is_written_by_it() -> None:
    """Qwen3's template takes what stands before a `</think>` in an answer for reasoning, and then leaves it out."""
    adapter = adapter_for("tok-qwen3")
    calls = called(adapter, '{"name": "alpha", "arguments": {"a": "x</think>y"}}')
    assert '<tool_call>\n{"name": "alpha", "arguments": {"a": "x</think>y"}}' in shown(adapter, calls, str)


@pytest.mark.parametrize("behind", ["", "\n", "\n\n"])
def test_white_space_that_streams_add_to_the_text_changes_nothing(behind: str) -> None:
    adapter = adapter_for("tok-qwen3")
    sampled = f"Let me look.\n{whole('tok-qwen3', '{}')}"
    calls = called(adapter, sampled, "Let me look.")
    assert f"assistant\n{sampled}<|im_end|>" in shown(adapter, calls, str, f"Let me look.{behind}")


def test_no_arguments_are_an_empty_object(family: tuple[str, GenericAdapter]) -> None:
    name, adapter = family
    (call,) = called(adapter, whole(name, "{ }"))
    for number in (call["id"], "123456789"):
        assert stands(name, "{}", shown(adapter, [sent(number, "")], str))


@pytest.mark.parametrize("depth", [100, 600, 900, 960, 970, 980, 990, 5000])
def test_deep_arguments_fail_as_they_do_in_the_template(family: tuple[str, GenericAdapter], depth: int) -> None:
    _, adapter = family
    deep = '{"a":' * depth + "1" + "}" * depth
    numbers = [known["id"] for text in OTHERWISE.values() for known in called(adapter, text)]
    for number in (*numbers, "123456789"):
        with suppress(TemplateError):
            shown(adapter, [sent(number, deep)], str)
    assert depth > 900 or shown(adapter, [sent("123456789", deep)], str)
    called(adapter, whole(family[0], deep))


def test_templates_that_print_arguments_as_they_are_print_their_text() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<call>{{ c.function.name }} {{ c.function.arguments }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    )
    adapter = adapter_for("tok-qwen3", template)
    calls = called(adapter, '{"name": "alpha", "arguments": {"a":1}} And more.')
    assert '<call>alpha {"a":1}</call>' in shown(adapter, calls, str)


def test_both_templates_of_a_tokenizer_are_tried() -> None:
    """Requests with tools may get another one, which refuses results that follow a text."""
    refuses = (
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('no call') }}{% endif %}{{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}\n{% endfor %}{% if tools %}{% endif %}"
    )
    shows = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    adapter = adapter_for("smollm2", {"default": shows, "tool_use": refuses})
    calls = called(adapter, OTHERWISE["on one line"])
    chat = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "done"},
    ]
    assert '{"name": "alpha", "arguments": {"a": 1}}' in adapter.render(chat, TOOLS).text


def test_messages_have_the_same_bytes_only_if_they_are_equal() -> None:
    written = {"tool_calls": [{"function": {"arguments": WrittenObject({"a": 1}, '{"a":1}')}}]}
    others: list[dict[str, Any]] = [
        {"tool_calls": [{"function": {"arguments": WrittenObject({"a": 1}, '{"a": 1}')}}]},
        {"tool_calls": [{"function": {"arguments": ['{"a":1}']}}]},
        {"tool_calls": [{"function": {"arguments": {"a": 1}}}]},
        {"tool_calls": repr(written["tool_calls"])},
    ]
    assert len({message_bytes(message) for message in (written, *others)}) == 1 + len(others)


def test_ids_stay_what_they_are() -> None:
    """Clients may hold ids of an earlier version."""
    assert form_of("kw01aaaaa") == Form(1)
    assert form_of("kw0caaaaa") == Form(0, Around(0, 0, 0, 0))
    assert form_of("kwv6aaaaa") == Form(8, Around(3, 4, 1, 3))
    assert form_of("kwZZaaaaa") is None
