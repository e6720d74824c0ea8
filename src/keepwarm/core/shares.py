"""Fair shares: whose turn is next, and how much one owner may hold."""

from __future__ import annotations

from collections.abc import Iterable

_PER_FREE = 3  # one owner may hold at most this many times what is left free


class Shares:
    """What each owner took, in seconds, rows or another unit.

    An owner that comes back after a while has no credit: it starts level with the least served of the others. Not safe
    for use from several threads: the caller needs a lock.
    """

    def __init__(self) -> None:
        self._taken: dict[str, float] = {}
        self._least = 0.0  # what the least served active owner has; it never falls

    def taken(self, owner: str) -> float:
        return self._taken.get(owner, self._least)

    def take(self, owner: str, amount: float) -> None:
        """Note that an owner took something."""
        self._taken[owner] = self.taken(owner) + amount

    def active(self, owners: Iterable[str]) -> None:
        """Note the owners that want something now. Of the others, only those with more than their share are kept."""
        wanting = set(owners)
        known = [self._taken[owner] for owner in wanting if owner in self._taken]
        self._least = max(self._least, min(known, default=self._least))
        ahead = {owner: taken for owner, taken in self._taken.items() if taken > self._least}
        self._taken = dict.fromkeys(wanting, self._least) | ahead


def may_hold(owner: str, held: int, more: int, free: int) -> bool:
    """Whether an owner who holds `held` units may take `more`, when `free` units are free.

    An owner may hold more when more is free. So something is always left for new owners, and their number need not be
    known. An owner who holds nothing may always take what is free. Requests without an owner are not limited: they come
    from the process itself.
    """
    return not owner or not held or held + more <= _PER_FREE * (free - more)
