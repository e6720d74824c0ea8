"""The scheduler's half: which prefix the store holds, and which pages shall be loaded and saved. Moves no KV."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import RequestStatus

from keepwarm.core.blocks import chain, token_ids
from keepwarm.core.identity import Namespace
from keepwarm.integrations.vllm.identity import request_keys, variant_of
from keepwarm.integrations.vllm.messages import Load, Prefix, Save, Step
from keepwarm.store.archive import Archive

log = logging.getLogger("keepwarm.vllm")

_FINISHED_WELL = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass
class _Tracked:
    """A request that vLLM knows."""

    request: Any
    variant: str
    extra_keys: dict[int, bytes]
    stored: int = 0  # leading tokens that the store holds, as far as is known
    load_from: int | None = None  # set between allocation and the step that loads
    pages: list[int] = field(default_factory=list)


class SchedulerHalf:
    """Lives in vLLM's scheduler. All methods are called from its thread."""

    def __init__(
        self, archive: Archive, namespaces: Sequence[Namespace], page_size: int, *, save_generated: bool
    ) -> None:
        """`namespaces` are all workers' shards: a prefix is stored when every one of them has its part."""
        self._archive = archive
        self._namespaces = namespaces
        self._page_size = page_size
        self._save_generated = save_generated
        self._tracked: dict[str, _Tracked] = {}
        self._last_saves: list[Save] = []
        self._events: list[BlockStored] = []

    # ---- what vLLM asks ----

    def matched(self, request: Any, computed: int) -> int:
        """Tokens beyond the `computed` ones that can be loaded: whole pages, and never the prompt's last token."""
        tracked = self._track(request)
        reach = self._whole(request.num_tokens - 1)
        tracked.stored = self._look_up(tracked, reach) if reach > 0 else 0
        tracked.load_from = None
        return max(tracked.stored - computed, 0)

    def allocated(self, request: Any, external: int) -> None:
        """vLLM has pages for the request; `external` tokens shall be loaded into them."""
        if external > 0:
            tracked = self._track(request)
            tracked.load_from = tracked.stored - external

    def step(self, output: Any) -> Step:
        """This step's loads and saves."""
        step = Step(saves=self._last_saves)
        self._last_saves = []
        for new in output.scheduled_new_reqs:
            if (tracked := self._tracked.get(new.req_id)) is not None:
                tracked.pages = list(new.block_ids[0])
                self._plan(step, tracked, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id])
        cached = output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            if (tracked := self._tracked.get(request_id)) is None:
                continue
            pages = cached.new_block_ids[at]
            if request_id in cached.resumed_req_ids:
                tracked.pages = []
            if pages is not None:
                tracked.pages += pages[0]
            self._plan(step, tracked, cached.num_computed_tokens[at] + output.num_scheduled_tokens[request_id])
        return step

    def finished(self, request: Any, pages: Sequence[int]) -> bool:
        """The request ended. True: its pages must stay until its answer's KV is saved."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None or not self._save_generated or request.status not in _FINISHED_WELL:
            return False
        end = self._whole(min(request.num_computed_tokens, request.num_tokens - 1))
        if end <= tracked.stored or end > len(pages) * self._page_size:
            return False
        tracked.pages = list(pages)
        self._last_saves.append(Save(self._prefix(tracked, end), tracked.stored, last=True))
        self._note(tracked, end)
        return True

    def take_events(self) -> list[BlockStored]:
        """What was handed to the store since the last call, as vLLM's own events."""
        events, self._events = self._events, []
        return events

    # ---- our own ----

    def _track(self, request: Any) -> _Tracked:
        found = self._tracked.get(request.request_id)
        if found is None:
            variant, keys = request_keys(request, self._page_size)
            found = self._tracked[request.request_id] = _Tracked(request, variant, keys)
        return found

    def _whole(self, tokens: int) -> int:
        return tokens // self._page_size * self._page_size

    def _look_up(self, tracked: _Tracked, reach: int) -> int:
        tokens = token_ids(tracked.request.all_token_ids[:reach])
        cuts = range(self._page_size, reach + 1, self._page_size)
        keys = {at: key for at, key in tracked.extra_keys.items() if at < reach}
        count = len(cuts)
        for namespace in self._namespaces:
            blocks = chain(tokens, cuts, variant_of(namespace, tracked.variant), keys)
            count = min(count, len(self._archive.lookup([block.exact for block in blocks[:count]])))
        return count * self._page_size

    def _plan(self, step: Step, tracked: _Tracked, computed: int) -> None:
        """A load when one was allocated for; a save once the whole prompt is computed, with the step to `computed`."""
        if tracked.load_from is not None:
            step.loads.append(Load(self._prefix(tracked, tracked.stored), tracked.load_from))
            tracked.load_from = None
        end = self._whole(tracked.request.num_prompt_tokens)
        if computed >= end > tracked.stored:
            step.saves.append(Save(self._prefix(tracked, end), tracked.stored))
            self._note(tracked, end)

    def _prefix(self, tracked: _Tracked, end: int) -> Prefix:
        return Prefix(
            tracked.request.request_id,
            token_ids(tracked.request.all_token_ids[:end]),
            tuple(tracked.pages[: end // self._page_size]),
            {at: key for at, key in tracked.extra_keys.items() if at < end},
            tracked.variant,
        )

    def _note(self, tracked: _Tracked, end: int) -> None:
        """Take the pages up to `end` for stored, and publish it."""
        request, first, last = tracked.request, tracked.stored // self._page_size, end // self._page_size
        hashes = [maybe_convert_block_hash(known) for known in request.block_hashes[:last]]
        if len(hashes) == last:
            lora = request.lora_request.lora_name if request.lora_request else None
            self._events.append(
                BlockStored(
                    block_hashes=hashes[first:],
                    parent_block_hash=hashes[first - 1] if first else None,
                    token_ids=list(request.all_token_ids[first * self._page_size : end]),
                    block_size=self._page_size,
                    lora_id=None,
                    medium="STORAGE",
                    lora_name=lora,
                )
            )
        tracked.stored = end
