"""SGLang's face of the store: `HiCacheStorage`, for `--hicache-storage-backend dynamic`.

SGLang names a page by a chained SHA-256 of its token ids, which begins with the request's `extra_key` and `cache_salt`:
that hash, the weights, SGLang's version and the layout of its pages are a page's name here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.version import __version__ as sglang_version

from keepwarm.config import cache_dir
from keepwarm.core.identity import ArithmeticIdentity, ModelIdentity, Namespace, canonical_json
from keepwarm.core.ports import Bytes
from keepwarm.errors import ConfigError, StoreError
from keepwarm.integrations.settings import StoreSettings
from keepwarm.integrations.slots import Slots
from keepwarm.integrations.weights import weights_folder
from keepwarm.runtime.identity import files_digest

log = logging.getLogger(__name__)

_THEIRS = {"backend_name", "module_path", "class_name", "interface_v1"}  # read by SGLang from the same place


class BackendSettings(StoreSettings):
    """Those of the store, and which model's KV it is."""

    model: str | None = Field(None, description="folder or hub id of the weights; else the name that SGLang serves")


class KeepwarmHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang is not there when types are checked
    """Pages on disk and in remote tiers, verified and capped, for every instance that shares them.

    A page that cannot be read, or not within the time-outs, is a miss: SGLang computes it. Raises ConfigError for
    settings that do not fit, and StoreError for the folder, at start.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = {name: value for name, value in (storage_config.extra_config or {}).items() if name not in _THEIRS}
        settings = BackendSettings.of(extra, "hicache-storage-backend-extra-config")
        self._config = storage_config
        self._model = settings.model or storage_config.model_name
        if not self._model:
            raise ConfigError("hicache-storage-backend-extra-config: 'model', the folder of the weights, is not set")
        self._weights = files_digest(weights_folder(self._model), cache_dir() / "identity.json")
        self._archive = settings.open(max_ram=0)  # SGLang's own second tier is RAM
        self._slots: Slots | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take note of the layout of SGLang's pages in RAM."""
        super().register_mem_pool_host(mem_pool_host)
        page = mem_pool_host.get_dummy_flat_data_page()
        nbytes = page.numel() * page.element_size()
        self._slots = Slots(self._archive, self._namespace(mem_pool_host, page.dtype, nbytes), nbytes)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if str(host_pool_name) != "kv":
            raise ConfigError(
                f"this model keeps {host_pool_name} state beside KV, which Keepwarm does not store: choose another "
                "storage backend for it"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def close(self) -> None:
        """Write what is queued, and end."""
        if self._slots is not None:
            self._slots.close()
        self._archive.close()

    # ---- finding ----

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of the first pages are stored."""
        found = self._pages.find(_names(keys))
        return next((at for at, ref in enumerate(found) if ref is None), len(keys))

    # ---- reading ----

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Fill the given tensors; None in the place of what is not stored or did not verify."""
        if target_locations is None or any(target is None for target in target_locations):
            raise ValueError("batch_get needs a tensor for each page")
        targets = [self._bytes(target) for target in target_locations]
        arrived = self._pages.load(_names(keys), targets)
        return [target if good else None for target, good in zip(target_locations, arrived, strict=True)]

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Into SGLang's own pages: a page is written to when it has arrived whole and is verified."""
        pool = self.mem_pool_host
        pages = [pool.get_dummy_flat_data_page() for _ in keys]
        arrived = self._pages.load(_names(keys), [self._bytes(page) for page in pages])
        for at, good in enumerate(arrived):
            if good:
                pool.set_from_flat_data_page(int(host_indices[at * pool.page_size]), pages[at])
        return arrived

    # ---- writing ----

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Queue pages to be stored; they are copied before this returns."""
        if values is None or any(value is None for value in values):
            raise ValueError("batch_set needs a tensor for each page")
        self._pages.store(_names(keys), [self._bytes(value) for value in values])
        return True

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        pool = self.mem_pool_host
        values = [pool.get_data_page(int(host_indices[at * pool.page_size])) for at in range(len(keys))]
        return [self.batch_set(keys, values)] * len(keys)

    def clear(self) -> None:
        raise StoreError("the store is shared: empty it with `keepwarm gc` or `keepwarm purge`, or remove its folder")

    # ---- our own ----

    @property
    def _pages(self) -> Slots:
        if self._slots is None:
            raise RuntimeError("SGLang registered no pages")
        return self._slots

    def _bytes(self, page: torch.Tensor) -> Bytes:
        """A page's memory. Raises ValueError for one of another size than registered, or not in one piece."""
        if page.numel() * page.element_size() != self._pages.nbytes or not page.is_contiguous():
            raise ValueError(
                f"a page is {self._pages.nbytes} bytes in one piece; got {page.numel() * page.element_size()} bytes"
            )
        found: Bytes = page.view(-1).view(torch.uint8).cpu().numpy()
        return found

    def _namespace(self, pool: Any, dtype: torch.dtype, nbytes: int) -> Namespace:
        """Of everything that shapes a page's bytes. Ranks of an MLA model hold the same KV and share it."""
        config = self._config
        layout = {
            "sglang": sglang_version,
            "page": [pool.page_size, nbytes, str(pool.layout)],
            "mla": config.is_mla_model,
            "tp": None if config.is_mla_model else [config.tp_rank, config.tp_size],
            "pp": [config.pp_rank, config.pp_size],
            "cp": [config.attn_cp_rank, config.attn_cp_size],
            "dcp": [config.dcp_rank, config.dcp_size, config.logical_page_size],
            "heads": [config.tp_lcm_size, config.should_split_heads],
            "served": config.model_name,  # SGLang marks drafts and special pools there
        }
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


def _names(keys: Sequence[str]) -> list[bytes]:
    """SGLang's hashes as bytes. They are hexadecimal; whatever else comes is a name of its own."""
    return [key.encode() for key in keys]
