"""vLLM's KV events of what is stored. Each is held back until all ranks' blocks can be found in the store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys

from keepwarm.integrations.vllm.messages import Prefix

log = logging.getLogger(__name__)

PAUSE = 0.05  # seconds between two looks into the store
PATIENCE = 60.0  # seconds after which what is not stored counts as dropped

Count = Callable[[Prefix], int]


@dataclass(frozen=True)
class _Held:
    """Pages that were handed to the store, and the event that says so: `first` pages of the prefix are not in it."""

    prefix: Prefix
    first: int
    event: dict[str, Any]  # the fields of vLLM's `BlockStored`
    until: float


class StoredEvents:
    """The events of one engine. Used by the scheduler's thread, which never waits for the store."""

    def __init__(self, count: Count, threads: Executor, page_size: int) -> None:
        """`count` returns how many leading pages of a prefix can be found. It is called in `threads`."""
        self._count = count
        self._threads = threads
        self._page_size = page_size
        self._held: list[_Held] = []
        self._looking: Future[list[int]] | None = None  # counts of the first ones that are held
        self._next = 0.0

    def handed_over(self, request: Any, prefix: Prefix, first: int) -> None:
        """Note that a prefix is being stored from its page `first` on. The request's KV must be named by vLLM, too."""
        last = len(prefix.tokens) // self._page_size
        hashes = [maybe_convert_block_hash(known) for known in request.block_hashes[:last]]
        if len(hashes) < last:
            return
        event = {
            "block_hashes": hashes[first:],
            "parent_block_hash": hashes[first - 1] if first else None,
            "token_ids": list(request.all_token_ids[first * self._page_size : last * self._page_size]),
            "block_size": self._page_size,
            "lora_id": None,
            "medium": "STORAGE",
            "lora_name": request.lora_request.lora_name if request.lora_request else None,
            "extra_keys": self._extra_keys(request, first, last),
            "group_idx": 0,
        }
        self._held.append(_Held(prefix, first, event, time.monotonic() + PATIENCE))

    def take(self) -> list[BlockStored]:
        """Return, once, the events of what can be found by now. Begin to look for the others."""
        ready: list[BlockStored] = []
        if self._looking is not None and self._looking.done():
            ready, self._looking = self._sorted(self._looking.result()), None
        if self._looking is None and self._held and time.monotonic() >= self._next:
            self._next = time.monotonic() + PAUSE
            self._looking = self._threads.submit(self._look, tuple(self._held))
        return ready

    def _look(self, held: Sequence[_Held]) -> list[int]:
        """Return how many pages of each can be found. Runs in another thread."""
        try:
            return [self._count(each.prefix) for each in held]
        except Exception as error:  # the next look may succeed
            log.warning("looking up what is stored, to publish it, failed: %s", error)
            return [0] * len(held)

    def _sorted(self, counts: Sequence[int]) -> list[BlockStored]:
        """Return the events of what was found whole, or is not waited for any longer, and keep the others."""
        ready, kept, now = [], [], time.monotonic()
        for held, count in zip(self._held, counts, strict=False):  # those that came since are not counted yet
            if count - held.first < len(held.event["block_hashes"]) and now < held.until:
                kept.append(held)
            elif count > held.first:
                ready.append(self._leading(held.event, count - held.first))
        self._held = kept + self._held[len(counts) :]
        return ready

    def _leading(self, event: dict[str, Any], count: int) -> BlockStored:
        """Return the event of its first `count` pages."""
        keys = event["extra_keys"]
        leading = {
            "block_hashes": event["block_hashes"][:count],
            "token_ids": event["token_ids"][: count * self._page_size],
            "extra_keys": None if keys is None else keys[:count],
        }
        return BlockStored(**event | leading)

    def _extra_keys(self, request: Any, first: int, last: int) -> Any:
        """Return what the names of these pages hold beside tokens, such as a salt, as in vLLM's own events. Routers
        need it to know whose prompt a page belongs to."""
        found, at = [], 0
        for page in range(first, last):
            keys, at = generate_block_hash_extra_keys(request, page * self._page_size, (page + 1) * self._page_size, at)
            found.append(keys)
        return to_event_extra_keys(found)
