"""The limits of a remote tier."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """How much time and space a remote tier may use."""

    timeout: float = 0.5  # seconds that a lookup may take, and connecting
    load_timeout: float = 5.0  # seconds that loading one run may take
    write_timeout: float = 30.0  # seconds that writing one run may take; only `close` waits for it
    cap: int | None = None  # bytes in the service, over all replicas
    ttl: float | None = None  # seconds without a use after which a run may be removed
