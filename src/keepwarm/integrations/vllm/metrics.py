"""Counts of moved KV in vLLM's own form, for its logs and its Prometheus page."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "loaded_tokens": "Tokens whose KV was loaded from Keepwarm's store",
    "loaded_exact_tokens": "Those of them whose KV has the bits that vLLM would compute",
    "loaded_prefix_tokens": "Those of them whose KV may differ from that in the last bits",
    "load_seconds": "Seconds that loads took, from their beginning to the last layer in place",
    "saved_tokens": "Tokens whose KV was handed to Keepwarm's store",
    "save_seconds": "Seconds that steps spent copying KV to be stored",
    "failed_pages": "Pages whose KV could not be loaded and was recomputed by vLLM",
}


class KeepwarmStats(KVConnectorStats):  # type: ignore[misc]  # vLLM has no types here
    """Counts of one interval; `data` holds numbers by name."""

    data: dict[str, float]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 4) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counters on vLLM's `/metrics`, as `vllm:keepwarm_<name>_total`."""

    def __init__(self, config: Any, kinds: Any, labels: list[str], values: dict[int, list[object]]) -> None:
        super().__init__(config, kinds, labels, values)
        self._counters = {}
        for name, text in COUNTERS.items():
            counter = self._counter_cls(name=f"vllm:keepwarm_{name}", documentation=text, labelnames=labels)
            self._counters[name] = {engine: counter.labels(*of) for engine, of in values.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, by_engine in self._counters.items():
            if value := transfer_stats_data.get(name):
                by_engine[engine_idx].inc(value)
