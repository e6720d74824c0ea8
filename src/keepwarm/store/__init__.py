"""The archive of KV blocks: RAM over disk over remote tiers."""

from __future__ import annotations

from keepwarm.store.archive import Archive

__all__ = ["Archive"]
