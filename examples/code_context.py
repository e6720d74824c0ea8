"""One source file, asked about several times."""

from __future__ import annotations

import colorsys
import inspect

from common import compare

from keepwarm import Engine

FILE = {"role": "system", "content": f"Answer questions about this file.\n\n{inspect.getsource(colorsys)[:3500]}"}
QUESTIONS = ("Which functions are defined here?", "What does rgb_to_yiq return?", "Where is TWO_THIRD used?")


def run(engine: Engine, tokens: int) -> None:
    engine.warm(messages=[FILE])
    for question in QUESTIONS:
        compare(engine, question, tokens, messages=[FILE, {"role": "user", "content": question}])
