"""Counters of an engine: requests, and their tokens by the origin of their KV."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence


class Counts:
    """Counters since an engine was made. Threads may share it."""

    def __init__(self, tiers: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._requests = self._prompt_tokens = 0
        self._by_tier = dict.fromkeys(tiers, 0)

    def add(self, length: int, by_tier: Mapping[str, int]) -> dict[str, int]:
        """Note a prompt of `length` tokens and where its KV came from. Return these numbers by the counters' names."""
        with self._lock:
            self._requests += 1
            self._prompt_tokens += length
            for tier, tokens in by_tier.items():
                self._by_tier[tier] += tokens
        return _named(1, length, by_tier)

    @property
    def by_tier(self) -> dict[str, int]:
        """Cached tokens by tier."""
        with self._lock:
            return dict(self._by_tier)

    def named(self) -> dict[str, int]:
        """All counters by name: `requests`, `prompt_tokens`, `cached_tokens`, and `cached_tokens` by tier."""
        with self._lock:
            return _named(self._requests, self._prompt_tokens, self._by_tier)


def _named(requests: int, prompt_tokens: int, by_tier: Mapping[str, int]) -> dict[str, int]:
    return {
        "requests": requests,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(by_tier.values()),
        **{f"cached_tokens_{tier}": tokens for tier, tokens in by_tier.items()},
    }
