"""Continuous batching over one engine."""

from keepwarm.batching.batcher import Batcher, BatchStats

__all__ = ["BatchStats", "Batcher"]
