"""Jobs of the store's threads: put off while a prompt is computed, unless somebody waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from keepwarm.core.activity import Activity
from keepwarm.store import background
from keepwarm.store.background import Writer

SOON = 30.0  # seconds within which anything happens that happens at all


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    """One whose jobs are put off for ever."""
    monkeypatch.setattr(background, "_REST", 1e6)
    made = Writer(4)
    made.resting = lambda: 1e6
    yield made
    made.resting = lambda: 0.0
    assert made.close(SOON)


def waking(writer: Writer) -> dict[str, Callable[[], object]]:
    return {
        "somebody waits": writer.hurry,
        "a flush": writer.flush,
        "another job": lambda: writer.submit(lambda: None, at_once=True),
        "the end": lambda: writer.close(SOON),
        "let go": lambda: writer.let_go(lambda: None),
        "a job in its place": lambda: writer.wait_for(lambda: None),
    }


@pytest.mark.parametrize("how", ["somebody waits", "a flush", "another job", "the end", "let go", "a job in its place"])
def test_a_job_is_put_off_until_somebody_waits(writer: Writer, how: str) -> None:
    done = threading.Event()
    assert writer.submit(done.set)
    assert not done.wait(0.05)
    waking(writer)[how]()
    assert done.wait(SOON)


def test_a_job_that_is_to_be_done_at_once_is_not_put_off(writer: Writer) -> None:
    done = threading.Event()
    assert writer.submit(done.set, at_once=True)
    assert done.wait(SOON)


def test_a_job_is_put_off_for_a_moment_only() -> None:
    writer, done = Writer(4), threading.Event()
    writer.resting = lambda: 1e6
    assert writer.submit(done.set)
    assert done.wait(SOON)
    assert writer.close(SOON)


def test_the_background_rests_until_the_first_token() -> None:
    activity = Activity()
    assert activity.quiet_seconds() == 0.0
    activity.touch()
    with activity:
        assert activity.quiet_seconds() > 0.0
        activity.first_token()
        assert activity.quiet_seconds() < 0.01  # a short answer may end by then
        deadline = time.monotonic() + SOON
        while activity.quiet_seconds() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert activity.quiet_seconds() == 0.0
