"""Ends of messages: told by one rendering, the same whatever follows, in time that grows with the prompt."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.templates import HOSTILE, TEMPLATES

from keepwarm.errors import TemplateError
from keepwarm.models.base import Message
from keepwarm.models.generic import GenericAdapter
from keepwarm.models.tokenizer import HFTokenizer

_SHOWN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_OPENS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LOOKING = {
    **TEMPLATES,
    # Qwen 2.5's way with the results of tools: one turn for all that follow one another
    "next": (
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n{{ m.content }}"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
        "{% else %}" + _SHOWN + "{% endif %}{% endfor %}" + _OPENS
    ),
    # what follows is asked for before anything of a message is written
    "peeking": (
        "{% for m in messages %}{% if loop.nextitem is defined and loop.nextitem.role == 'tool' %}+{% endif %}"
        + _SHOWN
        + "{% endfor %}"
        + _OPENS
    ),
    # Qwen 3's: the number of messages is known from the start
    "counted": "{% set n = messages | length %}{% for m in messages %}" + _SHOWN + "{% endfor %}" + _OPENS,
    "skipping": "{% for m in messages if m.role != 'tool' %}" + _SHOWN + "{% endfor %}" + _OPENS,
    "in a macro": (
        "{% macro shown(all) %}{% for m in all %}" + _SHOWN + "{% endfor %}{% endmacro %}{{ shown(messages) }}" + _OPENS
    ),
    "from the second": (
        "{% set rest = messages[1:] %}{{ messages[0].content }}<|im_end|>\n"
        "{% for m in rest %}" + _SHOWN + "{% endfor %}" + _OPENS
    ),
    "kept for later": "{% set all %}{% for m in messages %}" + _SHOWN + "{% endfor %}{% endset %}{{ all }}" + _OPENS,
    "as a list": "{{ (messages + []) | length }}{% for m in messages | list %}" + _SHOWN + "{% endfor %}" + _OPENS,
}


class Counting(HFTokenizer):
    """Counts the messages that are rendered."""

    rendered = 0

    def render(self, messages: list[Message], **kwargs: Any) -> str:
        self.rendered += len(messages)
        return super().render(messages, **kwargs)


def adapter(tokenizer: Any, template: str) -> tuple[Counting, GenericAdapter]:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = LOOKING[template]
    wrapped = Counting(changed)
    return wrapped, GenericAdapter(wrapped)


TEXTS = st.sampled_from(["hi", "", *HOSTILE, "".join(HOSTILE), "+"]) | st.text(max_size=8)
MESSAGES = st.builds(
    lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant", "tool"]), TEXTS
)


def ends(made: GenericAdapter, chat: list[Message]) -> tuple[str, list[int]]:
    rendered = made.render(chat)
    return rendered.text, [mark.char or 0 for mark in rendered.marks]


@pytest.fixture(scope="module", params=LOOKING)
def looking(request: pytest.FixtureRequest, tokenizer: Any) -> tuple[Counting, GenericAdapter]:
    return adapter(tokenizer, request.param)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(chat=st.lists(MESSAGES, min_size=1, max_size=6), others=st.lists(MESSAGES, max_size=3))
def test_an_end_is_where_the_prompt_of_the_messages_so_far_ends(
    looking: tuple[Counting, GenericAdapter], chat: list[Message], others: list[Message]
) -> None:
    """As each beginning rendered by itself tells it; and no message that follows moves one."""
    wrapped, made = looking
    made.forget()
    text, found = ends(made, chat)
    assert text == wrapped.render(chat, add_generation_prompt=True)
    wanted = set()
    for size in range(1, len(chat) + 1):
        try:
            so_far = wrapped.render(chat[:size])
        except TemplateError:
            continue
        if so_far and text.startswith(so_far):
            wanted.add(len(so_far))
    assert wanted <= set(found)
    longer, later = ends(made, [*chat, *others])
    for end in set(found) - {found[-1]} if found else ():
        if longer.startswith(text[:end]):
            assert end in later


def talk(count: int) -> list[Message]:
    return [{"role": ("user", "assistant")[n % 2], "content": f"Number {n}."} for n in range(count)]


@pytest.mark.parametrize("template", ["native", "plain", "next", "from the second"])
def test_one_rendering_tells_all_ends_of_a_long_conversation(tokenizer: Any, template: str) -> None:
    wrapped, made = adapter(tokenizer, template)
    assert len(ends(made, talk(3000))[1]) == 3000
    assert wrapped.rendered < 100


@pytest.mark.parametrize("template", ["counted", "in a macro"])
def test_a_template_that_looks_ahead_takes_time_in_proportion(tokenizer: Any, template: str) -> None:
    """Up to some hundred messages every end is found, then ever fewer: the same ones whatever is remembered."""
    wrapped, made = adapter(tokenizer, template)
    assert len(ends(made, talk(150))[1]) == 150
    before = wrapped.rendered
    text, found = ends(made, talk(1500))
    assert wrapped.rendered - before < 1500 * 16 * 3 + 2 * 256**2
    assert 150 < len(found) < 1500
    shorter, few = ends(adapter(tokenizer, template)[1], talk(1201))
    end = len(shorter.rpartition("<|im_start|>")[0])
    assert text.startswith(shorter[:end])
    assert few[:-1] == [at for at in found if at < few[-1]]
    assert ends(made, talk(1500)) == (text, found)
