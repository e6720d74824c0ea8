"""What constrained decoding lets each family write: its own valid calls and nothing else, and the adapter reads it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from tests.helpers import tokenizers

from keepwarm.core.request import Decoding, Request
from keepwarm.core.tools import ToolCall
from keepwarm.errors import PromptError
from keepwarm.models.choose import choose_adapter
from keepwarm.models.generic import GenericAdapter
from keepwarm.models.grammar import closable, writable
from keepwarm.models.tokenizer import HFTokenizer
from keepwarm.runtime.constrain import Constraints

TAGS = {
    "qwen": "<|im_start|><tools></tools><tool_call>",
    "llama": "<|start_header_id|>",
    "generic": "",
    "mistral": "[AVAILABLE_TOOLS]",
    "mistral named": "[AVAILABLE_TOOLS][ARGS]",
}
REAL = {"qwen": "tok-qwen3", "llama": "tok-llama3.2", "mistral": "tok-mistral-nemo"}
TOOLS: list[dict[str, Any]] = [
    {
        "name": name,
        "description": "Does it.",
        "input_schema": {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
            "required": ["a"],
        },
    }
    for name in ("alpha", "beta")
]
WRITTEN = {
    "qwen": '<tool_call>\n{"name": "NAME", "arguments": PARAMS}\n</tool_call>',
    "llama": '{"name": "NAME", "parameters": PARAMS}',
    "mistral": '[TOOL_CALLS][{"name": "NAME", "arguments": PARAMS}]',
    "mistral named": "[TOOL_CALLS]NAME[ARGS]PARAMS",
    "generic": '{"name": "NAME", "arguments": PARAMS}',
}
MARKED = {"qwen": "<tool_call>", "llama": "<|python_tag|>", "mistral": "[TOOL_CALLS]", "mistral named": "[TOOL_CALLS]"}
SEVERAL = {
    "qwen": WRITTEN["qwen"] + "\n" + WRITTEN["qwen"],
    "mistral": '[TOOL_CALLS][{"name": "NAME", "arguments": PARAMS}, {"name": "NAME", "arguments": PARAMS}]',
    "mistral named": WRITTEN["mistral named"] * 2,
}
GOOD, BAD = '{"a": "<é> [x]", "b": 7}', '{"b": 7}'


class Family:
    def __init__(self, name: str, tokenizer: HFTokenizer, adapter: GenericAdapter) -> None:
        self.name, self.tokenizer, self.adapter = name, tokenizer, adapter
        size = 1 + max(tokenizer.added_ids | set(tokenizer._tokenizer.get_vocab().values()))
        self.constraints = Constraints(tokenizer, adapter, adapter.stop_tokens | {2}, size)

    def takes(self, choice: Any, text: str, *, whole: bool = True, tools: Any = TOOLS, several: bool = True) -> bool:
        """Whether an answer of this text is let through and, if `whole`, may end there."""
        request, decoding = (
            Request(messages=[{"role": "user", "content": ""}], tools=tools),
            Decoding(tool_choice=choice, parallel_tool_calls=several),
        )
        constraint = self.constraints.of(request, decoding)
        assert constraint is not None
        ids = self.tokenizer.encode(text, add_special_tokens=False)[0]
        matcher = constraint._matcher
        return matcher.try_consume_tokens(ids) == len(ids) and (not whole or matcher.is_accepting())

    def reads(self, text: str) -> list[ToolCall]:
        return self.adapter.parse_tool_calls(text, TOOLS)


@pytest.fixture(
    scope="module",
    params=[
        *(f"{name}, own" for name in TAGS),
        *(pytest.param(f"{name}, real", marks=() if name == "qwen" else pytest.mark.slow) for name in REAL),
    ],
)
def family(request: pytest.FixtureRequest, tokenizer: Any) -> Family:
    name, kind = request.param.split(", ")
    if kind == "own":
        loaded = copy.deepcopy(tokenizer)
        loaded.chat_template = TAGS[name] + "{{ messages[0].content }}<|im_end|>"
    else:
        loaded = tokenizers.loaded(REAL[name])
    wrapped = HFTokenizer(loaded)
    return Family(name, wrapped, choose_adapter({}, wrapped))


def call(family: Family, name: str = "alpha", arguments: str = GOOD, form: dict[str, str] = WRITTEN) -> str:
    return form[family.name].replace("NAME", name).replace("PARAMS", arguments)


@pytest.mark.slow
def test_a_required_call_is_a_valid_one_in_the_familys_form(family: Family) -> None:
    text = call(family)
    assert family.takes("required", text)
    assert family.takes({"name": "alpha"}, text)
    assert family.reads(text) == [ToolCall("alpha", json.loads(GOOD))]
    assert not family.takes({"name": "beta"}, text)
    assert not family.takes("required", call(family, "gamma"))
    assert not family.takes("required", call(family, arguments=BAD))
    assert not family.takes("required", call(family, arguments='{"a": "x", "c": 1}')), "not in its schema"
    assert not family.takes("required", text[:-1])
    assert not family.takes("required", "Hello")
    assert not family.takes("required", "")


def test_several_calls_where_the_family_writes_several(family: Family) -> None:
    if family.name in SEVERAL:
        text = call(family, form=SEVERAL)
        assert family.takes("required", text)
        assert len(family.reads(text)) == 2
        assert not family.takes({"name": "alpha"}, text), "one call of that tool"
    else:
        assert not family.takes("required", call(family) + "\n" + call(family))


def test_a_line_break_after_a_call_does_not_oblige_a_model_to_go_on(family: Family) -> None:
    """Qwen writes one in any case: with nothing but another call allowed behind it, it called until its limit."""
    if family.name == "qwen":
        assert family.takes("required", call(family) + "\n")
        assert family.takes("required", call(family, form=SEVERAL) + "\n")
        assert not family.takes("required", call(family) + "\nx", whole=False)


@pytest.mark.parametrize("choice", ["required", "auto", None, {"name": "alpha"}])
def test_one_call_is_one_call(family: Family, choice: Any) -> None:
    assert family.takes(choice, call(family), several=False)
    two = call(family, form=SEVERAL if family.name in SEVERAL else WRITTEN)
    assert not family.takes(choice, two if family.name in SEVERAL else two + "\n" + two, whole=False, several=False)
    assert not family.takes(choice, call(family) + "\n", whole=False, several=False), "nothing follows"
    if choice is None:
        assert family.takes(choice, "Hello\nworld", several=False)
        assert family.takes(choice, call(family, arguments=BAD), several=False), "the form alone is bound"
        assert not family.takes(choice, call(family, "gamma"), several=False)
    if choice in ("auto", None):
        bare = '{"name": "alpha", "KEY": PARAMS}'.replace("KEY", family.adapter.written.arguments)
        for text in (bare, f"[{bare}]", "Well:\n" + bare):
            assert family.takes(choice, text.replace("PARAMS", GOOD), several=False)
        for text in (f"[{bare}, {bare}]", bare + "\n" + bare):
            assert not family.takes(choice, text.replace("PARAMS", GOOD), whole=False, several=False)


def test_schemas_that_cannot_be_enforced_are_no_hindrance_to_one_call(family: Family) -> None:
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [{"name": "alpha", "input_schema": unique}]
    assert family.takes(None, call(family), tools=tools, several=False)
    with pytest.raises(PromptError, match="alpha"):
        family.takes("auto", call(family), tools=tools, several=False)


def test_auto_lets_text_through_and_binds_a_call_once_begun(family: Family) -> None:
    for text in (
        "",
        "Hello 中 🙂\n\nworld",
        '{"result": [1, {"name": 2}]}',
        'say {"name": "x"} inline',
        "3 < 4 ``` [x] {",
    ):
        assert family.takes("auto", text), text
    assert family.takes("auto", call(family))
    bare = '{"name": "NAME", "KEY": PARAMS}'.replace("KEY", family.adapter.written.arguments)
    for before, after in (("", ""), ("Well:\n", "\nDone."), ("```json\n", "\n```"), ("\n\n  ", "")):
        for form in (bare, f"[{bare}, {bare}]"):
            text = before + form.replace("NAME", "beta").replace("PARAMS", GOOD) + after
            assert family.takes("auto", text), text
            assert {found.name for found in family.reads(text)} == {"beta"}
            for wrong in (
                form.replace("NAME", "gamma").replace("PARAMS", GOOD),
                form.replace("NAME", "beta").replace("PARAMS", BAD),
            ):
                assert not family.takes("auto", before + wrong + after), wrong
    assert not family.takes("auto", bare.replace("NAME", "beta").replace("PARAMS", '{"a": "')), "it may not end there"
    if family.name in MARKED:
        assert family.takes("auto", "Let me see.\n" + MARKED[family.name], whole=False)
        assert not family.takes("auto", "Let me see.\n" + MARKED[family.name])
        assert not family.takes("auto", MARKED[family.name] + " Hello")
    if family.name in SEVERAL:
        assert family.takes("auto", "First:\n" + call(family, form=SEVERAL) + "\nAnd then:\n" + call(family))
        assert not family.takes("auto", call(family) + call(family, "gamma"))


def test_none_lets_no_call_begin(family: Family) -> None:
    for text in ("", "Hello\n中", '{"result": 1}'):
        assert family.takes("none", text)
    for text in (call(family), "Well:\n" + call(family), MARKED.get(family.name, '{"name": "')):
        assert not family.takes("none", text, whole=False)


def test_a_name_of_any_text(family: Family) -> None:
    if family.name == "mistral named":
        pytest.skip("there a name has no marks around it")
    name = 'größe "x" \\ 🙂'
    tools = [{"name": name, "input_schema": TOOLS[0]["input_schema"]}]
    text = call(family, json.dumps(name, ensure_ascii=False)[1:-1])
    assert family.takes("required", text, tools=tools)
    assert family.takes("auto", text, tools=tools)
    assert family.adapter.parse_tool_calls(text, tools) == [ToolCall(name, json.loads(GOOD))]


@pytest.mark.parametrize(
    ("schema", "same"),
    [
        ({"properties": {"a": {}}, "required": ["a"]}, False),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}, True),
        ({"properties": {"a": {}}, "patternProperties": {"^x": {}}}, True),
        ({"properties": {"a": {}}, "required": ["b"]}, True),
        ({"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]}, True),
        ({"properties": {"a": {"oneOf": [{"properties": {}}, {"type": "null"}]}}}, True),
        ({"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"properties": {"b": {}}}}}, False),
        ({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, True),
    ],
)
def test_objects_are_closed_where_nothing_else_may_add_to_them(schema: dict[str, Any], same: bool) -> None:
    made = writable(schema, closed=closable(schema))
    assert (made == schema) is same
    if not same:
        assert made["additionalProperties"] is False
        assert made.get("$defs", {"n": {"additionalProperties": False}})["n"]["additionalProperties"] is False
