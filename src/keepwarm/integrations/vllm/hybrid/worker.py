"""The worker's half for several groups of pages: each group's share is one load and one run of the store."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from keepwarm.core.blocks import Block
from keepwarm.core.identity import Namespace
from keepwarm.core.ports import BlockRef, KVSink
from keepwarm.core.spans import Exactness
from keepwarm.errors import CorruptRun, StoreStalled
from keepwarm.integrations.vllm.counts import TransferStats
from keepwarm.integrations.vllm.device_loading import DeviceLoading, Piece
from keepwarm.integrations.vllm.device_pages import DevicePages
from keepwarm.integrations.vllm.hybrid.finding import where
from keepwarm.integrations.vllm.hybrid.group_pages import GroupPages
from keepwarm.integrations.vllm.hybrid.groups import Group
from keepwarm.integrations.vllm.hybrid.messages import Part, PartsLoad, PartsStep
from keepwarm.integrations.vllm.hybrid.naming import blocks_of, group_namespace
from keepwarm.integrations.vllm.loading import Loading, Source
from keepwarm.integrations.vllm.messages import Prefix
from keepwarm.integrations.vllm.page_copies import Staged
from keepwarm.integrations.vllm.variants import variant_of
from keepwarm.runtime.native.reads import CachedReads, cached_reads
from keepwarm.store.archive import Archive

log = logging.getLogger(__name__)

_LOADERS = 8  # groups' loads at a time


@dataclass
class _Arriving:
    """One request's loads. They count only if all succeed."""

    count: int  # tokens
    loads: list[Loading | DeviceLoading] = field(default_factory=list)

    def is_over(self) -> bool:
        return all(loading.is_over() for loading in self.loads)


class PartsWorker:
    """Lives in one of vLLM's workers and holds its shard of the heads."""

    def __init__(
        self,
        archive: Archive,
        namespace: Namespace,
        rank: int,
        groups: Sequence[Group],
        *,
        timeout: float,
        keeps: bool,
        label: Exactness = Exactness.PREFIX,
    ) -> None:
        """`timeout` is in seconds. `keeps`: there is RAM or a disk to keep what comes from a remote tier. `label` is
        that of what is loaded."""
        self._archive = archive
        self._rank = rank
        self._groups = groups
        self._namespaces = [group_namespace(namespace, group) for group in groups]
        self._timeout = timeout
        self._keeps = keeps
        self._memory: list[GroupPages] = []
        self._native: list[CachedReads | None] = []
        self._loader = ThreadPoolExecutor(_LOADERS, thread_name_prefix="keepwarm-vllm")
        self._arriving: dict[str, _Arriving] = {}
        self._saved: set[str] = set()
        self.stats = TransferStats(label)

    def register(self, views: Mapping[str, torch.Tensor]) -> None:
        """Note vLLM's memory, by layer."""
        self._memory = [GroupPages(group, views) for group in self._groups]
        self._native = [cached_reads() if group.memory.can_place else None for group in self._memory]

    def close(self) -> None:
        for arriving in self._arriving.values():
            for loading in arriving.loads:
                loading.wanted = False
        self._loader.shutdown(wait=True, cancel_futures=True)
        for group in self._memory:
            if isinstance(group.memory, DevicePages):
                group.memory.drain()

    # ---- loading ----

    def start(self, step: PartsStep) -> None:
        """Begin loads. No step waits for them."""
        for load in step.loads:
            deadline = time.monotonic() + self._timeout
            arriving = self._arriving[load.prefix.request_id] = _Arriving(load.count)
            for part in load.parts:
                arriving.loads.append(self._begin(load, part, deadline))

    def _begin(self, load: PartsLoad, part: Part, deadline: float) -> Loading | DeviceLoading:
        group, pages = self._groups[part.group], self._memory[part.group]
        blocks = blocks_of(group, self._namespaces[part.group], load.prefix, part)
        positions = range(blocks[0].start, blocks[-1].end)
        if isinstance(pages.memory, DevicePages):
            began = pages.memory.port.current().record()
            there = DeviceLoading(pages.memory, pages.of(part.pages), positions, deadline, began)
            there.begin(self._loader.submit(self._load_whole, load.prefix, part, blocks, there))
            return there
        is_far = any(ref.tier in self._archive.remotes.names for ref in part.found[self._rank])
        native, straight = self._native[part.group], not (is_far and self._keeps)
        sink = Loading(pages.memory, pages.of(part.pages), positions, deadline, None, native, straight=straight)
        sink.begin(self._loader.submit(self._load, load.prefix, part, blocks, sink))
        return sink

    def _load_whole(
        self, prefix: Prefix, part: Part, blocks: Sequence[Block], loading: DeviceLoading
    ) -> dict[str, int]:
        (piece,) = loading.pieces(sys.maxsize)
        return self._load(prefix, part, blocks, piece)

    def _load(self, prefix: Prefix, part: Part, blocks: Sequence[Block], sink: Loading | Piece) -> dict[str, int]:
        """Load, and return tokens by tier. Runs in a loader's thread."""
        kept = False
        try:
            try:
                taken = self._take(part.found[self._rank], blocks, sink)
            except StoreStalled:
                kept = True  # a read may still write to the staging memory
                raise
            except CorruptRun:  # a run was merged with others, evicted or found damaged since the lookup
                found = where(self._archive, [block.exact for block in blocks])
                if len(found) < len(blocks):
                    raise
                sink.straight = not self._keeps  # it may come from a remote tier now
                taken = self._take([found[block.exact] for block in blocks], blocks, sink)
            sink.arrived()
            if self._keeps and not taken.keys().isdisjoint(self._archive.remotes.names):
                kept = True
                self._put(prefix, part, blocks, sink.staged)
            return taken
        finally:
            if not kept:
                sink.staged.release()

    def _take(self, refs: Sequence[BlockRef], blocks: Sequence[Block], sink: KVSink) -> dict[str, int]:
        tokens = np.concatenate([block.tokens for block in blocks])
        return self._archive.load(refs, tokens, blocks[-1].end, sink)

    def take_arrived(self) -> tuple[set[str], set[str]]:
        """Return, once, the requests whose loads ended, and those of them whose KV did not arrive."""
        ended = {request_id for request_id, arriving in self._arriving.items() if arriving.is_over()}
        return ended, {request_id for request_id in ended if not self._arrived(self._arriving.pop(request_id))}

    def _arrived(self, arriving: _Arriving) -> bool:
        tiers: list[str] = []
        why = ""
        for loading in arriving.loads:
            try:
                tiers += loading.result()
            except Exception as error:  # after any error vLLM computes the prompt itself
                why = str(error) or f"it took longer than load_timeout, {self._timeout} s"
        if why:
            log.warning("loading %d tokens failed, vLLM recomputes them: %s", arriving.count, why)
            self.stats.failed(sum(len(loading.pages) for loading in arriving.loads))
        else:
            seconds = max(loading.seconds for loading in arriving.loads)
            self.stats.loaded({max(tiers, key=tiers.count): arriving.count}, seconds)
        return not why

    # ---- saving ----

    def save(self, step: PartsStep) -> None:
        """Copy the pages to store, as vLLM may overwrite them from now on. The store takes the copies later."""
        for save in step.saves:
            started, copied = time.perf_counter(), 0
            for part in save.parts:
                try:
                    copied = max(copied, self._save(save.prefix, part))
                except Exception as error:  # requests must not fail because of this
                    log.warning("saving %d tokens failed: %s", part.end - part.start, error)
            self.stats.saved(copied, time.perf_counter() - started)
            if save.last:
                self._saved.add(save.prefix.request_id)

    def _save(self, prefix: Prefix, part: Part) -> int:
        blocks = blocks_of(self._groups[part.group], self._namespaces[part.group], prefix, part)
        pages = self._memory[part.group]
        staged = pages.memory.stage(blocks[-1].end - blocks[0].start)
        pages.memory.read(staged, pages.of(part.pages))  # on a device, the next step waits for the copies there
        self._put(prefix, part, blocks, staged)
        return part.end - part.start

    def _put(self, prefix: Prefix, part: Part, blocks: Sequence[Block], staged: Staged) -> None:
        """Hand one group's share to the store, unless its salt was purged since the request arrived."""
        self._archive.put(
            Source(staged, blocks[0].start),
            blocks,
            variant_of(self._namespaces[part.group], prefix.variant),
            on_copied=staged.release,
            epoch=self._archive.epochs.of(prefix.began),
        )

    def take_saved(self) -> set[str]:
        """Return, once, the ended requests whose answers are copied."""
        saved, self._saved = self._saved, set()
        return saved
