"""The scheduler's half of the connector: finds stored prefixes and plans loads and saves of pages. Moves no KV."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.v1.request import RequestStatus

from keepwarm.core.blocks import TokenIds, chain, token_ids
from keepwarm.core.identity import Namespace
from keepwarm.core.ports import BlockRef
from keepwarm.integrations.vllm.events import Ids, StoredEvents
from keepwarm.integrations.vllm.identity import request_keys
from keepwarm.integrations.vllm.messages import Load, Prefix, Save, Step
from keepwarm.integrations.vllm.variants import variant_of
from keepwarm.store.admin.purge_epochs import Began
from keepwarm.store.archive import Archive

log = logging.getLogger(__name__)

FINISHED_WELL = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
LOOKUP_SECONDS = 0.02  # time that the scheduler waits for a remote tier before it turns to other requests

CHUNK = 1024  # tokens of a prompt that are saved at least, on a device, before all of it is computed

_Found = tuple[tuple[BlockRef, ...], ...]  # by rank, all of one length


@dataclass
class _Tracked:
    """A request known to vLLM."""

    request: Any
    began: Began
    variant: str
    extra_keys: dict[int, bytes]
    named: bool = True  # whether its KV can be looked up and stored at all
    stored: int = 0  # leading tokens that the store is known to hold
    found: _Found = ()  # where they are
    looking: Future[_Found] | None = None
    computed: int = 0  # tokens that vLLM had computed when it last asked
    load: tuple[int, int] | None = None  # range of positions; set between allocation and the step that loads
    apart: bool = False  # True: no step waits for its load
    failed: bool = False  # whether a load failed
    saving: bool = False  # whether its pages may still be read by a save
    pages: list[int] = field(default_factory=list)
    since: int | None = None  # tokens scheduled since the last load into its pages; None: that load succeeded


class SchedulerHalf:
    """Lives in vLLM's scheduler. All methods are called from its thread."""

    def __init__(
        self,
        archive: Archive,
        namespaces: Sequence[Namespace],
        page_size: int,
        *,
        save_generated: bool,
        on_device: bool = False,
        publishes: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`namespaces` are all workers' shards. A prefix counts as stored when each of them has its part. With
        `publishes` there are events of what was stored; the store does not take what ends before `min_tokens`.

        With `on_device` no step waits for a load, prompts are saved while they are computed, and pages of requests that
        ended are held until workers have copied them.
        """
        self._archive = archive
        self._namespaces = namespaces
        self._page_size = page_size
        self._save_generated = save_generated
        self._on_device = on_device
        self._held: set[str] = set()
        self._tracked: dict[str, _Tracked] = {}
        self._last_saves: list[Save] = []
        self._apart: list[Load] = []
        self._asking = ThreadPoolExecutor(4, thread_name_prefix="keepwarm-vllm-lookup")
        self._min_tokens = min_tokens
        self._events = StoredEvents(self._ids, self._stored_pages, self._asking, page_size) if publishes else None

    def close(self) -> None:
        self._asking.shutdown(wait=False, cancel_futures=True)

    def rename(self, namespaces: Sequence[Namespace]) -> None:
        """Look up in these namespaces from now on."""
        self._namespaces = namespaces
        if self._events is not None:
            self._events.rename()

    # ---- what vLLM asks ----

    def arrived(self, request: Any) -> None:
        """Note a new request. If there are remote tiers, begin its lookup now."""
        tracked = self._track(request)
        if self._archive.remotes and tracked.named:
            self._begin_lookup(tracked)

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond the `computed` ones can be loaded: whole pages, never the prompt's last token;
        None while that is unknown. The second value is true if no step is to wait for the load, which then comes from a
        remote tier while others are answered. This is tried once, so that a failing load is not tried forever.
        """
        tracked = self._track(request)
        tracked.load, tracked.computed = None, computed
        if not tracked.named:
            return 0, False
        if tracked.looking is None:
            self._begin_lookup(tracked)
        assert tracked.looking is not None
        try:
            tracked.found = tracked.looking.result(LOOKUP_SECONDS)
        except FutureTimeout:
            return None, False
        except Exception as error:  # requests must not fail because of this
            log.warning("looking up %d tokens failed: %s", request.num_tokens, error)
            tracked.found = ((),) * len(self._namespaces)
        tracked.looking = None
        tracked.stored = len(tracked.found[0]) * self._page_size
        external = max(tracked.stored - computed, 0)
        if self._on_device:
            tracked.apart = True
            return (0, False) if tracked.failed else (external, external > 0)
        far = any(ref.tier in self._archive.remotes.names for ref in tracked.found[0][computed // self._page_size :])
        tracked.apart = far and not tracked.apart and len(self._tracked) > 1
        return external, external > 0 and tracked.apart

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external: int) -> None:
        """Note the pages that vLLM has for the request, in one table; `external` tokens are to be loaded into them."""
        if external <= 0:
            return
        tracked = self._track(request)
        tracked.load = tracked.computed, tracked.computed + external
        if tracked.apart:
            tracked.pages = list(tables[0])
            self._apart.append(self._load(tracked))

    def sources(self, request: Any, external: int) -> Counter[str]:
        """Return the number of tokens to load, by tier."""
        tracked = self._track(request)
        first = tracked.computed // self._page_size
        refs = tracked.found[0][first : first + external // self._page_size] if tracked.found else ()
        tokens: Counter[str] = Counter()
        for ref in refs:
            tokens[ref.tier] += ref.length
        return tokens

    def step(self, output: Any) -> Step:
        """Return this step's loads and saves."""
        step = Step(loads=self._apart, saves=self._last_saves, preempted=frozenset(output.preempted_req_ids or ()))
        for request_id in step.preempted:
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.saving = False  # workers see to it that what is written next waits for its saves
        self._last_saves, self._apart = [], []
        scheduled: list[tuple[_Tracked, int]] = []  # with the number of tokens computed before the step
        for new in output.scheduled_new_reqs:
            if (tracked := self._tracked.get(new.req_id)) is not None:
                tracked.pages = list(new.block_ids[0])
                scheduled.append((tracked, new.num_computed_tokens))
        cached = output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            if (tracked := self._tracked.get(request_id)) is None:
                continue
            pages = cached.new_block_ids[at]
            if request_id in cached.resumed_req_ids:
                tracked.pages = []
            if pages is not None:
                tracked.pages += pages[0]
            scheduled.append((tracked, cached.num_computed_tokens[at]))
        loads = [self._load(tracked) for tracked, _ in scheduled if tracked.load is not None]
        step.loads += loads
        arriving = {page for load in loads for page in load.prefix.pages[load.start // self._page_size :]}
        for tracked, computed in scheduled:
            count = output.num_scheduled_tokens[tracked.request.request_id]
            if self._is_sound(tracked, arriving, count):
                self._plan_save(step, tracked, computed + count)
        return step

    def finished(self, request: Any, tables: Sequence[Sequence[int]]) -> bool:
        """Note that the request ended. Return True if its pages must stay until KV is saved: that of its answer, or of
        a part of its prompt that was in doubt until now."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None or not tracked.named:
            return False
        if self._plan_last(tracked, tables):
            return self._hold(tracked)
        if tracked.saving:
            end = tracked.stored
            self._last_saves.append(Save(self._prefix(tracked, end), end, last=True))
            return self._hold(tracked)
        return False

    def _plan_last(self, tracked: _Tracked, tables: Sequence[Sequence[int]]) -> bool:
        """Plan the save of what a request that ended leaves. Return False if there is nothing."""
        request = tracked.request
        if request.status not in FINISHED_WELL:
            return False
        last = request.num_tokens - 1 if self._save_generated else request.num_prompt_tokens
        end, pages = self._whole(min(request.num_computed_tokens, last)), tables[0]
        if end <= tracked.stored or end > len(pages) * self._page_size:
            return False
        tracked.pages = list(pages)
        self._last_saves.append(Save(self._prefix(tracked, end), tracked.stored, last=True))
        self._note(tracked, end)
        return True

    def _hold(self, tracked: _Tracked) -> bool:
        if self._on_device:
            self._held.add(tracked.request.request_id)
        return True

    def released(self, request_ids: Iterable[str]) -> None:
        """Note that workers have copied the pages of these requests."""
        self._held.difference_update(request_ids)

    @property
    def is_holding(self) -> bool:
        """Whether vLLM must go on to make steps, so that held pages are given back."""
        return bool(self._held)

    def failed(self, pages: set[int]) -> None:
        """Note that loads into these pages failed: what vLLM computes there is stored again."""
        for tracked in self._tracked.values():
            if not pages.isdisjoint(tracked.pages):
                tracked.stored, tracked.failed = 0, True

    def take_events(self) -> list[BlockStored]:
        """Return what is known, since the last call, to be stored, as vLLM's own events."""
        return [] if self._events is None else self._events.take()

    # ---- our own ----

    def _track(self, request: Any) -> _Tracked:
        found = self._tracked.get(request.request_id)
        if found is None:
            keys = request_keys(request, self._page_size)
            began = self._archive.epochs.began(self._archive.epoch())
            found = _Tracked(request, began, *(keys or ("none", {})), named=keys is not None)
            self._tracked[request.request_id] = found
        return found

    def _whole(self, tokens: int) -> int:
        return tokens // self._page_size * self._page_size

    def _begin_lookup(self, tracked: _Tracked) -> None:
        reach = self._whole(tracked.request.num_tokens - 1)
        tokens = token_ids(tracked.request.all_token_ids[: max(reach, 0)])
        keys = {at: key for at, key in tracked.extra_keys.items() if at < reach}
        if self._archive.remotes:
            tracked.looking = self._asking.submit(self._look_up, tokens, keys, tracked.variant)
        else:
            tracked.looking = Future()
            tracked.looking.set_result(self._look_up(tokens, keys, tracked.variant))

    def _look_up(self, tokens: TokenIds, keys: dict[int, bytes], variant: str) -> _Found:
        """Return the longest prefix that every rank has. Called from several threads."""
        cuts = range(self._page_size, len(tokens) + 1, self._page_size)
        count = len(cuts)
        found: dict[bytes, tuple[BlockRef, ...]] = {}
        for namespace in {each.exact_root: each for each in self._namespaces}.values():
            blocks = chain(tokens, cuts, variant_of(namespace, variant), keys)
            found[namespace.exact_root] = refs = self._archive.lookup(blocks.exact[:count])
            count = len(refs)
        return tuple(found[namespace.exact_root][:count] for namespace in self._namespaces)

    def _ids(self, prefix: Prefix) -> Ids:
        """Return the names of a prefix's pages at every rank. Called from several threads."""
        cuts = range(self._page_size, len(prefix.tokens) + 1, self._page_size)
        spaces = {each.exact_root: each for each in self._namespaces}.values()
        chains = (chain(prefix.tokens, cuts, variant_of(space, prefix.variant), prefix.extra_keys) for space in spaces)
        return tuple(tuple(blocks.exact) for blocks in chains)

    def _stored_pages(self, ids: Ids) -> int:
        """Return how many leading pages every rank has. Called from several threads."""
        count = len(ids[0])
        for names in ids:
            count = len(self._archive.lookup(names[:count]))
        return count

    def _load(self, tracked: _Tracked) -> Load:
        assert tracked.load is not None
        (start, end), tracked.load = tracked.load, None
        first, last = start // self._page_size, end // self._page_size
        found = tuple(refs[first:last] for refs in tracked.found)
        return Load(self._prefix(tracked, end), start, found, apart=tracked.apart)

    def _is_sound(self, tracked: _Tracked, arriving: set[int], count: int) -> bool:
        """Whether the request's pages are known to be right after this step of `count` of its tokens. They are not
        before the loads into them (its own, and those of shared pages) are known to have succeeded: what is computed
        over a failed load must not be stored. That is known once vLLM has processed that step's output.
        """
        if arriving and not arriving.isdisjoint(tracked.pages):
            tracked.since = 0
        elif tracked.since is not None:
            if tracked.request.num_in_flight_tokens <= tracked.since:
                tracked.since = None
            else:
                tracked.since += count
        return tracked.since is None

    def _plan_save(self, step: Step, tracked: _Tracked, computed: int) -> None:
        """Plan a save if this step, which ends at `computed`, completes the prompt; on a device also if it computes
        enough of it, so that a prompt which is preempted later keeps that."""
        if not tracked.named:
            return
        prompt = self._whole(tracked.request.num_prompt_tokens)
        end = min(self._whole(computed), prompt) if self._on_device else prompt
        if computed >= end > tracked.stored and (end == prompt or end - tracked.stored >= CHUNK):
            tracked.saving = self._on_device
            step.saves.append(Save(self._prefix(tracked, end), tracked.stored))
            self._note(tracked, end)

    def _prefix(self, tracked: _Tracked, end: int) -> Prefix:
        return Prefix(
            tracked.request.request_id,
            token_ids(tracked.request.all_token_ids[:end]),
            tuple(tracked.pages[: end // self._page_size]),
            {at: key for at, key in tracked.extra_keys.items() if at < end},
            tracked.variant,
            tracked.began,
        )

    def _note(self, tracked: _Tracked, end: int) -> None:
        """Note that the pages up to `end` are handed to the store."""
        if self._events is not None and end >= self._min_tokens:
            self._events.handed_over(tracked.request, self._prefix(tracked, end), tracked.stored // self._page_size)
        tracked.stored = end
