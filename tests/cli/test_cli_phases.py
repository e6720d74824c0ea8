"""Comparing answers: only equal digests are equal, and a proof of nothing says so."""

from __future__ import annotations

from typing import Any

from keepwarm.cli.phases import AGAIN, COLD, FIRST, RESTARTED, compared, identical, verdict


def answer(digest: str | None, cached: int = 0, ttft: float = 100.0) -> dict[str, Any]:
    return {
        "text": "yes",
        "token_ids": [1, 2],
        "prompt_tokens": 50,
        "cached_tokens": cached,
        "cached_by_tier": {"disk": cached} if cached else {},
        "ttft_ms": ttft,
        "total_ms": 2 * ttft,
        "exactness": "exact",
        "uncached_reason": "",
        "logits_digest": digest,
    }


def test_rows_go_request_by_request_in_the_order_of_phases() -> None:
    answers = [(phase, number, answer("a")) for phase in (COLD, FIRST, AGAIN, RESTARTED) for number in (0, 1)]
    assert [(row["request"], row["phase"]) for row in compared(answers)] == [
        (number, phase) for number in (0, 1) for phase in (COLD, FIRST, AGAIN, RESTARTED)
    ]


def test_speed_is_told_against_the_cold_run_of_the_same_request() -> None:
    answers = [
        (COLD, 0, answer("a", ttft=300.0)),
        (COLD, 1, answer("b", ttft=100.0)),
        (AGAIN, 0, answer("a", 40, ttft=30.0)),
        (AGAIN, 1, answer("b", 40, ttft=50.0)),
    ]
    assert [row["speedup"] for row in compared(answers)] == [1, 10, 1, 2]


def test_one_other_digest_fails_the_proof() -> None:
    rows = compared([(COLD, 0, answer("a")), (AGAIN, 0, answer("a", 40)), (RESTARTED, 0, answer("b", 40))])
    assert [row["bit_identical"] for row in rows] == [True, True, False]
    assert verdict(rows).startswith("bit-identical: no (1 of 2")


def test_a_missing_digest_proves_nothing() -> None:
    assert not identical(answer(None), answer(None))


def test_a_run_that_reused_nothing_says_so() -> None:
    rows = compared([(COLD, 0, answer("a")), (AGAIN, 0, answer("a"))])
    assert "nothing was reused" in verdict(rows)
    rows = compared([(COLD, 0, answer("a")), (AGAIN, 0, answer("a", 40)), (RESTARTED, 0, answer("a"))])
    assert "the new process reused nothing" in verdict(rows)
    rows = compared([(COLD, 0, answer("a")), (AGAIN, 0, answer("a", 40)), (RESTARTED, 0, answer("a", 40))])
    assert verdict(rows).startswith("bit-identical: yes (logits of 4 steps in 2 answers")
