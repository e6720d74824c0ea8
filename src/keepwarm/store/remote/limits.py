"""What a remote tier may cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What a remote tier may cost."""

    timeout: float = 0.5  # seconds that a lookup may take, and connecting
    load_timeout: float = 5.0  # seconds that one run's loading may take
    write_timeout: float = 30.0  # seconds that one run's writing may take; nobody waits for it but `close`
    cap: int | None = None  # bytes in the service, over all replicas
    ttl: float | None = None  # seconds without a use after which a run may go
