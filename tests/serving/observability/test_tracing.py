"""Traces, when they are wanted: a span per request that continues the caller's, without prompts."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

pytest.importorskip("fastapi", reason="the service's packages are not installed")
from keepwarm.errors import ConfigError
from keepwarm.serving.observability.tracing import tracing
from keepwarm.serving.settings import TracingSection


def test_a_span_continues_the_callers_trace() -> None:
    exporter = InMemorySpanExporter()
    found = tracing(TracingSection(enabled=True), exporter)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with found.span("POST /query", {"traceparent": parent}) as told:
        told({"status": 200, "cached_tokens": 12, "tenant": "acme", "nothing": None})
    found.close()
    (span,) = exporter.get_finished_spans()
    assert span.name == "POST /query"
    assert f"{span.context.trace_id:032x}" == parent.split("-")[1]
    assert dict(span.attributes) == {"keepwarm.status": 200, "keepwarm.cached_tokens": 12}


def test_it_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with tracing(TracingSection()).span("GET /", {}) as told:
        told({"status": 200})
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.propagate", None)
    with pytest.raises(ConfigError, match=r"keepwarm\[otel\]"):
        tracing(TracingSection(enabled=True))
