"""The report from a small run's file, and the file itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keepwarm.errors import ConfigError
from keepwarm.evaluation.economics import Growth, Row, write
from papers import queries
from papers.bfcl import Benchmark, Example
from papers.conditions import CONDITIONS, FULL, GROUP, PER_TOOL
from papers.journal import Journal
from papers.metrics import Outcome
from papers.report import identical, report, results
from papers.run import ANSWERS, KEYS

SETTINGS = {
    "model": "m",
    "weights": "0123",
    "dtype": "float32",
    "seed": 0,
    "max_new_tokens": 8,
    "system": "s",
    "data": "d",
}
MACHINE = {"keepwarm": "0", "torch": "2", "threads": 1, "processor": "p", "python": "3"}
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
BENCHMARK = Benchmark(
    {"a": (TOOL, {**TOOL, "name": "g"})},
    (
        Example("1", "seen", "a", "One?", "f", {"x": [1]}),
        Example("2", "seen", "a", "Two?", None, {}),
        Example("3", "unseen", "a", "Three?", "f", {"x": [3]}),
    ),
)


def answer(example: str, split: str, condition: str, **changes: Any) -> dict[str, Any]:
    reply = {
        "text": '{"name": "f"}',
        "calls": [{"name": "f", "arguments": {"x": 1}}],
        "tokens": 5,
        "prompt_tokens": 90,
        "cached_tokens": 80,
        "hit": True if condition == GROUP else None,
        "link_ms": 1.0,
        "prefill_ms": 20.0,
        "decode_ms": 9.0,
        "ttft_ms": 21.0,
        "compile_ms": 0.0,
        "digest": "aa",
    }
    return {"id": example, "split": split, "condition": condition, "set": "a"} | reply | changes


@pytest.fixture
def answers(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path / ANSWERS, KEYS)
    journal.begin(SETTINGS, MACHINE)
    for condition in CONDITIONS:
        journal.add(answer("1", "seen", condition))
        journal.add(answer("2", "seen", condition, text="None fits.", calls=[]))
        wrong = condition == PER_TOOL
        journal.add(answer("3", "unseen", condition, digest="bb" if condition == FULL else "aa", text="?" * wrong))
    journal.add(answer("9", "seen", FULL))  # of another benchmark
    return journal


def test_scores_and_counts(answers: Journal) -> None:
    found = results(BENCHMARK, answers)
    assert found.splits == ["seen", "unseen"]
    assert found.conditions == list(CONDITIONS)
    assert [score.outcome for score in found.scores["seen", FULL].values()] == [Outcome.RIGHT, Outcome.REFRAINED]
    assert [score.outcome for score in found.scores["unseen", GROUP].values()] == [Outcome.ARGUMENTS]
    seen = found.summary("seen", FULL)
    assert (seen["EM"].value, seen["EM"].n, seen["FPR"].n) == (1.0, 1, 1)
    assert found.summary(None, FULL)["EM"].n == 2
    assert found.common == {("seen", "1"), ("seen", "2"), ("unseen", "3")}
    assert found.summary(None, FULL, frozenset({("seen", "1")}))["EM"].n == 1
    same = identical(found)
    assert (same.value, same.n) == (1.0, 3)


@pytest.mark.slow
def test_report_says_how_many_and_stands_beside_the_published_rows(answers: Journal, tmp_path: Path) -> None:
    times = Journal(tmp_path / queries.TIMES, queries.KEYS)
    times.begin(SETTINGS, MACHINE)
    times.add({
        "number": 0,
        "link_ms": 1,
        "prefill_ms": 2,
        "decode_ms": 3,
        "total_ms": 6,
        "ttft_ms": 3,
        "tokens": 4,
        "question_tokens": 5,
        "cached_tokens": 6,
    })
    rows = [
        Row(
            n,
            100 * n,
            110 * n,
            10**6 * n,
            90.0 * n,
            50.0,
            2.0,
            48.0,
            60.0,
            100.0 * n,
            120.0 * n,
            40.0,
            ("device",),
            True,
        )
        for n in (5, 20)
    ]
    about = {"model": "demo", "dtype": "float32", "threads": 2, "torch": "2"}
    write(rows, Growth(1.0, 1.0, 4.0, 10, 0.01), about, tmp_path)
    files = report(tmp_path, BENCHMARK, answers, times=times, economics=[tmp_path / "tools.jsonl"], note="A note.")
    names = {path.name for path in files}
    assert {"report.md", "report.html", "quality.png", "errors.png", "methods.png"} <= names
    assert len(names) == 8
    text = (tmp_path / "report.md").read_text()
    assert "seen 2 (1 that need a tool, 1 that none fits); unseen 1" in text
    assert "A note." in text
    assert "| seen | 2 of 2 (≥ 34.2%) | 2 of 2 (≥ 34.2%) | 2 of 2 (≥ 34.2%) | 22 of 25 |" in text
    assert "| unseen | 1 of 1 (≥ 20.7%) | 0 of 1 (≥ 0.0%) | 1 of 1 (≥ 20.7%) | 19 of 25 |" in text
    assert "| seen | per-tool NoPE | 0.100 | 0.667 |" in text
    assert "Tool Gisting K=8, published | 0.714 | - | 0.302 |" in text
    assert "| 20 | 2,000 | 2,000 | 50.0 | 40.0 | 40.0 × | 1,800 | 20 | yes | 794 / 121 / 6.6 × / 922 / 401 |" in text
    assert "| break-even | 0.92 requests | 2.1 requests |" in text
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 6
    assert "<script" not in page


@pytest.mark.slow
def test_report_of_part_of_a_run(tmp_path: Path) -> None:
    journal = Journal(tmp_path / ANSWERS, KEYS)
    journal.begin(SETTINGS, MACHINE)
    journal.add(answer("3", "unseen", GROUP))
    report(tmp_path, BENCHMARK, journal)
    assert "unseen | 0 of 0 | 0 of 0 | 1 of 1 (≥ 20.7%)" in (tmp_path / "report.md").read_text()


def test_a_run_cut_off_inside_a_line_goes_on(answers: Journal) -> None:
    whole = answers.path.read_text()
    answers.path.write_text(whole + '{"id": "4", "spl')
    again = Journal(answers.path, KEYS)
    assert again.done == answers.done
    assert answers.path.read_text() == whole
    again.begin(SETTINGS, {"threads": 64})
    assert again.machine == MACHINE
    with pytest.raises(ConfigError, match="seed 0, now 1"):
        again.begin(SETTINGS | {"seed": 1}, MACHINE)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / ANSWERS
    path.write_text(json.dumps({"something": "else"}) + "\n")
    with pytest.raises(ConfigError, match="line 1"):
        Journal(path, KEYS)
