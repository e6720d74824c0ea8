"""What a worker counts, for vLLM's metrics (`metrics.py`)."""

from __future__ import annotations

from collections.abc import Mapping

from keepwarm.core.spans import Exactness


class TransferStats:
    """A worker's counts since the last `take`."""

    def __init__(self, label: Exactness) -> None:
        """`label` is that of all KV from the store."""
        self._label = label.label
        self._data: dict[str, float] = {}

    def loaded(self, by_tier: Mapping[str, int], seconds: float) -> None:
        self._add("loaded_tokens", sum(by_tier.values()))
        self._add(f"loaded_{self._label}_tokens", sum(by_tier.values()))
        self._add("load_seconds", seconds)
        for tier, tokens in by_tier.items():
            self._add(f"loaded_tokens_{tier}", tokens)

    def saved(self, tokens: int, seconds: float) -> None:
        self._add("saved_tokens", tokens)
        self._add("save_seconds", seconds)

    def failed(self, pages: int) -> None:
        self._add("failed_pages", pages)

    def take(self) -> dict[str, float]:
        data, self._data = self._data, {}
        return data

    def _add(self, name: str, value: float) -> None:
        self._data[name] = self._data.get(name, 0) + value
