"""The split between header and the rest: on tokens of the whole prompt, and never moved by what a user says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.templates import HOSTILE, SYSTEM, TEMPLATES

from keepwarm.compiler.segment import CompiledPrompt, segment
from keepwarm.core.request import Request
from keepwarm.errors import PromptError, TemplateError
from keepwarm.models.generic import GenericAdapter
from keepwarm.models.tokenizer import HFTokenizer

TOOLS = [{"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in ("beta", "alpha")]


@pytest.fixture(params=["own", *TEMPLATES])
def parts(request: pytest.FixtureRequest, tokenizer: Any) -> tuple[HFTokenizer, GenericAdapter]:
    changed = copy.deepcopy(tokenizer)
    if request.param != "own":
        changed.chat_template = TEMPLATES[request.param]
    wrapped = HFTokenizer(changed)
    return wrapped, GenericAdapter(wrapped)


def compiled(parts: tuple[HFTokenizer, GenericAdapter], user: str, **more: Any) -> CompiledPrompt:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
    return segment(Request(messages=messages, tools=TOOLS, **more), *parts)


def header_end(prompt: CompiledPrompt) -> int:
    return max(point.position for point in prompt.breakpoints if not point.soft)


@pytest.mark.slow
@pytest.mark.parametrize("user", ["hi", *HOSTILE, "".join(HOSTILE)])
def test_user_text_never_moves_the_split(parts: tuple[HFTokenizer, GenericAdapter], user: str) -> None:
    plain, hostile = compiled(parts, "Hello there"), compiled(parts, user)
    end = header_end(plain)
    assert end > 10
    assert header_end(hostile) == end
    assert hostile.tokens[:end].tolist() == plain.tokens[:end].tolist()


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(user=st.text(max_size=30) | st.lists(st.sampled_from(HOSTILE), max_size=5).map("".join))
def test_any_user_text_keeps_the_header(tokenizer: Any, user: str) -> None:
    wrapped = HFTokenizer(tokenizer)
    parts = (wrapped, GenericAdapter(wrapped))
    plain, other = compiled(parts, "Hello"), compiled(parts, user)
    end = header_end(plain)
    assert header_end(other) == end
    assert other.tokens[:end].tolist() == plain.tokens[:end].tolist()


def test_the_prompt_is_tokenized_as_a_whole(parts: tuple[HFTokenizer, GenericAdapter]) -> None:
    wrapped, adapter = parts
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": " \n x"}]
    text = adapter.render(messages, TOOLS).text
    assert compiled(parts, " \n x").tokens.tolist() == wrapped.encode(text, add_special_tokens=False)[0]


def test_warming_a_header_is_a_beginning_of_every_prompt_with_it(parts: tuple[HFTokenizer, GenericAdapter]) -> None:
    header = segment(Request(messages=[{"role": "system", "content": SYSTEM}], tools=TOOLS, answer=False), *parts)
    whole = compiled(parts, "\n\nHello")
    end = len(header.tokens)
    assert whole.tokens[:end].tolist() == header.tokens.tolist()
    assert end in [point.position for point in whole.breakpoints if not point.soft]


def test_segments_cover_the_prompt(parts: tuple[HFTokenizer, GenericAdapter]) -> None:
    prompt = compiled(parts, "Hello")
    ends = [0, *(s.end for s in prompt.segments)]
    assert [s.start for s in prompt.segments] == ends[:-1]
    assert ends[-1] == len(prompt.tokens)


def test_tools_without_a_place_go_after_the_system_prompt_as_they_are_sent(tokenizer: Any) -> None:
    wrapped = HFTokenizer(tokenizer)
    text = GenericAdapter(wrapped).render([{"role": "user", "content": "Hi"}], TOOLS).text
    assert text.index('"beta"') < text.index('"alpha"') < text.index("Hi")
    asked = GenericAdapter(wrapped, tool_order="sorted").render([{"role": "user", "content": "Hi"}], TOOLS).text
    assert asked.index('"alpha"') < asked.index('"beta"')


def test_documents_are_segments_of_their_own(tokenizer: Any) -> None:
    wrapped = HFTokenizer(tokenizer)
    documents = ["First text.", {"title": "B", "text": "Second text."}]
    request = Request(messages=[{"role": "user", "content": "Compare."}], documents=documents)
    prompt = segment(request, wrapped, GenericAdapter(wrapped))
    named = [(s.kind.value, s.name) for s in prompt.segments if s.kind == "document"]
    assert named == [("document", ""), ("document", "B")]


def test_conversations_cut_at_message_ends(tokenizer: Any) -> None:
    wrapped = HFTokenizer(tokenizer)
    adapter = GenericAdapter(wrapped)
    turns: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for n in range(3):
        turns += [{"role": "user", "content": f"Q{n}"}, {"role": "assistant", "content": f"A{n}"}]
    short = segment(Request(messages=turns[:4]), wrapped, adapter)
    long = segment(Request(messages=turns[:6]), wrapped, adapter)
    softs = [b.position for b in short.breakpoints if b.soft]
    assert len(softs) == 3
    assert set(softs) < {b.position for b in long.breakpoints}
    assert short.tokens[: softs[-1]].tolist() == long.tokens[: softs[-1]].tolist()


def test_cache_control_declares_a_hard_cut(tokenizer: Any) -> None:
    wrapped = HFTokenizer(tokenizer)
    part = {"type": "text", "text": "Long context.", "cache_control": {"type": "ephemeral"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [part]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Go."},
    ]
    prompt = segment(Request(messages=messages), wrapped, GenericAdapter(wrapped))
    assert [b.label for b in prompt.breakpoints if not b.soft] == ["user"]
    both = [part, {"type": "text", "text": "more"}]
    with pytest.raises(PromptError, match="split the message"):
        segment(Request(messages=[{"role": "user", "content": both}]), wrapped, GenericAdapter(wrapped))


def test_a_date_in_the_template_is_fixed(tokenizer: Any) -> None:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "Today: {{ date_string }}\n{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    wrapped = HFTokenizer(changed)
    user = [{"role": "user", "content": "Hi"}]
    assert "26 Jul 2024" in GenericAdapter(wrapped).render(user).text
    given_date = GenericAdapter(wrapped, template_args={"date_string": "1 May 2030"})
    assert "1 May 2030" in given_date.render(user).text


def test_the_templates_own_words_reach_the_user(tokenizer: Any) -> None:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(TemplateError, match="roles must alternate"):
        GenericAdapter(HFTokenizer(changed)).render([{"role": "user", "content": "Hi"}])


def test_a_prompt_without_declared_cuts_has_none(tokenizer: Any) -> None:
    wrapped = HFTokenizer(tokenizer)
    prompt = segment(Request(prompt="Just text <|im_end|> and more"), wrapped, GenericAdapter(wrapped))
    assert prompt.breakpoints == ()


IN_PARTS = {  # of SmolVLM and LLaVA: contents are lists of parts
    "smolvlm": "{% for m in messages %}{{ m['role'] | capitalize }}{% if m['content'][0]['type'] == 'image' %}:"
    "{% else %}: {% endif %}{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}",
    "llava": (
        "{% for m in messages %}{{ m['role'] | upper }}: {% for part in m['content'] | "
        "selectattr('type', 'equalto', 'text') %}{{ part['text'] }} {% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    ),
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_a_template_that_takes_parts_alone_is_given_parts(tokenizer: Any, name: str) -> None:
    """A content that is a text would be passed over, and nobody would notice."""
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = IN_PARTS[name]
    wrapped = HFTokenizer(changed)
    adapter = GenericAdapter(wrapped)
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where does the Petrel lie?"}]
    text = adapter.render(chat, []).text
    assert SYSTEM in text
    assert "Where does the Petrel lie?" in text
    asked = [
        segment(Request(messages=[chat[0], {"role": "user", "content": words}]), wrapped, adapter) for words in "ab"
    ]
    assert header_end(asked[0]) == header_end(asked[1]) > 10
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert HFTokenizer(plain).render([{"role": "user", "content": "as it is"}]) == "as it is"
