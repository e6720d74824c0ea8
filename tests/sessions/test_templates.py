"""A settled conversation is a beginning of the next turn's prompt, and is cut there, with real families' templates."""

from __future__ import annotations

from typing import Any

import pytest
from tests.helpers import tokenizers

from keepwarm.compiler.segment import CompiledPrompt, segment
from keepwarm.core.request import Request
from keepwarm.models.choose import choose_adapter
from keepwarm.sessions.turn import marked

TOOLS = [{"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}]


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow) if n in ("tok-llama3.2", "tok-mistral-nemo") else n
        for n in tokenizers.NAMES
    ],
)
def test_the_next_turn_begins_where_a_settled_one_ends(name: str, tools: Any) -> None:
    if name == "tok-mistral-nemo" and tools:
        pytest.skip("its template shows the tools with the last user message, so they move")
    tokenizer = tokenizers.wrapped(name)
    adapter = choose_adapter({}, tokenizer)

    def compiled(messages: list[dict[str, str]], answer: bool) -> CompiledPrompt:
        return segment(Request(messages=marked(messages), tools=tools, answer=answer), tokenizer, adapter)

    chat = [{"role": "system", "content": "Be brief. " * 30}]
    cuts: set[int] = set()
    for number in range(4):
        chat.append({"role": "user", "content": f"Question {number}? 中文"})
        prompt = compiled(chat, True)
        hard = {point.position for point in prompt.breakpoints if not point.soft}
        assert cuts <= hard, "where turns were settled, there is a cut"
        chat.append({"role": "assistant", "content": f"Answer {number}."})
        settled = compiled(chat, False)
        following = compiled([*chat, {"role": "user", "content": "\n<|im_end|> More?"}], True)
        assert settled.tokens.tolist() == following.tokens[: len(settled.tokens)].tolist()
        assert {point.position for point in settled.breakpoints if not point.soft} - {
            len(settled.tokens)
        } <= hard | cuts
        cuts.add(len(settled.tokens))
