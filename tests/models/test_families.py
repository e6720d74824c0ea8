"""Adapters on the real tokenizers and templates of their families, and on small templates of our own."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import tokenizers

from keepwarm.compiler.segment import CompiledPrompt, segment
from keepwarm.core.request import Request
from keepwarm.errors import ConfigError, TemplateError
from keepwarm.models.choose import choose_adapter
from keepwarm.models.generic import GenericAdapter
from keepwarm.models.llama import LlamaAdapter
from keepwarm.models.mistral import MistralAdapter, call_id
from keepwarm.models.qwen import QwenAdapter
from keepwarm.models.template import template_variables
from keepwarm.models.tokenizer import HFTokenizer
from keepwarm.serving.protocols.reasoning import template_args

FAMILIES: dict[str, tuple[str, type[GenericAdapter], dict[str, Any]]] = {
    "qwen": ("tok-qwen3", QwenAdapter, {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}),
    "llama": ("tok-llama3.2", LlamaAdapter, {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}),
    "mistral": ("tok-mistral-nemo", MistralAdapter, {"model_type": "mistral"}),
}
HOSTILE = {
    "qwen": ["<|im_end|>", "<|im_start|>system\n", "</tools>", "<tool_call>", "</tool_call>", "<think>"],
    "llama": ["<|eot_id|>", "<|start_header_id|>system<|end_header_id|>\n\n", "<|python_tag|>", "<|begin_of_text|>"],
    "mistral": ["[/AVAILABLE_TOOLS]", "[INST]", "[/INST]", "[TOOL_CALLS]", "</s>", "<s>"],
}
# what the real templates do, in little: for machines without them
OWN = {
    "qwen": (
        "{%- if tools %}<|im_start|>system\n"
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
        "<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>\n<tool_call></tool_call><|im_end|>\n"
        "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    ),
    "llama": (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "<|start_header_id|>system\nToday: {{ date_string }}\n"
        "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}"
        "{% set messages = messages[1:] %}{% endif %}"
        "<|im_end|>{% for m in messages %}<|start_header_id|>{{ m.role }}\n"
        "{% if loop.first and tools %}{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}{% endif %}"
        "{{ m.content | trim }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant\n{% endif %}"
    ),
    "mistral": (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
        "{% set messages = messages[1:] %}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.last %}"
        "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "[INST]{% if loop.last and system is defined %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    ),
}
SYSTEM = {"role": "system", "content": "You call tools. Be brief."}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name} for the user.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "string", "enum": ["x", "y"]}, "b": {"type": "integer"}},
                "required": ["b", "a"],
            },
        },
    }
    for name in ("delta", "beta", "alpha", "gamma")
]
Parts = tuple[str, Any, HFTokenizer, GenericAdapter]


@pytest.fixture(scope="module", params=[f"{family}, {kind}" for family in FAMILIES for kind in ("own", "real")])
def parts(request: pytest.FixtureRequest, tokenizer: Any) -> Parts:
    family, kind = request.param.split(", ")
    folder, _, config = FAMILIES[family]
    if kind == "own":
        loaded = copy.deepcopy(tokenizer)
        loaded.chat_template = OWN[family]
    else:
        loaded = tokenizers.loaded(folder)
    wrapped = HFTokenizer(loaded)
    return family, loaded, wrapped, choose_adapter(config, wrapped)


def compiled(parts: Parts, *turns: str, tools: Any = TOOLS, **more: Any) -> CompiledPrompt:
    roles = ("user", "assistant")
    messages = [SYSTEM, *({"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns))]
    return segment(Request(messages=messages, tools=tools, **more), parts[2], parts[3])


def header_end(prompt: CompiledPrompt) -> int:
    return max(point.position for point in prompt.breakpoints if not point.soft)


def test_the_adapter_is_chosen_by_template_and_configuration(parts: Parts) -> None:
    family, _, wrapped, adapter = parts
    assert type(adapter) is FAMILIES[family][1]
    assert type(choose_adapter({}, wrapped)) is FAMILIES[family][1], "the template alone says it"
    assert type(choose_adapter({"model_type": "gpt2", "_name_or_path": "qwen"}, wrapped)) is FAMILIES[family][1]


def test_the_prompt_is_the_tokenizers_own_to_the_letter(parts: Parts) -> None:
    _, loaded, wrapped, adapter = parts
    for turns in (["Hi"], ["Hi", "Hello", "é 中 \n x"]):
        for tools in (None, TOOLS):
            prompt = compiled(parts, *turns, tools=tools)
            header = adapter._header([SYSTEM], adapter._shown(tools, None), None, {})
            roles = ("user", "assistant")
            chat = [*header.head, *({"role": roles[n % 2], "content": t} for n, t in enumerate(turns))]
            plain = json.loads(json.dumps(header.kwargs))
            text = loaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **plain)
            assert wrapped.decode(prompt.tokens) == loaded.decode(loaded(text, add_special_tokens=False)["input_ids"])
            assert prompt.tokens.tolist() == loaded(text, add_special_tokens=False)["input_ids"]


def test_prefix_and_suffix_make_the_prompt(parts: Parts) -> None:
    header = segment(Request(messages=[SYSTEM], tools=TOOLS, answer=False), parts[2], parts[3])
    names = [tool["function"]["name"] for tool in TOOLS]
    text = parts[2].decode(header.tokens)
    assert all(name in text for name in names)
    assert sorted(names, key=text.index) == names, "as they are sent"
    for user in ("Hello", "\n\nx", " ", "中", '{"a"'):
        whole = compiled(parts, user)
        assert whole.tokens[: len(header.tokens)].tolist() == header.tokens.tolist()
        assert header_end(whole) == len(header.tokens) < len(whole.tokens)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_tags_in_user_text_never_move_the_split(parts: Parts, data: st.DataObject) -> None:
    piece = st.sampled_from([*HOSTILE[parts[0]], "\n", " ", SYSTEM["content"], "é", json.dumps(TOOLS[0])]) | st.text(
        max_size=5
    )
    user = data.draw(st.lists(piece, max_size=5).map("".join))
    plain, other = compiled(parts, "Hello"), compiled(parts, user)
    end = header_end(plain)
    assert header_end(other) == end
    assert other.tokens[:end].tolist() == plain.tokens[:end].tolist()


def test_tags_in_descriptions_never_move_the_split(parts: Parts) -> None:
    tools = copy.deepcopy(TOOLS)
    for tool, tag in zip(tools, HOSTILE[parts[0]], strict=False):
        tool["function"]["description"] = f"{tag} {''.join(HOSTILE[parts[0]])} end of text"
    header = segment(Request(messages=[SYSTEM], tools=tools, answer=False), parts[2], parts[3])
    text = parts[2].decode(header.tokens)
    assert all(tool["function"]["name"] in text for tool in tools), "the header holds all tools, tags and all"
    for user in ("Hello", "".join(HOSTILE[parts[0]])):
        whole = compiled(parts, user, tools=tools)
        assert header_end(whole) == len(header.tokens)
        assert whole.tokens[: len(header.tokens)].tolist() == header.tokens.tolist()


def reordered() -> list[dict[str, Any]]:
    tools = copy.deepcopy(TOOLS)[::-1]
    for tool in tools:
        tool["function"] = dict(reversed(tool["function"].items()))
        tool["function"]["parameters"]["required"].reverse()
    return tools


def in_shape(kind: str) -> list[dict[str, Any]]:
    key = {"anthropic": "input_schema", "mcp": "inputSchema"}[kind]
    return [
        {"name": f["name"], "description": f["description"], key: f["parameters"]}
        for f in (t["function"] for t in TOOLS)
    ]


@pytest.mark.parametrize("same", ["order", "anthropic", "mcp"])
def test_the_same_tools_are_the_same_prompt(parts: Parts, same: str) -> None:
    tools = reordered() if same == "order" else in_shape(same)
    order: Any = {"tool_order": "sorted"} if same == "order" else {}
    wanted, sent = (compiled(parts, "Hi", **more).tokens.tolist() for more in (order, {}))
    assert compiled(parts, "Hi", tools=tools, **order).tokens.tolist() == wanted
    assert (compiled(parts, "Hi", tools=tools).tokens.tolist() == sent) is (same != "order")


def test_changed_tools_are_another_prompt(parts: Parts) -> None:
    tools = copy.deepcopy(TOOLS)
    tools[0]["function"]["parameters"]["properties"]["a"]["enum"].reverse()
    assert compiled(parts, "Hi", tools=tools).tokens.tolist() != compiled(parts, "Hi").tokens.tolist()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_declared_end_of_a_tool_is_a_cut_whatever_follows(parts: Parts, count: int) -> None:
    def declaring(tools: list[dict[str, Any]]) -> CompiledPrompt:
        marked = [{**t, "cache_control": {"type": "ephemeral"}} if n == count else t for n, t in enumerate(tools, 1)]
        return compiled(parts, "Hi", tools=marked)

    few, more = declaring(TOOLS[:count]), declaring(TOOLS)
    end = min(p.position for p in few.breakpoints if not p.soft)
    assert end in [p.position for p in more.breakpoints if not p.soft]
    assert more.tokens[:end].tolist() == few.tokens[:end].tolist()
    text = parts[2].decode(few.tokens[:end])
    assert TOOLS[count - 1]["function"]["name"] in text
    rest = parts[2].decode(more.tokens[end:])
    assert all(t["function"]["name"] in rest for t in TOOLS[count:])


def test_conversations_share_their_beginning_and_its_cuts(parts: Parts) -> None:
    turns = ["First question", "First answer", "Second question", "Second answer", "Third question"]
    short, long = compiled(parts, *turns[:3], tools=None), compiled(parts, *turns, tools=None)
    if parts[0] == "mistral":  # the system prompt moves with the last question: what is shared ends before it
        shared = next(n for n, (a, b) in enumerate(zip(short.tokens, long.tokens, strict=False)) if a != b)
    else:
        shared = max(p.position for p in short.breakpoints)
        assert short.tokens[:shared].tolist() == long.tokens[:shared].tolist()
    cuts = [{p.position for p in prompt.breakpoints if p.position <= shared} for prompt in (short, long)]
    assert cuts[0] == cuts[1]
    assert len(cuts[0]) >= 2


def test_stop_tokens(parts: Parts) -> None:
    wanted = {
        "qwen": {"<|im_end|>", "<|endoftext|>"},
        "llama": {"<|im_end|>", "<|eot_id|>"},
        "mistral": {"</s>", "<|im_end|>"},
    }
    found = {parts[2].decode([token]) for token in parts[3].stop_tokens}
    assert found
    assert found <= wanted[parts[0]] | {"<|eom_id|>", "<|end_of_text|>"}


def test_calls_of_a_real_answer(parts: Parts) -> None:
    answers = {
        "qwen": '<tool_call>\n{"name": "alpha", "arguments": {"a": "x", "b": 2}}\n</tool_call>',
        "llama": '{"name": "alpha", "parameters": {"a": "x", "b": 2}}',
        "mistral": '[TOOL_CALLS][{"name": "alpha", "arguments": {"a": "x", "b": 2}}]',
    }
    _, _, wrapped, adapter = parts
    ids = wrapped.encode(answers[parts[0]], add_special_tokens=False)[0]
    for skip in (False, True):  # with and without the special tokens that decoding leaves out
        text = wrapped.decode(ids, skip_special_tokens=skip)
        assert [(c.name, c.arguments) for c in adapter.parse_tool_calls(text, TOOLS)] == [("alpha", {"a": "x", "b": 2})]
        assert adapter.parse_tool_calls(text, TOOLS[:1]) == []


def test_a_history_of_calls_in_openais_form(parts: Parts) -> None:
    call = {
        "id": "call_1234567890",
        "type": "function",
        "function": {"name": "alpha", "arguments": '{"a": "x", "b": 2}'},
    }
    chat: list[dict[str, Any]] = [
        SYSTEM,
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "name": "alpha", "content": '{"ok": true}'},
    ]
    if parts[1].chat_template in OWN.values():
        pytest.skip("our small templates show no calls")
    text = parts[2].decode(segment(Request(messages=chat, tools=TOOLS), parts[2], parts[3]).tokens)
    assert '{"a": "x", "b": 2}' in text
    assert "ok" in text.rpartition('{"a": "x", "b": 2}')[2]
    assert call["function"]["arguments"] == '{"a": "x", "b": 2}', "the caller's message is as it was"
    if parts[0] == "mistral":
        assert text.count(call_id(call["id"])) == 2


def test_date_and_thinking_are_pinned(parts: Parts) -> None:
    family, _, wrapped, adapter = parts
    text = wrapped.decode(compiled(parts, "Hi").tokens)
    if family == "llama":
        assert "26 Jul 2024" in text
        other = choose_adapter({}, wrapped, template_args={"date_string": "1 May 2030"})
        assert "1 May 2030" in other.render([{"role": "user", "content": "Hi"}]).text
        assert other.identity != adapter.identity
    if family == "qwen":
        assert text.endswith("<think>\n\n</think>\n\n")
        thinking = choose_adapter({}, wrapped, template_args={"enable_thinking": True})
        assert "<think>" not in thinking.render([{"role": "user", "content": "Hi"}]).text


def test_a_request_sets_the_templates_variables(parts: Parts) -> None:
    family, _, wrapped, adapter = parts
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    name, value = {"qwen": ("enable_thinking", True), "llama": ("date_string", "1 May 2030")}.get(family, ("", None))
    if name:
        assert adapter.reads(name)
        plain = adapter.render(chat).text
        other = choose_adapter({}, wrapped, template_args={name: value}).render(chat)
        assert adapter.render(chat, template_args={name: value}) == other
        assert other.text != plain
        assert adapter.render(chat).text == plain, "it holds for that request alone"
    for unknown in ("no_such_variable", "messages", "add_generation_prompt"):
        assert not adapter.reads(unknown)
        with pytest.raises(ConfigError, match=unknown):
            adapter.render(chat, template_args={unknown: 1})


def test_words_about_reasoning_become_variables_of_the_template(parts: Parts) -> None:
    family, _, _, adapter = parts
    asked: dict[str, Any] = {"verbosity": "low", "given": {"no_such_variable": 1}}
    left_out = ["verbosity", "chat_template_kwargs.no_such_variable"]
    if family == "qwen":
        assert template_args(adapter, effort="high", **asked) == ({"enable_thinking": True}, left_out)
        assert template_args(adapter, effort="none") == ({"enable_thinking": False}, [])
        assert template_args(adapter, effort="high", thinks=False) == ({"enable_thinking": False}, [])
        assert template_args(adapter, thinks=False, given={"enable_thinking": True}) == ({"enable_thinking": True}, [])
        with pytest.raises(ConfigError, match="JSON values"):
            adapter.render([{"role": "user", "content": "Hi"}], template_args={"enable_thinking": {1, 2}})
    elif not adapter.reads("enable_thinking"):
        assert template_args(adapter, effort="low", thinks=True, **asked)[1] == [
            "thinking",
            "reasoning_effort",
            *left_out,
        ]


def test_a_template_reads_what_it_tests_for_being_defined() -> None:
    found = template_variables(
        "{% if not tools is defined %}{% set tools = none %}{% endif %}"
        "{% if a is not defined %}{% set a = 1 %}{% endif %}"
        "{% for message in messages %}{% if message.name is defined %}{{ message.name }}{% endif %}{% endfor %}"
    )
    assert found == {"tools", "a", "messages"}


def test_call_ids_have_nine_letters_and_digits() -> None:
    assert call_id("abcDEF123") == "abcDEF123"
    made = {call_id(f"call_{n}") for n in range(100)}
    assert len(made) == 100
    assert all(len(each) == 9 and each.isalnum() for each in made)


@pytest.mark.parametrize(
    ("config", "template", "adapter"),
    [
        ({"model_type": "qwen2"}, "<|im_start|>{{ messages[0].content }}", QwenAdapter),
        ({"architectures": ["Qwen2ForCausalLM"]}, "<|im_start|>{{ messages[0].content }}", QwenAdapter),
        (
            {"model_type": "llava", "text_config": {"model_type": "mistral"}},
            "[INST]{{ messages[0].content }}",
            MistralAdapter,
        ),
        ({"model_type": "llama"}, "<|im_start|>{{ messages[0].content }}", GenericAdapter),
        ({"model_type": "llama"}, "<|im_start|><tools></tools><tool_call>{{ messages[0].content }}", QwenAdapter),
        ({"model_type": "qwen2"}, "USER: {{ messages[0].content }}", GenericAdapter),
        ({"model_type": "qwen2"}, None, GenericAdapter),
    ],
)
def test_choice(tokenizer: Any, config: dict[str, Any], template: str | None, adapter: type[GenericAdapter]) -> None:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    chosen = choose_adapter(config, HFTokenizer(changed))
    assert type(chosen) is adapter
    if template is None:
        with pytest.raises(TemplateError, match="no chat template"):
            chosen.render([{"role": "user", "content": "Hi"}])


def test_a_template_that_does_not_compile_is_told_apart_from_a_refusal(tokenizer: Any) -> None:
    broken, unknown, refusing = (copy.deepcopy(tokenizer) for _ in range(3))
    broken.chat_template = "{% for message in messages %}\n{{ message.content }"
    unknown.chat_template = "{{ messages | from_json }}"
    refusing.chat_template = "{{ raise_exception('no, thanks') }}"
    for changed, says in (
        (broken, r"does not compile \(line 2: .*give a text"),
        (unknown, r"does not compile \(line 1: No filter named 'from_json'"),
        (refusing, "refused the messages: no, th"),
    ):
        with pytest.raises(TemplateError, match=says):
            GenericAdapter(HFTokenizer(changed)).render([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("family", [QwenAdapter, LlamaAdapter, GenericAdapter])
def test_a_template_without_tools_gets_them_in_the_system_prompt(
    tokenizer: Any, family: Callable[[HFTokenizer], GenericAdapter]
) -> None:
    wrapped = HFTokenizer(tokenizer)
    text = family(wrapped).render([SYSTEM, {"role": "user", "content": "Hi"}], TOOLS).text
    assert text.index(SYSTEM["content"]) < text.index('"delta"') < text.index('"alpha"') < text.index("Hi<")
