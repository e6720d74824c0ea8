"""Keepwarm's store as a secondary tier of vLLM's own offloading (`OffloadingConnector`, tiered).

    "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "KeepwarmTier",
        "module_path": "keepwarm.integrations.vllm.tiering", "store": "/var/lib/keepwarm"}]}

vLLM names chunks by hashes of its own and hands over their bytes alone: a chunk is stored as one block under a name
made of the model's weights, the layout and that hash, and is verified like any other when it is read.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, ClassVar

import numpy as np
import vllm
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadKey, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from keepwarm.config import cache_dir
from keepwarm.core.blocks import Block, content_id, token_ids
from keepwarm.core.geometry import KVGeometry, LayerGeometry
from keepwarm.core.identity import ArithmeticIdentity, ModelIdentity, Namespace, canonical_json, digest
from keepwarm.core.ports import Bytes
from keepwarm.core.reads import Arriving
from keepwarm.integrations.settings import StoreSettings
from keepwarm.integrations.vllm.identity import weights_folder
from keepwarm.runtime.identity import files_digest
from keepwarm.store.archive import Archive

log = logging.getLogger("keepwarm.vllm")

_THREADS = 2


class KeepwarmTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM has no types here
    """Chunks on disk, verified and capped, for every instance that shares the folder."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        """Opens the store; `settings` are those of `StoreSettings`. Raises ConfigError for settings that do not fit,
        and StoreError for the folder."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._memory = np.frombuffer(primary_kv_view, np.uint8).reshape(-1, self.block_size_bytes)
        half = self.block_size_bytes // 2
        self._geometry = KVGeometry((LayerGeometry(1, half, self.block_size_bytes - half),), "float8_e4m3fn")
        self._namespace = _namespace(offloading_spec.config, self.block_size_bytes)
        self._archive = StoreSettings.of(settings, "secondary_tiers").open(max_ram=0)  # vLLM's own first tier is RAM
        self._workers = ThreadPoolExecutor(_THREADS, thread_name_prefix="keepwarm-vllm-tier")
        self._done: queue.SimpleQueue[tuple[JobResult, list[OffloadKey]]] = queue.SimpleQueue()
        self._jobs: set[Future[None]] = set()
        self._lookups = _Lookups(self._archive, self._namespace, tier_type)

    # ---- finding ----

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    # ---- moving ----

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended since the last call. What could not be loaded is a miss from now on."""
        while not self._done.empty():
            result, lost = self._done.get()
            self._lookups.mark_miss(lost)
            yield result

    def has_pending_work(self) -> bool:
        return bool(self._jobs) or not self._done.empty()

    def drain_jobs(self) -> None:
        wait(list(self._jobs))

    def shutdown(self) -> None:
        self._workers.shutdown(wait=True)
        self._lookups.shutdown()
        self._archive.close()

    def _submit(self, job: TransferJob, move: Any) -> None:
        future = self._workers.submit(self._run, job, move)
        self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)

    def _run(self, job: TransferJob, move: Any) -> None:
        started, keys = time.perf_counter(), list(job.keys)
        moved: list[OffloadKey] = []
        try:
            for key, slot in zip(keys, job.chunk_ids, strict=True):
                move(key, self._memory[int(slot)])
                moved.append(key)
        except Exception as error:  # whatever it was: vLLM goes on without these chunks
            log.warning("%d of %d chunks could not be moved: %s", len(keys) - len(moved), len(keys), error)
        finally:
            lost = keys[len(moved) :] if job.is_promotion else []
            result = JobResult(
                job_id=job.job_id,
                success=len(moved) == len(keys),
                successful_keys=tuple(moved) if lost else None,
                transfer_time=time.perf_counter() - started,
                transfer_bytes=len(moved) * self.block_size_bytes,
            )
            self._done.put((result, lost))

    def _store(self, key: OffloadKey, slot: Bytes) -> None:
        block = chunk_block(self._namespace, key)
        if self._archive.lookup([block.exact]):
            return
        # a copy: the slot is vLLM's again when the job ends, and the store writes later
        self._archive.put(_Slot(self._geometry, slot.copy()), [block], self._namespace)

    def _load(self, key: OffloadKey, slot: Bytes) -> None:
        block = chunk_block(self._namespace, key)
        refs = self._archive.lookup([block.exact])
        if not refs:
            raise LookupError("a chunk is gone since it was looked up")
        self._archive.load(refs, block.tokens, 1, _Slot(self._geometry, slot))


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """Asks the catalogue in a thread of its own, for a scheduler step's chunks at once."""

    def __init__(self, archive: Archive, namespace: Namespace, tier_type: str) -> None:
        self._archive = archive
        self._namespace = namespace
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return [bool(self._archive.lookup([chunk_block(self._namespace, key).exact])) for key in keys]


class _Slot:
    """One chunk's bytes as the KV of one token: a `KVSource` and a `KVSink`."""

    def __init__(self, geometry: KVGeometry, memory: Bytes) -> None:
        self.geometry = geometry
        self._memory = memory

    def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        return self.view(layer, kv, start, end)

    def view(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        half = self.geometry.layers[0].key_dim
        part = self._memory[half:] if kv else self._memory[:half]
        return part.reshape(1, 1, -1)

    def fill(self, layer: int, kv: int, start: int, data: Bytes) -> None:
        self.view(layer, kv, start, start + 1)[...] = data

    def defer(self, arriving: Arriving) -> bool:
        return False

    def commit(self, layer: int, start: int, end: int) -> None:
        """Nothing: the bytes are in vLLM's memory already."""


def chunk_block(namespace: Namespace, key: bytes) -> Block:
    """The block that a chunk is stored as. Its one token is made of the hash, and compared on load as tokens are."""
    name = digest("keepwarm vllm chunk 1", namespace.exact_root, key)
    tokens = token_ids([int.from_bytes(key[:4], "little")])
    return Block(
        start=0,
        end=1,
        tokens=tokens,
        exact=name,
        prefix=digest("keepwarm vllm chunk prefix 1", namespace.prefix_root, key),
        content=content_id(tokens),
        parent_exact=namespace.exact_root,
        parent_prefix=namespace.prefix_root,
    )


def _namespace(config: Any, chunk_bytes: int) -> Namespace:
    """Of everything that shapes a chunk's bytes; `config` is vLLM's `OffloadingConfig`."""
    parallel = config.parallel
    layout = {
        "vllm": vllm.__version__,
        "chunk_bytes": chunk_bytes,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "groups": [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "layout": [config.kv_cache_layout, config.canonical_layout, config.replicated_layout],
        "parallel": [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size, parallel.rank],
    }
    model = ModelIdentity(
        weights=files_digest(weights_folder(config.model.name), cache_dir() / "identity.json"),
        config="with the weights",
        dtype=str(config.model.dtype),
        quantization="with the weights",
        rope="with the weights",
        tokenizer="ids",
        kv_layout=canonical_json(layout),
    )
    producer = f"vllm {vllm.__version__} tiering"
    return Namespace(model, ArithmeticIdentity("", "", "", 0, "", producer=producer))
