"""Events of what is stored, by a clock that the test sets and looks that take no time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from keepwarm.core.blocks import token_ids
from keepwarm.integrations.vllm import events
from keepwarm.integrations.vllm.events import ATTEMPTS, LONGEST_PAUSE, PATIENCE, PAUSE, StoredEvents
from keepwarm.integrations.vllm.messages import Prefix
from keepwarm.store.admin.purge_epochs import Began

PAGE = 4
TOKENS = list(range(3 * PAGE))


class AtOnce(Executor):
    """Runs in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


class Store:
    """What can be found: so many leading pages, or an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pages: int | None = 0
        self.now = 0.0
        self.named = self.looks = 0
        self.events = StoredEvents(self._name, self._count, AtOnce(), PAGE)
        monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.events.handed_over(
            SimpleNamespace(
                block_hashes=[b"a" * 32, b"b" * 32, b"c" * 32],
                all_token_ids=TOKENS,
                lora_request=None,
                mm_features=[],
                cache_salt=None,
                prompt_embeds=None,
            ),
            Prefix("request", token_ids(TOKENS), (0, 1, 2), {}, "none", Began("a store", 0)),
            0,
        )

    def _name(self, prefix: Prefix) -> tuple[tuple[bytes, ...], ...]:
        self.named += 1
        return ((b"1", b"2", b"3"),)

    def _count(self, ids: tuple[tuple[bytes, ...], ...]) -> int:
        self.looks += 1
        if self.pages is None:
            raise OSError("the store is gone")
        return min(self.pages, len(ids[0]))

    def take(self, after: float) -> list[int]:
        """What a step publishes that comes so many seconds after the one before: the events' numbers of pages."""
        self.now += after
        return [len(event.block_hashes) for event in self.events.take()]


def test_an_idle_replica_loses_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step's look came too early. The next step is long after the patience ended: the store is asked again."""
    store = Store(monkeypatch)
    assert store.take(PAUSE) == []
    store.pages = 3
    assert store.take(10 * PATIENCE) == []
    assert store.take(PAUSE) == [3]


def test_a_look_that_fails_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(monkeypatch)
    store.pages = None
    assert [store.take(2 * PATIENCE) for _ in range(4)] == [[]] * 4
    store.pages = 3
    assert [store.take(2 * PATIENCE) for _ in range(3)] == [[], [3], []]


def test_a_store_that_is_broken_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(monkeypatch)
    store.pages = None
    assert not any(store.take(LONGEST_PAUSE) for _ in range(3 * ATTEMPTS))
    assert store.looks == ATTEMPTS
    assert store.events._held == []


def test_what_is_not_stored_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(monkeypatch)
    store.pages = 1
    taken = [store.take(LONGEST_PAUSE) for _ in range(2 * int(PATIENCE))]
    assert [each for each in taken if each] == [[1]]
    assert store.events._held == []


def test_looks_become_rare_and_name_pages_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(monkeypatch)
    for _ in range(int(PATIENCE / 2 / 0.01)):
        store.take(0.01)
    assert store.looks <= 6 + PATIENCE / 2 / LONGEST_PAUSE
    assert store.named == 1
    store.events.rename()
    store.take(LONGEST_PAUSE)
    assert store.named == 2
