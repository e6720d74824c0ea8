"""SGLang's pools of pages in host memory, each with its own pages in the store, and the lengths of a prompt's beginning
that a pool can restore."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer

from keepwarm.core.ports import Bytes
from keepwarm.integrations.hashed_pages import HashedPages

log = logging.getLogger(__name__)


class Pool:
    """One of SGLang's host pools over pages of the store. The pool's own methods move pages, whatever its layout is."""

    def __init__(self, host: Any, stored: HashedPages) -> None:
        self.host = host
        self.stored = stored

    def find(self, keys: Sequence[str]) -> list[bool]:
        """Return for each page whether it is stored."""
        return [ref is not None for ref in self.stored.find(named(keys))]

    def load(self, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        """Load pages into SGLang's own pages. A page is written only once it has arrived completely and is verified."""
        pages = [self.host.get_dummy_flat_data_page() for _ in keys]
        arrived = self.stored.load(named(keys), [page_bytes(page, self.stored.nbytes) for page in pages])
        for at, good in enumerate(arrived):
            if good:
                self.host.set_from_flat_data_page(int(indices[at * self.host.page_size]), pages[at])
        return arrived

    def store(self, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        """Queue pages for the store. They are copied before this returns."""
        pages = [self.host.get_data_page(int(indices[at * self.host.page_size])) for at in range(len(keys))]
        self.stored.store(named(keys), [page_bytes(page, self.stored.nbytes) for page in pages])
        return [True] * len(keys)

    def fits(self, keys: Sequence[str], indices: torch.Tensor | None) -> bool:
        """Whether the number of places in host memory fits the number of named pages."""
        count = 0 if indices is None else indices.numel()
        if count != len(keys) * self.host.page_size:
            log.warning("%d pages of %d places were named, with %d places", len(keys), self.host.page_size, count)
            return False
        return True


def restorable(found: Sequence[bool], transfer: PoolTransfer) -> set[int]:
    """Return the numbers of leading pages that this pool can restore; `found` tells which pages it stores. Raises
    ValueError for an unknown policy."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, leading(found) + 1))
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        trailing = max(1, len(transfer.keys or ()))
        return {end for end in range(1, len(found) + 1) if all(found[max(0, end - trailing) : end])}
    raise ValueError(f"pool {transfer.name}: the hit policy {transfer.hit_policy.value!r} is not known to Keepwarm")


def leading(found: Sequence[bool]) -> int:
    """Return how many leading pages are there."""
    return next((at for at, each in enumerate(found) if not each), len(found))


def named(keys: Sequence[str]) -> list[bytes]:
    """Return SGLang's hashes as bytes. They are usually hexadecimal, but any text is a valid name."""
    return [key.encode() for key in keys]


def page_bytes(page: torch.Tensor, nbytes: int) -> Bytes:
    """Return a page's memory. Raises ValueError if its size is not the registered one or it is not contiguous."""
    if page.numel() * page.element_size() != nbytes or not page.is_contiguous():
        raise ValueError(f"a page is {nbytes} bytes in one piece; got {page.numel() * page.element_size()} bytes")
    found: Bytes = page.view(-1).view(torch.uint8).cpu().numpy()
    return found
