"""The connector's interface for vLLM, `KVConnectorBase_V1`. It calls the half that belongs to this process."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from keepwarm.core.identity import Namespace
from keepwarm.integrations.vllm.hybrid.groups import Group, groups_of, is_plain, is_replicated
from keepwarm.integrations.vllm.hybrid.messages import PartsStep
from keepwarm.integrations.vllm.hybrid.naming import group_namespace
from keepwarm.integrations.vllm.hybrid.scheduler import PartsScheduler
from keepwarm.integrations.vllm.hybrid.worker import PartsWorker
from keepwarm.integrations.vllm.identity import Facts, shard_namespaces, tell_of_others
from keepwarm.integrations.vllm.label import label_of
from keepwarm.integrations.vllm.messages import Step
from keepwarm.integrations.vllm.metrics import KeepwarmStats, PromMetrics
from keepwarm.integrations.vllm.scheduler import SchedulerHalf
from keepwarm.integrations.vllm.settings import ConnectorSettings
from keepwarm.integrations.vllm.worker import WorkerHalf
from keepwarm.runtime.device import is_host
from keepwarm.store.archive import Archive

log = logging.getLogger(__name__)

_SOURCES = {"ram": CacheHitSource.HOST, "disk": CacheHitSource.DISK}


@dataclass
class WorkerFacts(KVConnectorHandshakeMetadata, KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM has no types
    """What workers tell the scheduler at the start, by rank."""

    facts: dict[int, Facts]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerFacts:
        return WorkerFacts(self.facts | other.facts)


for _message in (Step, PartsStep):
    KVConnectorMetadata.register(_message)


class KeepwarmConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM has no types here
    """Persistent, verified KV for vLLM. At start it raises ConfigError for unsuitable settings and for models whose KV
    cannot be stored, and StoreError."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = ConnectorSettings.of_transfer(self._kv_transfer_config)
        self._groups = groups_of(kv_cache_config, vllm_config)
        shares = bool(settings.remote)
        self._is_replicated = is_replicated(kv_cache_config, vllm_config.parallel_config, shares=shares)
        self._page_size = vllm_config.cache_config.block_size
        self._settings = settings
        self._names: tuple[bytes, ...] = ()
        self._has_told = False  # whether this worker's facts went with a step
        self._has_heard = False  # whether the scheduler knows the workers' facts
        self._told = False  # whether it was logged that this worker has other names
        is_worker = role == KVConnectorRole.WORKER
        self._archive = self._opened(settings, settings.max_ram if is_worker else 0)
        self._scheduler: SchedulerHalf | PartsScheduler | None = None
        self._worker: WorkerHalf | PartsWorker | None = None
        self._facts = Facts.of_worker(vllm_config)
        if is_worker:
            self._worker = self._make_worker(settings, self._named([self._facts] * self._ranks))

    def _opened(self, settings: ConnectorSettings, max_ram: int) -> Archive:
        if not is_plain(self._groups):  # `PartsScheduler` checks for the minimum length instead
            settings = settings.model_copy(update={"min_store_tokens": 0})
        return settings.open(max_ram)

    def _make_worker(self, settings: ConnectorSettings, namespaces: list[Namespace]) -> WorkerHalf | PartsWorker:
        rank = self._worker_rank()
        label = label_of(self._vllm_config, self._facts)
        log.info("KV from the store is labelled %s", label.label)
        timeout, keeps = settings.load_timeout, settings.store is not None or settings.max_ram > 0
        if is_plain(self._groups):
            tp = self._vllm_config.parallel_config.tensor_parallel_size
            stores = not (self._is_replicated and rank % tp)
            return WorkerHalf(
                self._archive,
                namespaces[rank],
                rank,
                self._page_size,
                timeout=timeout,
                keeps=keeps and (stores or settings.store is None),  # a folder is filled by one rank
                at_once=bool(self._kv_cache_config.needs_kv_cache_zeroing),
                stores=stores,
                label=label,
            )
        return PartsWorker(
            self._archive, namespaces[rank], rank, self._groups, timeout=timeout, keeps=keeps, label=label
        )

    def _make_scheduler(
        self, settings: ConnectorSettings, namespaces: list[Namespace]
    ) -> SchedulerHalf | PartsScheduler:
        answers = settings.save_generated
        if is_plain(self._groups):
            on_device = not is_host(str(self._vllm_config.device_config.device_type))
            events = self._vllm_config.kv_events_config
            return SchedulerHalf(
                self._archive,
                namespaces,
                self._page_size,
                save_generated=answers,
                on_device=on_device,
                publishes=events is not None and bool(events.enable_kv_cache_events),
                min_tokens=settings.min_store_tokens,
            )
        least = settings.min_store_tokens
        return PartsScheduler(self._archive, namespaces, self._groups, save_generated=answers, min_tokens=least)

    def _worker_rank(self) -> int:
        tp = self._vllm_config.parallel_config.tensor_parallel_size
        return int(get_pp_group().rank_in_group * tp + get_tp_group().rank_in_group)

    @property
    def _ranks(self) -> int:
        parallel = self._vllm_config.parallel_config
        return int(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)

    def _named(self, facts: Sequence[Facts]) -> list[Namespace]:
        """Return the shards' namespaces, and note their names."""
        namespaces = shard_namespaces(self._vllm_config, self._page_size, facts, replicated=self._is_replicated)
        self._names = tuple(namespace.exact_root for namespace in namespaces)
        return namespaces

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        self._archive.close()

    # ---- names ----

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return this worker's facts for the scheduler; not under `MultiConnector`, which would give them to others."""
        return WorkerFacts({self._worker_rank(): self._facts}) if get_kv_transfer_group() is self else None

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        told = [each for each in metadata.values() if isinstance(each, WorkerFacts)]
        if told and self._role == KVConnectorRole.SCHEDULER:
            self._hear(reduce(WorkerFacts.aggregate, told))

    def build_connector_worker_meta(self) -> WorkerFacts | None:
        """Return this worker's facts once, where the handshake is not ours."""
        if self._has_told or get_kv_transfer_group() is self:
            return None
        self._has_told = True
        return WorkerFacts({self._worker_rank(): self._facts})

    def _hear(self, told: WorkerFacts) -> None:
        """Look up by the names under which the workers store, from now on."""
        if len(told.facts) == self._ranks:
            facts, self._has_heard = [told.facts[rank] for rank in range(self._ranks)], True
            namespaces = self._named(facts)
            if self._scheduler is None:
                self._scheduler = self._make_scheduler(self._settings, namespaces)
            else:
                self._scheduler.rename(namespaces)
            tell_of_others(self._archive, _all_namespaces(namespaces, self._groups))

    # ---- scheduler ----

    def on_new_request(self, request: Any) -> None:
        self._at_scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._at_scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._at_scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        tokens: Counter[CacheHitSource] = Counter()
        for tier, count in self._at_scheduler.sources(request, num_external_tokens).items():
            tokens[_SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)] += count
        return dict(tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        step = self._at_scheduler.step(scheduler_output)
        step.names = self._names if self._has_heard else ()
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        if isinstance(connector_output.kv_connector_worker_meta, WorkerFacts):
            self._hear(connector_output.kv_connector_worker_meta)
        if isinstance(self._scheduler, PartsScheduler):
            self._scheduler.load_failed(connector_output.failed_recving)
        elif self._scheduler is not None:
            if connector_output.invalid_block_ids:
                self._scheduler.failed(connector_output.invalid_block_ids)
            self._scheduler.released(connector_output.finished_sending or ())

    def has_pending_push_work(self) -> bool:
        return isinstance(self._scheduler, SchedulerHalf) and self._scheduler.is_holding

    def has_pending_block_frees(self) -> bool:
        """Whether pages come back soon, so that vLLM need not preempt a request for want of one."""
        return self.has_pending_push_work()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._at_scheduler.finished(request, block_ids), None

    def take_events(self) -> Iterable[Any]:
        return self._scheduler.take_events() if isinstance(self._scheduler, SchedulerHalf) else ()

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if isinstance(self._worker, WorkerHalf):
            self._worker.register(kv_caches, self._kv_cache_config.num_blocks)
        else:
            self._at_worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(self._worker, WorkerHalf):
            self._worker.fence(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        rank = self._worker_rank()
        if step.names and step.names[rank] != self._names[rank] and not self._told:
            self._told = True
            log.error(
                "vLLM's scheduler and this worker name the same KV differently: nothing that is stored will be found. "
                "Answers are right; please report the model"
            )
        self._at_worker.start(step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if isinstance(self._worker, WorkerHalf):
            self._worker.wait_for(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: a step's pages are copied at its end, all layers at once."""

    def wait_for_save(self) -> None:
        if isinstance(self._worker, WorkerHalf):
            self._worker.end_of_step()
        self._at_worker.save(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the transfers that ended. Failed loads for which no step waits are reported by pages if there is one
        group, otherwise by requests."""
        if isinstance(self._worker, PartsWorker):
            arrived, failed = self._worker.take_arrived()
        else:
            assert self._worker is not None
            arrived, failed = self._worker.take_arrived(), set()
        return KVConnectorTransferResults(self._at_worker.take_saved(), arrived, failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        if not isinstance(self._worker, WorkerHalf):
            return set()
        self._worker.end_of_step()  # with speculative decoding `wait_for_save` is called later
        return self._worker.take_failed()

    # ---- metrics ----

    def get_kv_connector_stats(self) -> KeepwarmStats | None:
        counts = self._worker.stats.take() if self._worker is not None else {}
        return KeepwarmStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KeepwarmStats:
        return KeepwarmStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return False  # on a device no step waits between layers

    # ---- our own ----

    @property
    def _at_scheduler(self) -> SchedulerHalf | PartsScheduler:
        assert self._worker is None, "asked of a worker"
        if self._scheduler is None:  # no worker told its facts
            self._scheduler = self._make_scheduler(self._settings, self._named([self._facts] * self._ranks))
        return self._scheduler

    @property
    def _at_worker(self) -> Any:
        """The worker's half. Each kind takes its own kind of messages."""
        assert self._worker is not None, "asked of the scheduler"
        return self._worker


def _all_namespaces(namespaces: list[Namespace], groups: tuple[Group, ...]) -> list[Namespace]:
    """Return the namespaces of every shard and group."""
    if is_plain(groups):
        return namespaces
    return [group_namespace(namespace, group) for namespace in namespaces for group in groups]
