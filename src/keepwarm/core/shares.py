"""Whose turn it is: among those who want something, who has had least of it."""

from __future__ import annotations

from collections.abc import Iterable


class Shares:
    """What each owner took, in seconds or rows or whatever they share.

    Who comes back after a while brings no credit along: he stands where the least served of the others stands.
    Not safe for threads: whoever owns it has the lock.
    """

    def __init__(self) -> None:
        self._taken: dict[str, float] = {}
        self._least = 0.0  # what the least served of those who want something has; it never falls

    def taken(self, owner: str) -> float:
        return self._taken.get(owner, self._least)

    def take(self, owner: str, amount: float) -> None:
        """Note that an owner had something."""
        self._taken[owner] = self.taken(owner) + amount

    def active(self, owners: Iterable[str]) -> None:
        """These want something now. Of the others only who had more than his share is remembered."""
        wanting = set(owners)
        known = [self._taken[owner] for owner in wanting if owner in self._taken]
        self._least = max(self._least, min(known, default=self._least))
        ahead = {owner: taken for owner, taken in self._taken.items() if taken > self._least}
        self._taken = dict.fromkeys(wanting, self._least) | ahead
