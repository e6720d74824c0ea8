"""A pool of page numbers: who uses which page, which content may be shared, what is evicted first. No tensors.

Every page is in exactly one of three states, so that `free + cached + referenced == capacity` always:

* *referenced*: sequences use it. One alone may write into it; a named page, and one with several users, never changes.
* *cached*: nobody uses it, but its named content is still there for whoever asks for that name.
* *free*: nothing of worth in it.

Pages are taken from the free ones first, then from the cached ones, least recently used first; never from those in use.
A reservation sets pages aside without choosing them: what was reserved can always be allocated.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from keepwarm.errors import Overloaded


@dataclass(frozen=True)
class PageCounts:
    """Where the pages of a pool are; `reserved` of the free and cached ones are promised."""

    capacity: int
    free: int
    cached: int
    referenced: int
    reserved: int

    @property
    def available(self) -> int:
        """Pages that anyone may still take or reserve."""
        return self.free + self.cached - self.reserved


class PagePool:
    """Bookkeeping of `capacity` pages. Every call is O(1) per page and all-or-nothing; threads may share it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))  # the next one last
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._users = [0] * capacity
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._reserved = 0
        self._lock = threading.Lock()

    @property
    def counts(self) -> PageCounts:
        with self._lock:
            free, cached = len(self._free), len(self._cached)
            return PageCounts(self.capacity, free, cached, self.capacity - free - cached, self._reserved)

    def reserve(self, count: int, keys: Sequence[bytes] = ()) -> list[int | None] | None:
        """Use the pages named `keys` that are there, and set aside `count` more and one for each key that is not.

        Returns the page of each key, None for a missing one; or None, having done nothing, when there is no room.
        """
        with self._lock:
            found = [self._page_of.get(key) for key in keys]
            there = [page for page in found if page is not None]
            wanted = count + len(found) - len(there)
            if wanted + sum(not self._users[page] for page in there) > self._available():
                return None
            for page in there:
                self._use(page)
            self._reserved += wanted
            return found

    def unreserve(self, count: int) -> None:
        """Give back what was set aside and is not needed."""
        with self._lock:
            if count > self._reserved:
                raise ValueError(f"{count} pages given back of {self._reserved} reserved")
            self._reserved -= count

    def allocate(self, count: int, *, reserved: bool = False) -> list[int]:
        """`count` pages with one user each, out of what was `reserved` or of what is available.

        Raises Overloaded with the numbers, and takes nothing, when there are not as many.
        """
        with self._lock:
            if reserved and count > self._reserved:
                raise Overloaded(f"{count} pages wanted out of {self._reserved} reserved")
            if not reserved and count > self._available():
                raise Overloaded(
                    f"{count} pages wanted, {self._available()} of {self.capacity} are available: wait until requests "
                    "end, or raise max_pages"
                )
            if reserved:
                self._reserved -= count
            return [self._take() for _ in range(count)]

    def claim(self, key: bytes) -> tuple[int, bool]:
        """Spend one reserved page on `key`: the page of that name (True), or a new one for the caller to fill."""
        with self._lock:
            if not self._reserved:
                raise Overloaded("a page wanted out of 0 reserved")
            self._reserved -= 1
            page = self._page_of.get(key)
            if page is not None:
                self._use(page)
                return page, True
            return self._take(), False

    def share(self, pages: Sequence[int]) -> None:
        """One more user for each of `pages`, which are in use."""
        with self._lock:
            self._check_used(pages)
            for page in pages:
                self._users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One user less for each of `pages`. What nobody uses is kept under its name, or free without one.

        The first pages are evicted last: a later page is of no use without the ones before it.
        """
        with self._lock:
            self._check_used(pages)
            for page in reversed(pages):
                self._users[page] -= 1
                if not self._users[page]:
                    self._rest(page)

    def name(self, page: int, key: bytes) -> bool:
        """Name the final content of a page in use; False when another page has that name, or this one has one."""
        with self._lock:
            self._check_used([page])
            if key in self._page_of or page in self._key_of:
                return False
            self._page_of[key], self._key_of[page] = page, key
            return True

    def is_writable(self, page: int) -> bool:
        """Whether its one user may change it."""
        with self._lock:
            return self._users[page] == 1 and page not in self._key_of

    def users(self, page: int) -> int:
        with self._lock:
            return self._users[page]

    def find(self, key: bytes) -> int | None:
        """The page with that name, used or not; changes nothing."""
        with self._lock:
            return self._page_of.get(key)

    def forget(self, key: bytes) -> bool:
        """Take a name away, so that nobody finds it any more; who uses the page keeps it. False: no such name."""
        with self._lock:
            page = self._page_of.pop(key, None)
            if page is None:
                return False
            del self._key_of[page]
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)
            return True

    def forget_all(self) -> int:
        """Take all names away; returns how many there were."""
        with self._lock:
            count = len(self._page_of)
            self._page_of.clear()
            self._key_of.clear()
            self._free += self._cached
            self._cached.clear()
            return count

    def _available(self) -> int:
        return len(self._free) + len(self._cached) - self._reserved

    def _use(self, page: int) -> None:
        if not self._users[page]:
            del self._cached[page]
        self._users[page] += 1

    def _rest(self, page: int) -> None:
        if page in self._key_of:
            self._cached[page] = None
        else:
            self._free.append(page)

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
        self._users[page] = 1
        return page

    def _check_used(self, pages: Sequence[int]) -> None:
        if len(set(pages)) < len(pages):
            raise ValueError(f"pages named twice in {list(pages)}")
        for page in pages:
            if not self._users[page]:
                raise ValueError(f"page {page} is used by nobody")
