"""The archive of KV blocks: RAM over disk."""

from __future__ import annotations

from keepwarm.store.archive import Archive

__all__ = ["Archive"]
