"""Keepwarm computes a language model's KV state once and reuses it, without changing the answer.

Importing this package loads no torch: the engine does, when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keepwarm.config import EngineConfig
from keepwarm.core.results import EngineStats, Explanation, Generation, Piece, WarmReport
from keepwarm.errors import KeepwarmError

if TYPE_CHECKING:
    from keepwarm.batching import AsyncEngine, Batcher
    from keepwarm.engine import Engine
    from keepwarm.integrations.transformers import attach

__version__ = "0.1.0"

__all__ = [
    "AsyncEngine",
    "Batcher",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Explanation",
    "Generation",
    "KeepwarmError",
    "Piece",
    "WarmReport",
    "__version__",
    "attach",
]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from keepwarm.engine import Engine

        return Engine
    if name in ("AsyncEngine", "Batcher"):
        from keepwarm import batching

        return getattr(batching, name)
    if name == "attach":
        from keepwarm.integrations.transformers import attach

        return attach
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
