"""What of an answer may be streamed before it is known whether it calls a tool."""

from __future__ import annotations

import random

import pytest

from keepwarm.serving.toolgate import ToolGate

CALLS = [
    '{"name": "f", "arguments": {}}',
    '[{"name": "f", "arguments": {}}]',
    '```json\n{"name": "f", "arguments": {}}\n```',
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
    '<|python_tag|>{"name": "f", "parameters": {}}',
]


def pieces(text: str, seed: int) -> list[str]:
    draw = random.Random(seed)
    cuts = sorted(draw.sample(range(len(text) + 1), min(len(text), 12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("before", ["", "I will look.\n", "Sure: a < b, x[1] and `y`.\n\n  "])
def test_nothing_of_a_call_is_given_out(before: str, call: str) -> None:
    for seed in range(40):
        gate = ToolGate()
        said = "".join(gate.push(piece) for piece in pieces(before + call, seed))
        assert said.strip() == before.strip()
        assert said + gate.rest() == before + call


@pytest.mark.parametrize("text", ["a < b and c[0] is `d`", "Plain words.\nAnd more, in lines.\n", "x", "1 {2} 3 [4]"])
def test_text_is_given_out_as_it_comes(text: str) -> None:
    for seed in range(40):
        gate = ToolGate()
        said = "".join(gate.push(piece) for piece in pieces(text, seed))
        assert said + gate.rest() == text
        assert len(said) > len(text) - 12
