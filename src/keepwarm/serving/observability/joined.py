"""Metrics of a service with several models: those of each model under its name, and which of them are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from keepwarm.serving.observability.metrics import Metrics

_WHOLE = "keepwarm_ready"  # of the service, not of a model


def exposition(each: Mapping[str, Metrics], described: Sequence[Mapping[str, Any]], counts: Mapping[str, int]) -> bytes:
    """Return the text that Prometheus reads, for models by name. One model alone has no label `model`.

    `described` tells the models' states, and `counts` how many were loaded, given up, or failed to load.
    """
    if len(each) == 1:
        return next(iter(each.values())).exposition()
    return generate_latest(_Joined([*_joined(each), *_models(described, counts)]))


class _Joined:
    """All that `generate_latest` needs of a registry."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _joined(each: Mapping[str, Metrics]) -> Iterable[Metric]:
    families: dict[str, Metric] = {}
    for model, metrics in each.items():
        for found in metrics.registry.collect():
            if found.name == _WHOLE:
                families.setdefault(found.name, found)
                continue
            family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
            family.samples += [one._replace(labels={"model": model, **one.labels}) for one in found.samples]
    return families.values()


def _models(described: Sequence[Mapping[str, Any]], counts: Mapping[str, int]) -> Iterator[Metric]:
    loaded = GaugeMetricFamily("keepwarm_model_loaded", "Whether a model is loaded", labels=["model"])
    nbytes = GaugeMetricFamily("keepwarm_model_bytes", "Bytes of a loaded model's weights", labels=["model"])
    for one in described:
        is_loaded = one["state"] == "loaded"
        loaded.add_metric([one["name"]], float(is_loaded))
        nbytes.add_metric([one["name"]], one["bytes"] if is_loaded else 0)
    yield loaded
    yield nbytes
    events = CounterMetricFamily("keepwarm_model_events", "Models loaded, given up, failed", labels=["event"])
    for event in ("loaded", "given_up", "failed"):
        events.add_metric([event], counts.get(event, 0))
    yield events
