"""A real model from a GGUF file, where one was fetched: 24 layers, types mixed as Q4_K_M has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepwarm import Engine

FILE = Path("~/.cache/keepwarm-dev/gguf/qwen2.5-0.5b.gguf").expanduser()  # shared/models/fetch.py's `gguf_of`


@pytest.mark.slow
@pytest.mark.skipif(not FILE.exists(), reason=f"no {FILE}")
@pytest.mark.host_memory("the lean decoder attends to the host's memory")
def test_a_real_file_answers_cold_and_warm_alike(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    with Engine.from_pretrained(FILE, store=tmp_path / "store") as engine:
        answers = [engine.generate(messages=asked, max_new_tokens=8, trace=True) for _ in range(2)]
    assert all("Paris" in answer.text for answer in answers)
    assert answers[1].cached_tokens > 0
    assert len({answer.logits_digest for answer in answers}) == 1
    assert {answer.exactness for answer in answers} == {"exact"}
