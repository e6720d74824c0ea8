"""A served share of answers is computed again cold, and what is found is counted."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import httpx2 as httpx
import pytest
from tests.helpers.processes import DEADLINE, ServerProcess, chat

from keepwarm.core.results import Generation
from keepwarm.serving.observability.shadow import Shadow, compare

ANSWER = Generation(
    text="abc",
    token_ids=(1, 2, 3),
    prompt_tokens=9,
    cached_tokens=8,
    cached_by_tier={"ram": 8},
    ttft_ms=1.0,
    total_ms=2.0,
    timings={},
    exactness="exact",
    finish_reason="length",
    last_cut=8,
    logits_digest="same",
)
SYSTEM = {"role": "system", "content": "You are the clerk of a harbour, and know every pier. " * 20}


@pytest.mark.parametrize(
    ("cold", "outcome", "diverged"),
    [
        (ANSWER, "identical", 0),
        (replace(ANSWER, logits_digest="other"), "logits", 0),
        (replace(ANSWER, logits_digest="other", token_ids=(1, 5, 3)), "tokens", 2),
        (replace(ANSWER, logits_digest="other", token_ids=(1, 2)), "tokens", 1),
        (replace(ANSWER, logits_digest="other", token_ids=(1, 2, 3, 4)), "tokens", 0),
    ],
)
def test_what_a_cold_run_says_of_an_answer(cold: Generation, outcome: str, diverged: int) -> None:
    found = compare(ANSWER, cold)
    assert (found.exactness, found.outcome, found.tokens, found.diverged) == ("exact", outcome, 3, diverged)


def test_samples_are_taken_evenly_and_only_of_what_can_be_repeated() -> None:
    shadow = Shadow(0.25, submit=lambda *prompt, **more: pytest.fail("nothing was put"), told=pytest.fail)
    try:
        taken = [shadow.traced({"messages": [], "temperature": 1.0}) for _ in range(12)]
        assert [at for at, found in enumerate(taken) if found] == [3, 7, 11]
        assert all(found["trace"] and found["seed"] >= 0 for found in taken if found)
        others = [{"session": "mine"}, {"reuse": "off"}]
        assert not any(shadow.traced(arguments) for _ in range(8) for arguments in others)
    finally:
        shadow.close()


@pytest.mark.slow
def test_a_served_answer_is_compared_with_a_cold_run(tiny_model: Path, tmp_path: Path) -> None:
    server = ServerProcess(tiny_model, tmp_path / "store", environment={"KEEPWARM__ENGINE__SHADOW": "1"}).ready()
    try:
        for number, temperature in enumerate((0, 0, 1)):
            asked = [SYSTEM, {"role": "user", "content": f"How deep is pier {number}?"}]
            answer = chat(server.url, "", model=tiny_model.name, messages=asked, temperature=temperature)
            assert answer.status_code == 200
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert bool(cached) == bool(number)
        until = time.monotonic() + DEADLINE
        while time.monotonic() < until:
            text = httpx.get(f"{server.url}/metrics", timeout=DEADLINE).text
            runs = dict(re.findall(r"^keepwarm_shadow_runs_total\{(.*)\} (\S+)$", text, re.MULTILINE))
            if sum(map(float, runs.values())) == 2:
                break
            time.sleep(0.05)
        assert runs == {'exactness="exact",outcome="identical"': "2.0"}
        assert 'keepwarm_shadow_diverged_tokens_total{exactness="exact"} 0.0' in text
        assert 'keepwarm_requests_total{outcome="done",protocol="openai"} 3.0' in text
    finally:
        assert server.stop() == 0
