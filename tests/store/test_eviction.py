"""Replacement policies: the contract, what tells each apart, and that the catalogue keeps the same order."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepwarm.core.ports import Policy
from keepwarm.store.catalog import ranking
from keepwarm.store.catalog.schema import open_catalogue
from keepwarm.store.eviction import LFU, LRU, S3FIFO, PolicyName, policy
from keepwarm.testing.contracts import PolicyContract

CAP = 100


class TestLRU(PolicyContract):
    def make(self) -> Policy:
        return LRU()


class TestLFU(PolicyContract):
    def make(self) -> Policy:
        return LFU()


class TestS3FIFO(PolicyContract):
    def make(self) -> Policy:
        return S3FIFO(CAP)


def drained(made: Policy) -> list[object]:
    return list(iter(made.evict, None))


def test_lru_gives_up_in_the_order_of_the_last_use() -> None:
    made = LRU()
    for key in "abcd":
        made.add(key, 1)
    made.touch("a")
    made.touch("c")
    assert drained(made) == ["b", "d", "a", "c"]


def test_lfu_gives_up_what_was_used_least() -> None:
    made = LFU()
    for key in "abc":
        made.add(key, 1)
    for key in "aab":
        made.touch(key)
    assert drained(made) == ["c", "b", "a"]


def test_lfu_lets_yesterdays_favourites_be_overtaken() -> None:
    made = LFU()
    made.add("favourite", 1)
    for _ in range(20):
        made.touch("favourite")
    for turn in range(30):  # everything else is new, and used a little
        made.add(turn, 1)
        made.touch(turn)
        if made.evict() == "favourite":
            return
    raise AssertionError("a key that is not used any more was never evicted")


def test_s3fifo_keeps_what_is_used_from_a_scan() -> None:
    made = S3FIFO(10)
    for key in "abcd":
        made.add(key, 1)
        made.touch(key)
        made.touch(key)
    held = set("abcd")
    for seen_once in range(100):
        while len(held) >= 10:
            held.discard(made.evict())  # type: ignore[arg-type]
        made.add(seen_once, 1)
        held.add(seen_once)  # type: ignore[arg-type]
    assert held >= set("abcd")


def test_s3fifo_remembers_what_it_gave_up_too_early() -> None:
    made = S3FIFO(4)
    for key in "abcd":
        made.add(key, 1, content=key)
    assert made.evict() == "a"
    made.add("a again", 1, content="a")
    for key in "efg":
        made.add(key, 1, content=key)
    assert drained(made)[-1] == "a again"


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="'lru', 'lfu' or 's3fifo'"):
        policy("fifo", 1)  # type: ignore[arg-type]


@contextmanager
def catalogue(folder: Path) -> Iterator[sqlite3.Connection]:
    connection, _ = open_catalogue(folder / "catalogue.sqlite")
    connection.execute("PRAGMA synchronous = OFF")
    try:
        yield connection
    finally:
        connection.close()


class Rows:
    """The catalogue as a policy: keys are runs of one block each, and held by an edge to a run that is never asked
    for."""

    def __init__(self, db: sqlite3.Connection, name: PolicyName) -> None:
        self.db = db
        self.name = name
        for table in ("runs", "blocks", "edges", "ghosts"):
            db.execute(f"DELETE FROM {table}")
        db.execute("UPDATE facts SET value = 0")

    def add(self, key: str, size: int, content: str) -> None:
        self.db.execute(
            "INSERT INTO runs (id, file, bytes, tokens, start, state, parent, owner, created, last_used, namespace) "
            "VALUES (?, '', ?, 1, 0, 'live', x'', '', 0, 0, '')",
            [key, size],
        )
        values = [content.encode() + b"/" + key.encode(), key]
        self.db.execute("INSERT INTO blocks VALUES (?, ?, 0, 0, 1, x'', x'', x'', x'', NULL)", values)
        self.db.execute("UPDATE blocks SET exact = ? WHERE run = ?", [content.encode(), key])
        ranking.enter(self.db, key, content.encode())

    def touch(self, key: str) -> None:
        ranking.use(self.db, {key: (0.0, 1)})

    def remove(self, key: str) -> None:
        self.db.execute("DELETE FROM runs WHERE id = ?", [key])

    def hold(self, key: str) -> None:
        self.db.execute("UPDATE runs SET children = children + 1 WHERE id = ?", [key])

    def release(self, key: str) -> None:
        self.db.execute("UPDATE runs SET children = children - 1 WHERE id = ?", [key])

    def evict(self) -> str | None:
        key = ranking.evict(self.db, self.name, CAP, "", 0.0)
        if key is not None:
            self.remove(key)
        return key


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from([
            "add",
            "add",
            "add",
            "touch",
            "touch",
            "touch",
            "hold",
            "release",
            "remove",
            "evict",
            "evict",
        ]),
        st.integers(0, 11),
        st.sampled_from([1, 5, 20]),
    ),
    max_size=60,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lru", "lfu", "s3fifo"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS)
def test_the_catalogue_gives_up_in_the_same_order(
    tmp_path_factory: pytest.TempPathFactory, name: PolicyName, operations: list[tuple[str, int, int]]
) -> None:
    with catalogue(tmp_path_factory.mktemp("rows")) as db:
        db.execute("BEGIN")
        rows, pure = Rows(db, name), policy(name, CAP)
        keys: dict[int, str] = {}  # content -> the run that holds it now
        held: list[str] = []
        for turn, (what, content, size) in enumerate(operations):
            if what == "evict":
                gone = rows.evict()
                assert pure.evict() == gone
                keys = {c: key for c, key in keys.items() if key != gone}
            elif what == "add":
                if content not in keys:
                    keys[content] = f"{content}.{turn}"
                    rows.add(keys[content], size, str(content))
                    pure.add(keys[content], size, str(content).encode())
            elif content in keys:
                key = keys[content]
                if what == "release":
                    if key not in held:
                        continue
                    held.remove(key)
                elif what == "hold":
                    held.append(key)
                elif what == "remove":
                    del keys[content]
                    held = [each for each in held if each != key]
                getattr(rows, what)(key)
                getattr(pure, what)(key)
        for key in held:
            rows.release(key)
            pure.release(key)
        while (gone := rows.evict()) is not None:
            assert pure.evict() == gone
        assert pure.evict() is None
        facts = dict(db.execute("SELECT name, value FROM facts").fetchall())
        assert [facts[each] for each in ("bytes", "main", "runs")] == [0, 0, 0]
        assert facts["ghosts"] == db.execute("SELECT count(*) FROM ghosts").fetchone()[0]
