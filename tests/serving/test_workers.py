"""Threads shared among tenants: none holds all, who had least goes first, and what nobody waits for is abandoned."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from keepwarm.core.deadline import Deadline, go_on
from keepwarm.core.shares import Shares
from keepwarm.errors import Overloaded, TookTooLong
from keepwarm.serving.protocols.errors import ApiError
from keepwarm.serving.workers import _AT_ONCE, Workers

LONG = 60.0


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers("test", threads=3, each=2, waiting=4)
    yield made
    made.close()


def test_one_tenant_cannot_hold_all_threads(workers: Workers) -> None:
    free, both = threading.Event(), threading.Barrier(3)

    def hold() -> bool:
        both.wait(LONG)
        return free.wait(LONG)

    held = [workers.submit("many", hold, LONG) for _ in range(2)]
    both.wait(LONG)
    held += [workers.submit("many", lambda: free.wait(LONG), LONG) for _ in range(4)]
    assert workers.submit("other", lambda: "answered", LONG).future.result(LONG) == "answered"
    with pytest.raises(Overloaded):
        workers.submit("many", lambda: None, LONG)
    free.set()
    assert all(work.future.result(LONG) for work in held)


def test_whoever_had_least_goes_first() -> None:
    workers = Workers("test", threads=1, each=1, waiting=100)
    free, order = threading.Event(), list[str]()
    first = workers.submit("many", lambda: free.wait(LONG), LONG)
    later = [workers.submit("many", lambda: order.append("many"), LONG) for _ in range(5)]
    other = workers.submit("other", lambda: order.append("other"), LONG)
    free.set()
    for work in (first, other, *later):
        work.future.result(LONG)
    assert order[0] == "other"
    workers.close()


def test_who_comes_back_brings_no_credit_and_owes_nothing_for_ever() -> None:
    shares = Shares()
    shares.active(["a"])
    shares.take("a", 100)
    shares.active(["a", "b"])
    assert shares.taken("b") == shares.taken("a")
    shares.take("a", 5)
    shares.take("b", 50)
    shares.active(["b"])
    shares.active(["a", "b"])
    assert shares.taken("a") == shares.taken("b") == 150
    shares.active([])
    assert shares.taken("c") == 150


def test_work_is_given_up_when_late_and_when_nobody_waits(workers: Workers) -> None:
    started = threading.Event()

    def endless() -> None:
        started.set()
        while True:
            go_on()

    with pytest.raises(TookTooLong, match="more than"):
        workers.submit("a", endless, 0.05).future.result(LONG)
    started.clear()

    async def leave() -> None:
        async def gone() -> None:
            await asyncio.to_thread(started.wait, LONG)

        with pytest.raises(ApiError, match="gone"):
            await workers.run("a", endless, LONG, gone)

    asyncio.run(leave())
    for _ in range(2):  # both threads of the tenant are free again
        assert workers.submit("a", lambda: 1, LONG).future.result(LONG) == 1


def test_work_is_given_up_when_who_waits_for_it_is_cancelled(workers: Workers) -> None:
    started, ended = threading.Event(), threading.Event()

    def endless() -> None:
        started.set()
        try:
            while True:
                go_on()
        finally:
            ended.set()

    async def leave() -> None:
        task = asyncio.ensure_future(workers.run("a", endless, LONG))
        await asyncio.to_thread(started.wait, LONG)
        await asyncio.sleep(2 * _AT_ONCE)  # so that it awaits the result itself
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert ended.wait(LONG / 2), "before its own deadline"


def test_closing_gives_up_what_runs_and_refuses_what_waits() -> None:
    workers = Workers("test", threads=1, each=1, waiting=9)
    started = threading.Event()

    def endless() -> None:
        started.set()
        while True:
            go_on()

    running = workers.submit("a", endless, LONG)
    waiting = workers.submit("b", lambda: None, LONG)
    assert started.wait(LONG)
    workers.close()
    with pytest.raises(TookTooLong):
        running.future.result(LONG)
    with pytest.raises(Overloaded, match="stopping"):
        waiting.future.result(LONG)
    with pytest.raises(Overloaded, match="stopping"):
        workers.submit("a", lambda: None, LONG)


def test_a_deadline_governs_only_what_runs_under_it() -> None:
    go_on()
    given_up = Deadline(LONG)
    given_up.give_up()
    with given_up.governing(), pytest.raises(TookTooLong):
        go_on()
    go_on()


@pytest.mark.slow
def test_beside_others_a_tenant_rests_as_long_as_it_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepwarm.serving.workers._LONGEST_REST", 10 * LONG)
    beside = {"many": False}
    workers = Workers("test", threads=2, each=1, waiting=9, beside=lambda owner: beside[owner])

    def long() -> float:
        time.sleep(0.2)
        return time.monotonic()

    def both() -> float:
        first, second = (workers.submit("many", long, LONG) for _ in range(2))
        return second.future.result(LONG) - first.future.result(LONG)

    assert both() < 0.4, "alone nobody rests"
    beside["many"] = True
    assert both() >= 0.4, "its rest, and its own time"
    workers.close()


def test_threads_work_where_their_priority_cannot_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr("os.setpriority", refuse)
    workers = Workers("test", threads=1, each=1, waiting=9, nice=10)
    assert workers.submit("a", lambda: 1, LONG).future.result(LONG) == 1
    workers.close()


def test_who_waits_is_told_when_the_time_is_over_though_the_work_does_not_hear_it(workers: Workers) -> None:
    free = threading.Event()

    async def waits() -> None:
        with pytest.raises(TookTooLong):
            await workers.run("a", lambda: free.wait(LONG), 0.1)

    asyncio.run(waits())
    free.set()


def test_who_waits_is_told_that_the_service_stops(workers: Workers) -> None:
    free = threading.Event()

    async def waits() -> None:
        task = asyncio.ensure_future(workers.run("a", lambda: free.wait(LONG), LONG))
        await asyncio.sleep(0)
        workers.wait_no_longer()
        with pytest.raises(Overloaded, match="stopping"):
            await asyncio.wait_for(task, LONG)

    asyncio.run(waits())
    free.set()


def test_whose_works_are_quick_does_not_wait_for_slow_ones() -> None:
    workers = Workers("test", threads=2, each=1, waiting=9, quick=1)
    free = threading.Event()
    workers.submit("slow", lambda: time.sleep(0.2), LONG).future.result(LONG)
    workers.submit("quick", lambda: None, LONG).future.result(LONG)
    holding = workers.submit("new", lambda: free.wait(LONG), LONG)
    waiting = workers.submit("slow", lambda: "slow", LONG)
    assert workers.submit("quick", lambda: "answered", LONG).future.result(LONG) == "answered"
    assert not waiting.future.done(), "the last thread is kept for quick ones"
    free.set()
    assert holding.future.result(LONG)
    assert waiting.future.result(LONG) == "slow"
    workers.close()


def test_a_slow_tenant_has_its_turn_among_many_quick_ones() -> None:
    workers = Workers("test", threads=2, each=2, waiting=10_000, quick=1)
    workers.submit("slow", lambda: time.sleep(0.2), LONG).future.result(LONG)
    done = threading.Event()

    def again(owner: str) -> None:
        time.sleep(0.001)
        if not done.is_set():
            workers.submit(owner, lambda: again(owner), LONG)

    for number in range(8):
        workers.submit(f"quick-{number}", lambda number=number: again(f"quick-{number}"), LONG)
    assert workers.submit("slow", lambda: "its turn", LONG).future.result(LONG) == "its turn"
    done.set()
    workers.close()
