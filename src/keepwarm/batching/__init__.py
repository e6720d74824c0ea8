"""Continuous batching over one engine, for threads and for an event loop."""

from keepwarm.batching.async_engine import AsyncEngine
from keepwarm.batching.batcher import Batcher, BatchStats

__all__ = ["AsyncEngine", "BatchStats", "Batcher"]
