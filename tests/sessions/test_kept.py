"""Answers that are kept by an id: they outlive the process, share what they have in common, and go one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keepwarm.errors import CorruptRun
from keepwarm.sessions.kept import KeptAnswers
from keepwarm.sessions.records import Records

DAY = 86_400.0


def put(answers: KeptAnswers, name: str, items: list[Any], salt: str | None = None, most: int = 9) -> None:
    body = {"status": "completed", "of": name}
    epoch = answers._records._epochs.now()
    answers.put(name, salt, items=items, inputs=len(items) - 1, body=body, epoch=epoch, most=most, seconds=DAY)


def items(count: int) -> list[Any]:
    return [{"id": f"msg_{number}", "text": "\u00e9" * number} for number in range(count)]


def test_they_outlive_the_process_and_go_without_each_other(tmp_path: Path) -> None:
    records = Records(tmp_path)
    answers = KeptAnswers(records)
    put(answers, "one", items(2))
    put(answers, "two", items(4))
    records.close()
    records = Records(tmp_path)
    answers = KeptAnswers(records)
    nodes = len(records._kept.ask("SELECT id FROM nodes"))
    assert nodes == 4 + 2, "items that both have are there once"
    assert answers.drop("one", None)
    assert not answers.drop("one", None)
    assert answers.get("one", None, DAY) is None
    found = answers.get("two", None, DAY)
    assert found is not None
    assert (list(found.items), list(found.output), found.body["of"]) == (items(4), items(4)[3:], "two")
    assert answers.get("two", None, 0.0) is None, "its time is over"
    assert not list(records.sessions()), "they are no conversations"
    answers.drop("two", None)
    assert not records._kept.ask("SELECT id FROM nodes")
    records.close()


def test_the_oldest_go_and_salts_are_apart() -> None:
    answers = KeptAnswers(Records(None))
    put(answers, "other", items(2), salt="b")
    for name in ("one", "two", "three"):
        put(answers, name, items(2), salt="a", most=2)
    assert [answers.get(name, "a", DAY) is not None for name in ("one", "two", "three")] == [False, True, True]
    assert answers.get("other", "b", DAY) is not None
    assert answers.get("other", "a", DAY) is None


def test_a_damaged_one_is_not_told(tmp_path: Path) -> None:
    records = Records(tmp_path)
    answers = KeptAnswers(records)
    put(answers, "one", items(2))
    with records._kept.changing() as db:
        db.execute("UPDATE nodes SET record = zeroblob(length(record))")
    with pytest.raises(CorruptRun):
        answers.get("one", None, DAY)
    records.close()
