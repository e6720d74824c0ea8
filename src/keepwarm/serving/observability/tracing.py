"""Optional OpenTelemetry traces: one span per request, with what the cache did for it, and no prompt.

A caller's `traceparent` is continued. Without `tracing.enabled` nothing here is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from keepwarm.errors import ConfigError
from keepwarm.serving.settings import TracingSection

Tell = Callable[[Mapping[str, Any]], None]  # attributes of the span


@dataclass(frozen=True)
class Tracing:
    """Opens spans, and sends the remaining ones when it is closed."""

    span: Callable[[str, Mapping[str, str]], AbstractContextManager[Tell]]  # takes a name, and headers to continue
    close: Callable[[], None]


def tracing(section: TracingSection, exporter: Any = None) -> Tracing:
    """Return tracing as it is configured. `exporter` replaces OTLP. Raises ConfigError when packages are missing."""
    if not section.enabled:
        return Tracing(lambda name, headers: nullcontext(lambda attributes: None), lambda: None)
    try:
        from opentelemetry.propagate import extract
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=section.endpoint or None)
    except ImportError as error:
        raise ConfigError(f"tracing needs more packages ({error.name}): pip install 'keepwarm[otel]'") from None
    provider = TracerProvider(
        resource=Resource.create({"service.name": "keepwarm", "service.version": version("keepwarm")})
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    ours = provider.get_tracer("keepwarm.serving")

    @contextmanager
    def span(name: str, headers: Mapping[str, str]) -> Iterator[Tell]:
        with ours.start_as_current_span(name, context=extract(headers)) as opened:

            def told(attributes: Mapping[str, Any]) -> None:
                for key, value in attributes.items():
                    if isinstance(value, str | bool | int | float) and key not in ("tenant", "user"):
                        opened.set_attribute(f"keepwarm.{key}", value)

            yield told

    return Tracing(span, provider.shutdown)
