"""Eight turns with real weights: each computes its new tokens alone, to the bit as without a cache, restarted or not.

`benchmarks/sessions.py` does the same with fifty, and takes the time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from keepwarm import Engine
from keepwarm.core.blocks import common_length, token_ids
from keepwarm.sessions.turn import marked

pytestmark = pytest.mark.host_memory("so large a model takes minutes through transformers; tiny ones of its class run")

SYSTEM = "You are the clerk of a small harbour. Answer in one short line."
SAID = [
    "Where does a boat of 9 metres go?",
    "Why?",
    "Naïve question: what is 中文 🙂?",
    "And in winter?  ",
    "Go on.",
    "\nWho?",
    "OK",
    "Bye",
]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "turns", "restart"), [("bfloat16", 8, 5), ("float32", 3, 2)])
def test_turns_equal_cold_runs(demo_folder: Path, tmp_path: Path, dtype: str, turns: int, restart: int) -> None:
    settings = {"store": tmp_path / "store", "dtype": dtype, "settle_after": None}
    ran = token_ids([])
    for part in (range(restart), range(restart, turns)):
        with (
            Engine.from_pretrained(demo_folder, **settings) as engine,
            Engine.from_pretrained((engine.pipeline.model.model, engine.pipeline.model.tokenizer)) as bare,
        ):
            session = engine.sessions.open("s", system=SYSTEM)
            for number in part:
                result = session.say(SAID[number], max_new_tokens=5, trace=True)
                chat = marked(session.show().messages[:-1])
                cold = bare.generate(messages=chat, max_new_tokens=5, reuse="off", trace=True)
                assert cold.logits_digest == result.logits_digest
                assert result.exactness == "exact"
                asked = engine.pipeline.prepare(None, {"messages": chat}).compiled.tokens
                assert result.cached_tokens == common_length(ran, asked), "all that was run, and stands there still"
                assert engine.sessions.waiting() == 0, "an answer needs no second computing"
                ran = np.concatenate([asked, token_ids(result.token_ids[:-1])])
