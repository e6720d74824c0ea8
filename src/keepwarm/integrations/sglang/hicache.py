"""The store's interface for SGLang: `HiCacheStorage`, for `--hicache-storage-backend dynamic`.

SGLang names a page by a chained SHA-256 of its token ids, which begins with the request's `extra_key` and `cache_salt`.
A page's name here consists of that hash, the weights, SGLang's version and the layout of its pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from pydantic import Field
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName, PoolTransfer, PoolTransferResult
from sglang.version import __version__ as sglang_version

from keepwarm.config import cache_dir
from keepwarm.core.identity import ArithmeticIdentity, ModelIdentity, Namespace, canonical_json
from keepwarm.errors import ConfigError, StoreError
from keepwarm.integrations.hashed_pages import HashedPages
from keepwarm.integrations.settings import StoreSettings
from keepwarm.integrations.sglang.pools import Pool, leading, named, page_bytes, restorable
from keepwarm.integrations.weights import weights_folder
from keepwarm.models.weight_files import folder_digest

log = logging.getLogger(__name__)

_THEIRS = {"backend_name", "module_path", "class_name", "interface_v1"}  # SGLang's own settings in the same place


class BackendSettings(StoreSettings):
    """The store's settings, and the model whose KV it holds."""

    model: str | None = Field(None, description="folder or hub id of the weights; else the name that SGLang serves")


class KeepwarmHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang is not there when types are checked
    """Pages on disk and in remote tiers, verified and capped, for every instance that shares them.

    A page that cannot be read within the time-outs is a miss: SGLang computes it. At start it raises ConfigError for
    unsuitable settings, and StoreError for the folder.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = {name: value for name, value in (storage_config.extra_config or {}).items() if name not in _THEIRS}
        settings = BackendSettings.of(extra, "hicache-storage-backend-extra-config")
        self._config = storage_config
        self._model = settings.model or storage_config.model_name
        if not self._model:
            raise ConfigError("hicache-storage-backend-extra-config: 'model', the folder of the weights, is not set")
        self._weights = folder_digest(weights_folder(self._model), cache_dir() / "identity.json")
        self._archive = settings.open(max_ram=0)  # SGLang's own second tier is RAM
        self._pools: dict[str, Pool] = {}  # by SGLang's names; a model has one of KV, and may have others besides

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Note the layout of SGLang's KV pages in RAM."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, str(PoolName.KV))

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Note the layout of any pool's pages in RAM: KV, sliding-window KV, recurrent states, or an index."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool, str(host_pool_name))

    def _register(self, host: Any, name: str) -> None:
        known = self._pools.get(name)
        if known is not None and known.host is host:
            return
        if known is not None:
            known.stored.close()
        config = self._config
        if config.is_mla_model and config.tp_size > 1 and name.startswith("draft") and "MHA" in type(host).__name__:
            raise ConfigError(
                f"pool {name}: each rank has heads of its own there, but SGLang has the first rank's stored alone: run "
                "the drafter without HiCache storage"
            )
        page = host.get_dummy_flat_data_page()
        nbytes = page.numel() * page.element_size()
        self._pools[name] = Pool(
            host, HashedPages(self._archive, self._namespace(host, name, page.dtype, nbytes), nbytes)
        )

    def close(self) -> None:
        """Write what is queued, and close the archive."""
        for pool in self._pools.values():
            pool.stored.close()
        self._archive.close()

    # ---- finding ----

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many leading pages are stored."""
        return leading(self._kv.find(keys))

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Return how many leading pages all pools together, and each pool, can restore. Some pools need all pages,
        others only the last ones (a state, a window), which may be stored for 5 pages but not for 4."""
        pages = leading(self._kv.find(keys))
        ends = set(range(1, pages + 1))
        hits = {PoolName.KV: pages} if pages else {}
        for transfer in pool_transfers or ():
            pool = self._pools.get(str(transfer.name))
            each = restorable([] if pool is None else pool.find(keys[:pages]), transfer)
            if each:
                hits[transfer.name] = max(each)
            ends &= each
        return PoolTransferResult(max(ends, default=0), hits, sorted(ends))

    # ---- reading ----

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Fill the given tensors. Return None for a page that is not stored or was not verified."""
        if target_locations is None or any(target is None for target in target_locations):
            raise ValueError("batch_get needs a tensor for each page")
        targets = [page_bytes(target, self._kv.stored.nbytes) for target in target_locations]
        arrived = self._kv.stored.load(named(keys), targets)
        return [target if good else None for target, good in zip(target_locations, arrived, strict=True)]

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._kv.load(keys, host_indices)

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """Load each pool's pages. Return for each page whether it arrived."""
        return {transfer.name: self._move(transfer, Pool.load) for transfer in transfers}

    # ---- writing ----

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Queue pages for the store. They are copied before this returns."""
        if values is None or any(value is None for value in values):
            raise ValueError("batch_set needs a tensor for each page")
        stored = self._kv.stored
        stored.store(named(keys), [page_bytes(value, stored.nbytes) for value in values])
        return True

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._kv.store(keys, host_indices)

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """Queue each pool's pages for the store. Return for each page whether it was queued."""
        return {transfer.name: self._move(transfer, Pool.store) for transfer in transfers}

    def clear(self) -> None:
        raise StoreError("the store is shared: empty it with `keepwarm gc` or `keepwarm purge`, or remove its folder")

    # ---- our own ----

    @property
    def _kv(self) -> Pool:
        if str(PoolName.KV) not in self._pools:
            raise RuntimeError("SGLang registered no pages")
        return self._pools[str(PoolName.KV)]

    def _move(self, transfer: PoolTransfer, move: Callable[[Pool, list[str], torch.Tensor], list[bool]]) -> list[bool]:
        """Move a pool's pages. Raises RuntimeError for a pool that was never registered."""
        keys, pool = transfer.keys or [], self._pools.get(str(transfer.name))
        if pool is None:
            raise RuntimeError(f"SGLang registered no pool {transfer.name}")
        if not pool.fits(keys, transfer.host_indices):
            return [False] * len(keys)
        return move(pool, keys, transfer.host_indices)

    def _namespace(self, pool: Any, name: str, dtype: torch.dtype, nbytes: int) -> Namespace:
        """Return a namespace of all that affects a page's bytes. Ranks of an MLA model hold the same KV and share it;
        each rank has its own recurrent states."""
        config = self._config
        is_shared = config.is_mla_model and name != PoolName.MAMBA
        layout = {
            "sglang": sglang_version,
            "page": [pool.page_size, nbytes, str(pool.layout)],
            "mla": config.is_mla_model,
            "tp": None if is_shared else [config.tp_rank, config.tp_size],
            "pp": [config.pp_rank, config.pp_size],
            "cp": [config.attn_cp_rank, config.attn_cp_size],
            "dcp": [config.dcp_rank, config.dcp_size, config.logical_page_size],
            "heads": [config.tp_lcm_size, config.should_split_heads],
            "served": config.model_name,  # SGLang marks drafts and special pools in it
        }
        if name != PoolName.KV:
            layout["pool"] = [name, type(pool).__name__, *_states(pool)]
        model = ModelIdentity(
            weights=self._weights,
            config="with the weights",
            dtype=str(dtype),
            quantization="with the weights",
            rope="with the weights",
            tokenizer="ids",
            kv_layout=canonical_json(layout),
        )
        producer = f"sglang {sglang_version} hicache"
        return Namespace(model, ArithmeticIdentity("", "", "", 0, "", producer=producer))


def _states(pool: Any) -> list[str]:
    """Return how a pool of recurrent states lays them out; nothing for other pools."""
    names = ("conv_dtype", "conv_state_shapes", "temporal_dtype", "temporal_state_shape", "num_mamba_layers")
    return [str(getattr(pool, name)) for name in names if hasattr(pool, name)]
