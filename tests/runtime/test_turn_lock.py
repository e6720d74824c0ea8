"""The lock of a model's steps: in order, preferred threads first, and nobody twice in a row while others wait."""

from __future__ import annotations

import threading
import time

import pytest

from keepwarm.runtime.lock import TurnLock

SECONDS = 60


def waiting(lock: TurnLock, count: int) -> None:
    until = time.monotonic() + SECONDS
    while len(lock._waiting) < count:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_it_is_handed_over_in_order_and_to_preferred_threads_first() -> None:
    lock, order = TurnLock(), list[str]()

    def take(name: str, preferred: bool) -> None:
        if preferred:
            lock.prefer()
        with lock, lock:
            order.append(name)
        lock.prefer_no_longer()

    threads = []
    with lock:
        for count, name in enumerate(("one", "two", "urgent", "three"), 1):
            threads.append(threading.Thread(target=take, args=(name, name == "urgent")))
            threads[-1].start()
            waiting(lock, count)
    for thread in threads:
        thread.join(SECONDS)
    assert order == ["urgent", "one", "two", "three"]


def test_whoever_asks_again_at_once_stands_behind_those_who_wait() -> None:
    lock, order = TurnLock(), list[str]()

    def other() -> None:
        with lock:
            order.append("other")

    thread = threading.Thread(target=other)
    with lock:
        thread.start()
        waiting(lock, 1)
    with lock:
        order.append("again")
    thread.join(SECONDS)
    assert order == ["other", "again"]
    with pytest.raises(RuntimeError, match="does not have"):
        lock.release()
