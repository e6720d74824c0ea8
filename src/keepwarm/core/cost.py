"""Load or recompute: estimate the cost of both from measurements in this process.

Loading costs time per load and per byte, computing per token. Nothing is assumed: until both were measured, stored KV
is loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

_WEIGHT = 0.3  # of a new measurement in the moving mean
_LEAST_TOKENS = 64  # a shorter step shows its fixed cost, not its speed
_LEAST_BYTES = 1 << 18  # a smaller load shows its fixed cost, not its speed
_RETRY = 16  # after this many decisions against loading, loading is tried again: a slow disk may have recovered


class Costs:
    """Measured seconds per byte loaded and per small load, by tier, and per token computed, as moving means. Threads
    may share it."""

    def __init__(self, bytes_per_token: int) -> None:
        self._bytes_per_token = bytes_per_token
        self._load: dict[str, float] = {}  # seconds per byte, by tier
        self._fixed: dict[str, float] = {}  # seconds that a load takes, however small it is, by tier
        self._compute: float | None = None  # seconds per token
        self._refused = 0
        self._lock = threading.Lock()

    def copy(self) -> Costs:
        """Return an independent copy of the present state."""
        other = Costs(self._bytes_per_token)
        with self._lock:
            other._load, other._fixed = dict(self._load), dict(self._fixed)
            other._compute, other._refused = self._compute, self._refused
        return other

    def loaded(self, tier: str, tokens: int, seconds: float) -> None:
        """Note that the KV of `tokens` tokens was loaded from a tier in `seconds`, including verification."""
        size = tokens * self._bytes_per_token
        with self._lock:
            if size >= _LEAST_BYTES:
                self._load[tier] = _mean(self._load.get(tier), seconds / size)
                if tier in self._fixed:  # no load takes more by itself than all of this one took
                    self._fixed[tier] = min(self._fixed[tier], seconds)
            else:
                self._fixed[tier] = _mean(self._fixed.get(tier), seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """Note that `tokens` tokens were computed in `seconds`; nothing if waiting took all of them."""
        if tokens >= _LEAST_TOKENS and seconds > 0:
            with self._lock:
                self._compute = _mean(self._compute, seconds / tokens)

    def compute_ms(self, tokens: int) -> float | None:
        """Milliseconds to compute `tokens` tokens; None until computing was measured."""
        with self._lock:
            return None if self._compute is None else 1e3 * tokens * self._compute

    def estimate(self, tier: str, tokens: int) -> tuple[float, float] | None:
        """Seconds to load `tokens` tokens from a tier, and to compute them; None until both were measured."""
        with self._lock:
            if tier not in self._load or self._compute is None:
                return None
            return self._loading(tier, tokens), tokens * self._compute

    def _loading(self, tier: str, tokens: int) -> float:
        """Seconds to load `tokens` tokens; what was not measured counts as free."""
        return self._fixed.get(tier, 0.0) + tokens * self._bytes_per_token * self._load.get(tier, 0.0)

    def worth_loading(self, parts: Sequence[tuple[str, int]]) -> int:
        """Return how many leading parts of a prompt (tier, tokens) to load for the least cost, if the parts after them
        are computed. Loading from a tier without measurements counts as free."""
        with self._lock:
            if self._compute is None:
                return len(parts)
            costs = [sum(tokens for _, tokens in parts) * self._compute]
            for tier, tokens in parts:
                costs.append(costs[-1] + self._loading(tier, tokens) - tokens * self._compute)
            best = max(at for at, cost in enumerate(costs) if cost <= min(costs))
            if best < len(parts):
                self._refused += 1
                if self._refused % _RETRY == 0:
                    return len(parts)
            return best


def _mean(before: float | None, now: float) -> float:
    return now if before is None else (1 - _WEIGHT) * before + _WEIGHT * now
