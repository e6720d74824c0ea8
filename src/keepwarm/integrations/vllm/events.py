"""vLLM's KV events of what is stored. Each is held back until all ranks' blocks can be found in the store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys

from keepwarm.integrations.vllm.messages import Prefix

log = logging.getLogger(__name__)

PAUSE = 0.05  # seconds before the first look into the store; each one after it waits twice as long
LONGEST_PAUSE = 2.0
PATIENCE = 60.0  # seconds after which what is not stored counts as dropped
ATTEMPTS = 30  # looks in a row that may fail before an event is given up

Ids = tuple[tuple[bytes, ...], ...]  # names of a prefix's pages, by rank
Name = Callable[[Prefix], Ids]
Count = Callable[[Ids], int]


@dataclass(eq=False)
class _Held:
    """Pages that were handed to the store, and the event that says so: `first` pages of the prefix are not in it."""

    prefix: Prefix
    first: int
    event: dict[str, Any]  # the fields of vLLM's `BlockStored`
    until: float  # what a look that begins from then on does not find is not waited for
    due: float  # time of the next look
    pause: float
    ids: Ids | None = None  # made by the first look
    failed: int = 0  # looks in a row that failed

    def postpone(self, begun: float) -> None:
        self.due = begun + self.pause
        self.pause = min(2 * self.pause, LONGEST_PAUSE)


@dataclass(frozen=True)
class _Look:
    """One look into the store: how many pages of each can be found, None where it failed."""

    begun: float
    held: tuple[_Held, ...]
    counts: Future[list[int | None]]


class StoredEvents:
    """The events of one engine. Used by the scheduler's thread, which never waits for the store."""

    def __init__(self, name: Name, count: Count, threads: Executor, page_size: int) -> None:
        """`name` returns the names of a prefix's pages, and `count` how many leading ones can be found. Both are called
        in `threads`."""
        self._name = name
        self._count = count
        self._threads = threads
        self._page_size = page_size
        self._held: list[_Held] = []
        self._look: _Look | None = None

    def rename(self) -> None:
        """Name pages anew, as other names are looked up from now on."""
        self._held = [replace(held, ids=None) for held in self._held]
        self._look = None

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
        now = time.monotonic()
        self._held.append(_Held(prefix, first, event, now + PATIENCE, now + PAUSE, 2 * PAUSE))

    def take(self) -> list[BlockStored]:
        """Return, once, the events of what can be found by now. Begin to look for others, of which it is time."""
        ready: list[BlockStored] = []
        if self._look is not None and self._look.counts.done():
            ready, self._look = self._sorted(self._look), None
        if self._look is None:
            now = time.monotonic()
            if due := tuple(held for held in self._held if held.due <= now):
                self._look = _Look(now, due, self._threads.submit(self._count_each, due))
        return ready

    def _count_each(self, held: Sequence[_Held]) -> list[int | None]:
        """Return how many pages of each can be found. Runs in another thread."""
        return [self._counted(each) for each in held]

    def _counted(self, held: _Held) -> int | None:
        try:
            if held.ids is None:
                held.ids = self._name(held.prefix)
            return self._count(held.ids)
        except Exception as error:  # the next look may succeed
            log.warning("looking up what is stored, to publish it, failed: %s", error)
            return None

    def _sorted(self, look: _Look) -> list[BlockStored]:
        """Return the events of what was found whole, or is not waited for any longer, and keep the others."""
        ready, over = [], set()
        for held, count in zip(look.held, look.counts.result(), strict=True):
            held.failed = held.failed + 1 if count is None else 0
            if self._is_over(held, count, look.begun):
                over.add(held)
                if count is not None and count > held.first:
                    ready.append(self._leading(held.event, count - held.first))
            else:
                held.postpone(look.begun)
        self._held = [held for held in self._held if held not in over]
        return ready

    def _is_over(self, held: _Held, count: int | None, begun: float) -> bool:
        """Whether all is known of these pages. `begun`: on an idle replica a look may be older than the step that sees
        it, and says nothing of the time between."""
        if count is None:
            return held.failed >= ATTEMPTS
        return count - held.first >= len(held.event["block_hashes"]) or begun >= held.until

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
