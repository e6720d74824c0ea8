"""A pool of page numbers: which sequences use which page, which content may be shared, what is evicted first. No
tensors.

Every page is in exactly one of three states, so `free + cached + referenced == capacity` always holds:

* *referenced*: sequences use it. A single user may write into it; a named page, or one with several users, never
  changes.
* *cached*: no sequence uses it, but its named content is kept and can be found by that name.
* *free*: it holds nothing of value.

Free pages are taken first, then cached ones, the least recently used first; never pages in use. A reservation sets
pages aside without choosing them: reserved pages can always be allocated.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from keepwarm.errors import Overloaded


@dataclass(frozen=True)
class PageCounts:
    """Numbers of pages by state. `reserved` of the free and cached ones are promised."""

    capacity: int
    free: int
    cached: int
    referenced: int
    reserved: int

    @property
    def available(self) -> int:
        """Pages that may still be taken or reserved."""
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
        """Use the existing pages with the names `keys`. Reserve one page for each missing name, and `count` more.

        Return the page of each key, None for a missing one. When there is no room, return None and change nothing.
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
        """Give back reserved pages that are not needed."""
        with self._lock:
            if count > self._reserved:
                raise ValueError(f"{count} pages given back of {self._reserved} reserved")
            self._reserved -= count

    def allocate(self, count: int, *, reserved: bool = False) -> list[int]:
        """Take `count` pages with one user each, from the `reserved` or from the available ones.

        When there are too few, take nothing and raise Overloaded with the numbers.
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
        """Use one reservation for `key`. Return the page of that name and True, or a new page to fill and False."""
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
        """Add one user to each of `pages`, which are in use."""
        with self._lock:
            self._check_used(pages)
            for page in pages:
                self._users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove one user from each of `pages`. A page without users becomes cached if it has a name, otherwise free.

        The first pages are evicted last: a later page is useless without the ones before it.
        """
        with self._lock:
            self._check_used(pages)
            for page in reversed(pages):
                self._users[page] -= 1
                if not self._users[page]:
                    self._rest(page)

    def name(self, page: int, key: bytes) -> bool:
        """Name the final content of a page in use. Return False when the name is taken, or the page has one."""
        with self._lock:
            self._check_used([page])
            if key in self._page_of or page in self._key_of:
                return False
            self._page_of[key], self._key_of[page] = page, key
            return True

    def is_writable(self, page: int) -> bool:
        """Whether the page has a single user, which may change it."""
        with self._lock:
            return self._users[page] == 1 and page not in self._key_of

    def users(self, page: int) -> int:
        with self._lock:
            return self._users[page]

    def find(self, key: bytes) -> int | None:
        """Return the page with that name, used or not. Changes nothing."""
        with self._lock:
            return self._page_of.get(key)

    def forget(self, key: bytes) -> bool:
        """Remove a name, so that its page is not found any more; users of the page keep it. Return False when there is
        no such name."""
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
        """Remove all names. Return how many there were."""
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
