"""The scheduler's half for several groups of pages. Moves no KV."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

from keepwarm.core.blocks import token_ids
from keepwarm.core.identity import Namespace
from keepwarm.integrations.vllm.hybrid.finding import Finder, Found
from keepwarm.integrations.vllm.hybrid.groups import Group, unit_of
from keepwarm.integrations.vllm.hybrid.messages import Part, PartsLoad, PartsSave, PartsStep
from keepwarm.integrations.vllm.identity import request_keys
from keepwarm.integrations.vllm.messages import Prefix
from keepwarm.integrations.vllm.scheduler import FINISHED_WELL, LOOKUP_SECONDS
from keepwarm.store.admin.purge_epochs import Began
from keepwarm.store.archive import Archive

log = logging.getLogger(__name__)

NULL = 0  # vLLM's block in place of unneeded pages: all requests share it, so it is never written
_STRIDE = 256  # at least this many tokens of an answer lie between two stored states

_Tables = Sequence[Sequence[int]]  # vLLM's block ids, by group


@dataclass
class _Tracked:
    """A request known to vLLM."""

    request: Any
    began: Began
    variant: str
    extra_keys: dict[int, bytes]
    named: bool = True  # whether its KV can be looked up and stored at all
    found: Found = field(default_factory=Found)
    looking: Future[Found] | None = None
    computed: int = 0  # tokens that vLLM had computed when it last asked
    stored: int = 0  # leading tokens that the store is known to hold
    failed: bool = False  # True: a load failed, so none is tried again


class PartsScheduler:
    """Lives in vLLM's scheduler. All methods are called from its thread."""

    def __init__(
        self,
        archive: Archive,
        namespaces: Sequence[Namespace],
        groups: Sequence[Group],
        *,
        save_generated: bool,
        min_tokens: int = 0,
    ) -> None:
        """`namespaces` are all workers' shards. What ends before `min_tokens` is not stored; the archive cannot check
        this, as a state's own block is always short."""
        self._archive = archive
        self._min_tokens = min_tokens
        self._groups = groups
        self._unit = unit_of(groups)
        self._has_states = any(group.kind == "state" for group in groups)
        self._save_generated = save_generated
        self._finder = Finder(archive, namespaces, groups)
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[PartsLoad] = []
        self._last_saves: list[PartsSave] = []
        self._asking = ThreadPoolExecutor(4, thread_name_prefix="keepwarm-vllm-lookup")

    def rename(self, namespaces: Sequence[Namespace]) -> None:
        """Look up in these namespaces from now on."""
        self._finder = Finder(self._archive, namespaces, self._groups)

    def close(self) -> None:
        self._asking.shutdown(wait=False, cancel_futures=True)

    # ---- what vLLM asks ----

    def arrived(self, request: Any) -> None:
        """Note a new request. If there are remote tiers, begin its lookup now."""
        tracked = self._track(request)
        if self._archive.remotes and tracked.named:
            self._begin_lookup(tracked)

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond the `computed` ones can be loaded so that every group can continue after them;
        None while that is unknown. No step waits for the load: here vLLM handles failures only of such loads."""
        tracked = self._track(request)
        tracked.computed = computed
        if not tracked.named or tracked.failed:
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
            tracked.found = Found()
        tracked.looking = None
        tracked.stored = tracked.found.end
        external = max(tracked.found.end - computed, 0)
        return external, external > 0

    def allocated(self, request: Any, tables: _Tables, external: int) -> None:
        """Note the pages that vLLM has for the request; `external` tokens are to be loaded into them."""
        if external <= 0:
            return
        tracked = self._track(request)
        start, end = tracked.computed, tracked.computed + external
        if end != tracked.found.end:
            raise RuntimeError(f"vLLM asks for {end} tokens; what was found ends at {tracked.found.end}")
        parts = (self._to_load(tracked, group, tables[group.number], start, end) for group in self._groups)
        self._loads.append(PartsLoad(self._prefix(tracked, end), external, tuple(filter(None, parts))))

    def _to_load(self, tracked: _Tracked, group: Group, table: Sequence[int], start: int, end: int) -> Part | None:
        """Return the part of one group to load, without leading pages that vLLM does not need; None if it is empty."""
        first, last = max(group.begin(end), start) // group.page_size, end // group.page_size
        while first < last and table[first] == NULL:
            first += 1
        pages = tuple(table[first:last])
        if NULL in pages or (not pages and group.kind in ("full", "state")):
            raise RuntimeError(f"vLLM has no page for KV of group {group.number} ({group.kind}) that shall be loaded")
        begin = first * group.page_size
        return Part(group.number, begin, end, pages, tracked.found.of(group, begin, end)) if pages else None

    def sources(self, request: Any, external: int) -> Counter[str]:
        """Return the number of tokens to load, by the tier of the first group's pages, or of its state."""
        tracked, first = self._track(request), self._groups[0]
        tokens: Counter[str] = Counter()
        if external > 0:
            refs = tracked.found.of(first, tracked.computed, tracked.found.end)[0]
            for ref in refs:
                tokens[ref.tier] += external // len(refs)
        return tokens

    def step(self, output: Any) -> PartsStep:
        """Return this step's loads and saves."""
        step = PartsStep(loads=self._loads, saves=self._last_saves)
        self._loads, self._last_saves = [], []
        blocks = output.kv_connector_block_state
        for request_id, computed in _scheduled(output):
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.named:
                parts, end = self._to_save(tracked, computed, blocks)
                if parts:
                    step.saves.append(PartsSave(self._prefix(tracked, end), parts))
                    tracked.stored = end
        return step

    def finished(self, request: Any, tables: _Tables) -> bool:
        """Note that the request ended. Return True if its pages must stay until the KV of its answer is saved. If there
        are states, KV after the last stored state would be useless and is not saved."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None or not tracked.named or request.status not in FINISHED_WELL or self._has_states:
            return False
        last = request.num_tokens - 1 if self._save_generated else request.num_prompt_tokens
        end = self._whole(min(request.num_computed_tokens, last))
        parts = self._new_pages(tracked.stored, end, tables) if end >= self._min_tokens else ()
        if parts:
            self._last_saves.append(PartsSave(self._prefix(tracked, end), parts, last=True))
        return bool(parts)

    def load_failed(self, request_ids: set[str]) -> None:
        """Note failed loads: their tokens are computed and stored again."""
        for request_id in request_ids:
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.failed, tracked.stored = True, 0

    # ---- our own ----

    def _track(self, request: Any) -> _Tracked:
        found = self._tracked.get(request.request_id)
        if found is None:
            keys = request_keys(request, self._unit)
            began = self._archive.epochs.began(self._archive.epoch())
            found = _Tracked(request, began, *(keys or ("none", {})), named=keys is not None)
            self._tracked[request.request_id] = found
        return found

    def _whole(self, tokens: int) -> int:
        return tokens // self._unit * self._unit

    def _begin_lookup(self, tracked: _Tracked) -> None:
        reach = max(self._whole(tracked.request.num_tokens - 1), 0)
        tokens = token_ids(tracked.request.all_token_ids[:reach])
        if self._archive.remotes:
            tracked.looking = self._asking.submit(self._finder.find, tokens, tracked.extra_keys, tracked.variant)
        else:
            tracked.looking = Future()
            tracked.looking.set_result(self._finder.find(tokens, tracked.extra_keys, tracked.variant))

    def _to_save(self, tracked: _Tracked, computed: int, blocks: Any) -> tuple[tuple[Part, ...], int]:
        """Return the new parts of a request once `computed` of its tokens are computed, and where they end. `blocks` is
        vLLM's `KVConnectorBlockState`: the tables, and states offered at boundaries, whose bytes stay until this step
        ends."""
        request = tracked.request
        answering = computed > request.num_prompt_tokens
        if answering and not (self._save_generated and self._has_states):
            return (), 0
        known = min(computed, request.num_tokens)  # with asynchronous scheduling the last ids may not be known yet
        states: tuple[Part, ...] = ()
        end = self._whole(known)
        if self._has_states:
            least = tracked.stored + (_STRIDE if answering else 1)
            states = self._offered(blocks.boundary_state_offloads.get(request.request_id, ()), least, known)
            end = max((part.end for part in states), default=0)
        if end <= tracked.stored or end < self._min_tokens:
            return (), 0
        return (*self._new_pages(tracked.stored, end, blocks.get_block_ids(request.request_id)), *states), end

    def _offered(self, offers: Sequence[tuple[int, int, int]], least: int, most: int) -> tuple[Part, ...]:
        """Return the states at ends of units, from `least` to `most`, where vLLM offers those of every group. An offer
        is `(group, block id, tokens)`."""
        pages = {(number, end): page for number, page, end in offers if least <= end <= most and not end % self._unit}
        groups = [group for group in self._groups if group.kind == "state"]
        ends = sorted({end for _, end in pages})
        return tuple(
            Part(group.number, group.begin(end), end, (pages[group.number, end],))
            for end in ends
            if all((group.number, end) in pages for group in groups)
            for group in groups
        )

    def _new_pages(self, start: int, end: int, tables: _Tables) -> tuple[Part, ...]:
        """Return, for every group except states, the last pages of `[start, end)`, as far back as vLLM has them."""
        parts = []
        for group in self._groups:
            first, last = start // group.page_size, end // group.page_size
            pages = tuple(tables[group.number][first:last]) if group.kind != "state" else ()
            gone = max((at + 1 for at, page in enumerate(pages) if page == NULL), default=0)
            if pages[gone:]:
                begin = start + gone * group.page_size
                parts.append(Part(group.number, begin, end, pages[gone:]))
        return tuple(parts)

    def _prefix(self, tracked: _Tracked, end: int) -> Prefix:
        return Prefix(
            tracked.request.request_id,
            token_ids(tracked.request.all_token_ids[:end]),
            (),
            {at: key for at, key in tracked.extra_keys.items() if at < end},
            tracked.variant,
            tracked.began,
        )


def _scheduled(output: Any) -> Iterator[tuple[str, int]]:
    """Yield the requests of a step, each with the number of tokens computed after it."""
    cached = output.scheduled_cached_reqs
    before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for request_id, count in output.num_scheduled_tokens.items():
        yield request_id, before[request_id] + count
