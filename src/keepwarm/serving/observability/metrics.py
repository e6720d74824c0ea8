"""What the service counts, for Prometheus: tokens by where they came from, never a precomputed rate.

No label holds a tenant, a key or a client's text. The registry is the service's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Protocol as Interface

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from keepwarm.batching import Batcher, BatchStats
from keepwarm.core.results import EngineStats
from keepwarm.engine import Engine
from keepwarm.serving.answers import Answer
from keepwarm.serving.observability.shadow import Compared
from keepwarm.serving.protocols import misses
from keepwarm.serving.protocols.errors import ApiError, Protocol
from keepwarm.serving.rewrite import Applied

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2, 4, 8, 16, 32)
_GAPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)


class Running(Interface):
    """What the metrics need from a service when they are read."""

    @property
    def ready(self) -> bool: ...

    def parts(self) -> AbstractContextManager[tuple[Engine, Batcher] | None]: ...


class Metrics:
    """Counters and histograms of one service."""

    def __init__(self, service: Running) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "keepwarm_requests", "Answers by protocol and outcome", ["protocol", "outcome"], registry=registry
        )
        self.refusals = Counter(
            "keepwarm_refusals", "Requests refused before they ran", ["protocol", "kind"], registry=registry
        )
        self.queries = Counter(
            "keepwarm_prefix_cache_queries", "Prompt tokens looked up in the cache", registry=registry
        )
        self.hits = Counter(
            "keepwarm_prefix_cache_hits", "Prompt tokens whose KV was reused", ["tier"], registry=registry
        )
        self.reused = Counter(
            "keepwarm_reused_tokens",
            "Prompt tokens whose KV was reused, by the answer's label",
            ["exactness"],
            registry=registry,
        )
        self.computed = Counter("keepwarm_computed_tokens", "Prompt tokens that were computed", registry=registry)
        self.misses = Counter(
            "keepwarm_prefix_cache_misses", "Prompts whose reuse ended, by cause", ["cause"], registry=registry
        )
        self.missed = Counter(
            "keepwarm_prefix_cache_missed_tokens",
            "Prompt tokens from where reuse ended, by cause",
            ["cause"],
            registry=registry,
        )
        self.billing_headers = Counter(
            "keepwarm_billing_headers", "Requests whose x-anthropic-billing-header was left out", registry=registry
        )
        self.rewrites = Counter(
            "keepwarm_rewrites", "Texts that a rule of the operator's changed", ["rule", "where"], registry=registry
        )
        self.slow_rewrites = Counter(
            "keepwarm_slow_rewrites", "Requests for which a rule took too long", ["rule"], registry=registry
        )
        self.generated = Counter("keepwarm_generated_tokens", "Tokens of answers", registry=registry)
        self.drafted = Counter("keepwarm_drafted_tokens", "Tokens computed as drafts of answers", registry=registry)
        self.accepted = Counter("keepwarm_accepted_tokens", "Drafted tokens that answers got", registry=registry)
        self.ttft = Histogram(
            "keepwarm_time_to_first_token_seconds",
            "From the request's compilation to its first token",
            ["reuse"],
            buckets=_TTFT,
            registry=registry,
        )
        self.gaps = Histogram(
            "keepwarm_inter_token_seconds", "Between two tokens of one answer", buckets=_GAPS, registry=registry
        )
        self.queue = Histogram(
            "keepwarm_queue_seconds", "Waiting for a place in the batch", buckets=_TTFT, registry=registry
        )
        self.shadow_runs = Counter(
            "keepwarm_shadow_runs",
            "Answers computed again cold, by label and what was found",
            ["exactness", "outcome"],
            registry=registry,
        )
        self.shadow_tokens = Counter(
            "keepwarm_shadow_tokens", "Tokens of answers computed again cold", ["exactness"], registry=registry
        )
        self.shadow_diverged = Counter(
            "keepwarm_shadow_diverged_tokens",
            "Of those, from the first that the cold run did not give",
            ["exactness"],
            registry=registry,
        )
        registry.register(_Now(service))

    def exposition(self) -> bytes:
        """Return the text that Prometheus reads. This may wait for the store's catalogue."""
        return generate_latest(self.registry)

    def refused(self, protocol: Protocol, error: ApiError | None) -> None:
        self.refusals.labels(protocol.value, error.kind if error else "disconnected").inc()

    def rewritten(self, applied: Sequence[Applied]) -> None:
        """Count what the operator's rules did to a request."""
        for one in applied:
            if one.count:
                self.rewrites.labels(one.rule, one.where).inc(one.count)
            else:
                self.slow_rewrites.labels(one.rule).inc()

    def answered(self, protocol: Protocol, answer: Answer, error: BaseException | None) -> None:
        """Count an answer that has ended."""
        outcome = "done" if error is None else "cancelled" if isinstance(error, CancelledError) else "failed"
        self.requests.labels(protocol.value, outcome).inc()
        for before, after in pairwise(answer.times):
            self.gaps.observe(after - before)
        result = answer.result
        if result is None:
            return
        self.queries.inc(result.prompt_tokens)
        for tier, tokens in result.cached_by_tier.items():
            self.hits.labels(tier).inc(tokens)
        self.reused.labels(result.exactness).inc(result.cached_tokens)
        self.computed.inc(result.prompt_tokens - result.cached_tokens)
        self.generated.inc(len(result.token_ids))
        self.drafted.inc(result.drafted_tokens)
        self.accepted.inc(result.accepted_tokens)
        cause = misses.reason(result)
        if cause != "none":
            self.misses.labels(cause).inc()
            self.missed.labels(cause).inc(result.prompt_tokens - result.cached_tokens)
        reuse = "none" if not result.cached_tokens else "whole" if cause == "none" else "part"
        self.ttft.labels(reuse).observe(result.ttft_ms / 1e3)
        self.queue.observe(result.timings.get("queue", 0.0) / 1e3)

    def compared(self, found: Compared) -> None:
        """Count an answer that was computed again cold. Called in the shadow's thread."""
        self.shadow_runs.labels(found.exactness, found.outcome).inc()
        self.shadow_tokens.labels(found.exactness).inc(found.tokens)
        self.shadow_diverged.labels(found.exactness).inc(found.diverged)


class _Now(Collector):
    """Metrics that are read when they are asked for."""

    def __init__(self, service: Running) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("keepwarm_ready", "Whether requests are answered")
        ready.add_metric([], float(self._service.ready))
        yield ready
        with self._service.parts() as parts:
            if parts is None:
                return
            stats, batch = parts[0].stats(), parts[1].stats()
        yield from _of(stats, batch)


def _of(stats: EngineStats, batch: BatchStats) -> Iterator[Metric]:
    """Metrics of an engine and its batch."""
    for name, help_, by_tier in (
        ("keepwarm_store_bytes", "Bytes of KV stored", stats.bytes),
        ("keepwarm_store_blocks", "Blocks of KV stored", stats.blocks),
        ("keepwarm_store_snapshots", "Snapshots of recurrent state among the blocks", stats.snapshots),
        ("keepwarm_store_snapshot_bytes", "Bytes of these snapshots", stats.snapshot_bytes),
    ):
        gauge = GaugeMetricFamily(name, help_, labels=["tier"])
        for tier, value in by_tier.items():
            gauge.add_metric([tier], value)
        yield gauge
    evictions = CounterMetricFamily("keepwarm_store_evictions", "Runs evicted", labels=["tier"])
    for tier, value in stats.evictions.items():
        evictions.add_metric([tier], value)
    yield evictions
    events = CounterMetricFamily("keepwarm_store_events", "Faults and decisions of the store", labels=["event"])
    counted = {"corrupt": stats.corrupt, "dropped_writes": stats.dropped_writes, "store_errors": stats.store_errors}
    numbers = {name: value for name, value in stats.extra.items() if isinstance(value, int | float)}
    for name, number in (counted | numbers).items():
        events.add_metric([name], number)
    yield events
    depth = GaugeMetricFamily("keepwarm_queue_depth", "Requests in the batch", labels=["state"])
    for state, value in (("waiting", batch.waiting), ("prefilling", batch.prefilling), ("running", batch.running)):
        depth.add_metric([state], value)
    yield depth
    pages = GaugeMetricFamily("keepwarm_kv_pages", "Pages of the batch's KV memory", labels=["state"])
    for state in ("free", "cached", "referenced", "reserved"):
        pages.add_metric([state], getattr(batch.pages, state))
    yield pages
