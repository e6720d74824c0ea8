"""Keepwarm's store as a secondary tier of vLLM's own offloading (`OffloadingConnector`, tiered).

    "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "KeepwarmTier",
        "module_path": "keepwarm.integrations.vllm.tiering", "store": "/var/lib/keepwarm"}]}

Under `offloading.KeepwarmOffloadingConnector` the tier also learns how vLLM loads the model.

vLLM names chunks by its own hashes and hands over only their bytes. A chunk is stored as one block under a name made
from the model's weights, the layout and that hash, and is verified like any other block when it is read.
"""

from __future__ import annotations

import json
import logging
import queue
import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, ClassVar

import numpy as np
import vllm
from vllm import envs
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadKey, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from keepwarm.config import cache_dir
from keepwarm.core.identity import ArithmeticIdentity, ModelIdentity, Namespace, as_json, canonical_json, json_digest
from keepwarm.core.ports import Bytes
from keepwarm.errors import ConfigError
from keepwarm.integrations.hashed_pages import HashedPages
from keepwarm.integrations.vllm.settings import TierSettings
from keepwarm.integrations.weights import weights_folder
from keepwarm.models.weight_files import folder_digest

log = logging.getLogger(__name__)

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
        """Open the store; `settings` are those of `TierSettings`. Raises ConfigError for unsuitable settings, and
        StoreError for the folder."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._memory = np.frombuffer(primary_kv_view, np.uint8).reshape(-1, self.block_size_bytes)
        told = TierSettings.of(settings, "secondary_tiers")
        namespace = _namespace(offloading_spec.config, self.block_size_bytes, told)
        self._archive = told.open(max_ram=0)  # vLLM's own first tier is RAM
        self._stored = HashedPages(self._archive, namespace, self.block_size_bytes)
        self._workers = ThreadPoolExecutor(_THREADS, thread_name_prefix="keepwarm-vllm-tier")
        self._done: queue.SimpleQueue[tuple[JobResult, list[OffloadKey]]] = queue.SimpleQueue()
        self._jobs: set[Future[None]] = set()
        self._lookups = _Lookups(self._stored, tier_type)

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
        self._submit(job_metadata, self._stored.load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Yield the jobs that ended since the last call. Chunks that could not be loaded are misses from now on."""
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
        self._stored.close()
        self._archive.close()

    def _submit(self, job: TransferJob, move: Any) -> None:
        future = self._workers.submit(self._run, job, move)
        self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)

    def _run(self, job: TransferJob, move: Any) -> None:
        started, keys = time.perf_counter(), list(job.keys)
        moved: list[OffloadKey] = []
        try:
            arrived = move(keys, [self._memory[int(slot)] for slot in job.chunk_ids])
            moved = [key for key, good in zip(keys, arrived, strict=True) if good]
        except Exception as error:  # after any error vLLM continues without these chunks
            log.warning("%d chunks could not be moved: %s", len(keys), error)
        finally:
            lost = [key for key in keys if key not in set(moved)] if job.is_promotion else []
            result = JobResult(
                job_id=job.job_id,
                success=len(moved) == len(keys),
                successful_keys=tuple(moved) if lost else None,
                transfer_time=time.perf_counter() - started,
                transfer_bytes=len(moved) * self.block_size_bytes,
            )
            self._done.put((result, lost))

    def _store(self, keys: list[OffloadKey], chunks: list[Bytes]) -> list[bool]:
        self._stored.store(keys, chunks)
        return [True] * len(keys)


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """Asks the store in its own thread, for all chunks of a scheduler step at once."""

    def __init__(self, stored: HashedPages, tier_type: str) -> None:
        self._stored = stored
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return [ref is not None for ref in self._stored.find(list(keys))]


def _namespace(config: Any, chunk_bytes: int, told: TierSettings) -> Namespace:
    """Return a namespace of all that affects a chunk's bytes; `config` is vLLM's `OffloadingConfig`."""
    parallel = config.parallel
    layout = {
        "vllm": vllm.__version__,
        "chunk_bytes": chunk_bytes,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "groups": [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "layout": [config.kv_cache_layout, config.canonical_layout, config.replicated_layout],
        **({"batch_invariant": True} if envs.VLLM_BATCH_INVARIANT else {}),
        "parallel": [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size, parallel.rank],
    }
    model = ModelIdentity(
        weights=folder_digest(weights_folder(config.model.name, told.revision), cache_dir() / "identity.json"),
        config=_config_name(told),
        dtype=str(config.model.dtype),
        quantization=_quantization_name(told),
        rope="with the weights" if told.max_model_len is None else f"with the weights, for {told.max_model_len} tokens",
        tokenizer="ids",
        kv_layout=canonical_json(layout),
    )
    producer = f"vllm {vllm.__version__} tiering"
    return Namespace(model, ArithmeticIdentity("", "", "", 0, "", producer=producer))


def _config_name(told: TierSettings) -> str:
    """Return what names the configuration where it is not the one of the weights' folder. Raises ConfigError."""
    if told.hf_config_path is not None:
        path = weights_folder(told.hf_config_path) / "config.json"
        try:
            file = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"hf_config_path: {path} cannot be read ({error}): name a folder with a config.json"
            ) from None
        return json_digest("keepwarm vllm config file 1", [as_json(file), told.hf_overrides])
    return json_digest("keepwarm vllm overrides 1", told.hf_overrides) if told.hf_overrides else "with the weights"


def _quantization_name(told: TierSettings) -> str:
    """Return how weights are quantized while they are loaded, which their files do not say."""
    if told.quantization_config is not None:
        return canonical_json([told.quantization, told.quantization_config])
    return told.quantization or "with the weights"
