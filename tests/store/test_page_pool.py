"""The page pool: nothing leaks, nothing in use is evicted or written by two, whatever is asked in whatever order."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keepwarm.errors import Overloaded
from keepwarm.store.page_pool import PagePool

PAGE = 4  # tokens
KEYS = [bytes([number]) for number in range(6)]


def test_a_released_page_keeps_its_name_until_it_is_taken() -> None:
    pool = PagePool(2)
    page, other = pool.allocate(2)
    assert pool.name(page, b"a")
    pool.release([page])
    pool.release([other])
    assert pool.reserve(0, [b"a", b"b"]) == [page, None]
    pool.release([page])
    pool.unreserve(1)
    assert pool.allocate(1) == [other], "free pages go first"
    assert pool.find(b"a") == page
    assert pool.allocate(1) == [page]
    assert pool.find(b"a") is None


def test_the_least_recently_used_is_given_up_first_and_the_first_pages_of_a_release_last() -> None:
    pool = PagePool(4)
    one, two = pool.allocate(2), pool.allocate(2)
    for number, page in enumerate([*one, *two]):
        pool.name(page, KEYS[number])
    pool.release(one)
    pool.release(two)
    assert pool.reserve(0, KEYS[:1]) == one[:1]
    pool.release(one[:1])
    assert [pool.allocate(1)[0] for _ in range(4)] == [one[1], two[1], two[0], one[0]]


def test_all_or_nothing() -> None:
    pool = PagePool(4)
    pool.allocate(3)
    with pytest.raises(Overloaded, match=r"2 pages wanted, 1 of 4 are available"):
        pool.allocate(2)
    assert pool.reserve(2) is None
    assert pool.reserve(1) == []
    with pytest.raises(Overloaded, match="1 pages wanted, 0 of 4"):
        pool.allocate(1)
    assert len(pool.allocate(1, reserved=True)) == 1
    counts = pool.counts
    assert (counts.free, counts.cached, counts.referenced, counts.reserved, counts.available) == (0, 0, 4, 0, 0)


def test_reserving_counts_the_cached_pages_it_takes_into_use() -> None:
    pool = PagePool(3)
    pages = pool.allocate(2)
    for page, key in zip(pages, KEYS, strict=False):
        pool.name(page, key)
    pool.release(pages)
    assert pool.reserve(2, KEYS[:2]) is None
    assert pool.counts.cached == 2
    assert pool.reserve(1, KEYS[:2]) == pages
    assert pool.counts.available == 0


def test_claim_finds_what_was_named_since() -> None:
    pool = PagePool(3)
    assert pool.reserve(0, [b"a"]) == [None]
    assert pool.reserve(0, [b"a"]) == [None]
    page, found = pool.claim(b"a")
    assert not found
    assert pool.name(page, b"a")
    assert pool.claim(b"a") == (page, True)
    assert pool.users(page) == 2
    assert pool.counts.available == 2


def test_a_forgotten_page_stays_with_its_user() -> None:
    pool = PagePool(2)
    page, cached = pool.allocate(2)
    pool.name(page, b"a")
    pool.name(cached, b"b")
    pool.release([cached])
    assert pool.forget(b"a")
    assert not pool.forget(b"a")
    assert pool.forget_all() == 1
    assert (pool.counts.free, pool.counts.cached, pool.counts.referenced) == (1, 0, 1)
    pool.release([page])
    assert pool.counts.free == 2


def test_misuse_is_refused() -> None:
    pool = PagePool(2)
    page = pool.allocate(1)[0]
    for pages in ([1 - page], [page, 1 - page], [page, page]):
        with pytest.raises(ValueError, match="nobody|twice"):
            pool.release(pages)
    with pytest.raises(ValueError, match="reserved"):
        pool.unreserve(1)
    assert pool.counts.referenced == 1


@dataclass
class Sequence:
    """A model of a request: pages, the numbers its writes have left in them, and pages reserved."""

    pages: list[int] = field(default_factory=list)
    wrote: list[int] = field(default_factory=list)  # per page, the stamp it expects there
    reserved: int = 0


class Pool(RuleBasedStateMachine):
    """Requests that join, grow, fork, write, cancel and fail; memory is a dictionary of what was written last."""

    @initialize(capacity=st.integers(1, 12))
    def start(self, capacity: int) -> None:
        self.pool = PagePool(capacity)
        self.memory: dict[int, int] = {}
        self.named: dict[bytes, int] = {}  # the stamp that content of this name has
        self.sequences: list[Sequence] = []
        self.stamp = 0

    def put(self, page: int) -> int:
        self.stamp += 1
        self.memory[page] = self.stamp
        return self.stamp

    @rule(count=st.integers(0, 5), keys=st.lists(st.sampled_from(KEYS), unique=True, max_size=4))
    def join(self, count: int, keys: list[bytes]) -> None:
        before = self.pool.counts
        found = self.pool.reserve(count, keys)
        if found is None:
            assert self.pool.counts == before
            return
        taken = Sequence(reserved=count)
        for key, page in zip(keys, found, strict=True):
            there = page is not None
            if page is None:
                page, there = self.pool.claim(key)
            if not there:
                self.put(page)
                if self.pool.name(page, key):
                    self.named[key] = self.memory[page]
            taken.pages.append(page)
            taken.wrote.append(self.named[key] if there else self.memory[page])
        self.sequences.append(taken)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), reserved=st.booleans(), count=st.integers(1, 4))
    def grow(self, data: st.DataObject, reserved: bool, count: int) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        before = self.pool.counts
        try:
            pages = self.pool.allocate(count, reserved=reserved and sequence.reserved >= count)
        except Overloaded:
            assert count > before.available
            assert self.pool.counts == before
            return
        sequence.reserved -= count if reserved and sequence.reserved >= count else 0
        sequence.pages += pages
        sequence.wrote += [self.put(page) for page in pages]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.pool.share(sequence.pages)
        self.sequences.append(Sequence(list(sequence.pages), list(sequence.wrote)))

    @precondition(lambda self: any(s.pages for s in self.sequences))
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """Into a page of one's own in place, into any other as a copy."""
        sequence = data.draw(st.sampled_from([s for s in self.sequences if s.pages]))
        place = data.draw(st.integers(0, len(sequence.pages) - 1))
        page = sequence.pages[place]
        if not self.pool.is_writable(page):
            try:
                (copy,) = self.pool.allocate(1)
            except Overloaded:
                return
            self.pool.release([page])
            sequence.pages[place] = page = copy
        sequence.wrote[place] = self.put(page)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        sequence = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.unreserve(sequence.reserved)
        self.pool.release(sequence.pages)

    @rule(key=st.sampled_from(KEYS))
    def forget(self, key: bytes) -> None:
        there = self.pool.find(key) is not None
        assert self.pool.forget(key) == there
        assert self.pool.find(key) is None

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        assert self.pool.counts.cached == 0

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        counts = self.pool.counts
        assert counts.free + counts.cached + counts.referenced == counts.capacity
        assert counts.reserved == sum(s.reserved for s in self.sequences)
        assert counts.available >= 0
        users: dict[int, int] = {}
        for sequence in self.sequences:
            assert len(set(sequence.pages)) == len(sequence.pages)
            for page in sequence.pages:
                users[page] = users.get(page, 0) + 1
        assert counts.referenced == len(users)
        assert all(self.pool.users(page) == users.get(page, 0) for page in range(counts.capacity))

    @invariant()
    def nobody_sees_what_another_wrote(self) -> None:
        for sequence in self.sequences:
            assert [self.memory[page] for page in sequence.pages] == sequence.wrote

    @invariant()
    def a_name_leads_to_its_content(self) -> None:
        for key in KEYS:
            page = self.pool.find(key)
            if page is not None:
                assert self.memory[page] == self.named[key]

    def teardown(self) -> None:
        for sequence in getattr(self, "sequences", ()):
            self.pool.unreserve(sequence.reserved)
            self.pool.release(sequence.pages)
            assert all(stamp for stamp in sequence.wrote)
        if hasattr(self, "pool"):
            assert self.pool.counts.referenced == self.pool.counts.reserved == 0


Pool.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_random_use = Pool.TestCase
