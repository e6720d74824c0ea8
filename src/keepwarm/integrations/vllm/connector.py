"""vLLM's face of the connector: `KVConnectorBase_V1`, each method handed on to the half that this process holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from keepwarm.errors import ConfigError
from keepwarm.integrations.vllm.identity import shard_namespaces, tell_of_others
from keepwarm.integrations.vllm.messages import Step
from keepwarm.integrations.vllm.metrics import KeepwarmStats, PromMetrics
from keepwarm.integrations.vllm.scheduler import SchedulerHalf
from keepwarm.integrations.vllm.settings import ConnectorSettings
from keepwarm.integrations.vllm.worker import WorkerHalf

_SOURCES = {"ram": CacheHitSource.HOST, "disk": CacheHitSource.DISK}


class KeepwarmConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM has no types here
    """Persistent, verified KV for vLLM. Raises ConfigError for settings that do not fit, and StoreError, at start."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = ConnectorSettings.of_transfer(self._kv_transfer_config)
        page_size = vllm_config.cache_config.block_size
        _check_layout(kv_cache_config)
        namespaces = shard_namespaces(vllm_config, page_size)
        is_worker = role == KVConnectorRole.WORKER
        self._archive = settings.open(settings.max_ram if is_worker else 0)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if is_worker:
            tp = vllm_config.parallel_config.tensor_parallel_size
            rank = get_pp_group().rank_in_group * tp + get_tp_group().rank_in_group
            self._worker = WorkerHalf(
                self._archive,
                namespaces[rank],
                rank,
                page_size,
                timeout=settings.load_timeout,
                keeps=settings.store is not None or settings.max_ram > 0,
            )
        else:
            tell_of_others(self._archive, namespaces[0])
            self._scheduler = SchedulerHalf(
                self._archive, namespaces, page_size, save_generated=settings.save_generated
            )

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        self._archive.close()

    # ---- scheduler ----

    def on_new_request(self, request: Any) -> None:
        self._at_scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._at_scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._at_scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        tokens: Counter[CacheHitSource] = Counter()
        for tier, count in self._at_scheduler.sources(request, num_external_tokens).items():
            tokens[_SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)] += count
        return dict(tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        return self._at_scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.invalid_block_ids:
            self._at_scheduler.failed(connector_output.invalid_block_ids)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._at_scheduler.finished(request, block_ids), None

    def take_events(self) -> Iterable[Any]:
        return self._at_scheduler.take_events()

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._at_worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._at_worker.start(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._at_worker.wait_for(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: a step's pages are copied at its end, all layers at once."""

    def wait_for_save(self) -> None:
        self._at_worker.end_of_step()
        self._at_worker.save(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._at_worker.take_saved() or None, self._at_worker.take_arrived() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        self._at_worker.end_of_step()  # under speculative decoding `wait_for_save` comes later
        return self._at_worker.take_failed()

    # ---- metrics ----

    def get_kv_connector_stats(self) -> KeepwarmStats | None:
        return self._worker.stats.take() if self._worker is not None else None

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
        return True  # layers are waited for between them

    # ---- our own ----

    @property
    def _at_scheduler(self) -> SchedulerHalf:
        assert self._scheduler is not None, "asked of a worker"
        return self._scheduler

    @property
    def _at_worker(self) -> WorkerHalf:
        assert self._worker is not None, "asked of the scheduler"
        return self._worker

    def _step(self) -> Step:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        return step


def _check_layout(kv_cache_config: Any) -> None:
    """Raises ConfigError for a model of which vLLM does not keep every position's pages."""
    groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    kinds = [kind for group in groups for kind in getattr(group, "kv_cache_specs", {"": group}).values()]
    if len(groups) != 1 or not all(isinstance(kind, FullAttentionSpec) for kind in kinds):
        seen = ", ".join(sorted({type(kind).__name__ for kind in kinds})) or "none"
        raise ConfigError(
            f"Keepwarm stores one group of pages with full attention; this model has {len(groups)} of {seen}, whose "
            "pages vLLM gives to others while a request runs: run it without the connector"
        )
