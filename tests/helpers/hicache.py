"""SGLang's host pool of pages, and the backend as SGLang's controller makes it. It needs SGLang's files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

LAYERS, PAGE, HEADS, WIDTH = 3, 16, 2, 8
MODULE = {
    "backend_name": "keepwarm",
    "module_path": "keepwarm.integrations.sglang.hicache",
    "class_name": "KeepwarmHiCache",
}


class HostPool:
    """Host memory of keys and values, layer first, with the methods that SGLang's pools give to storage backends."""

    layout = "layer_first"

    def __init__(self, pages: int = 16, dtype: torch.dtype = torch.bfloat16, page_size: int = PAGE) -> None:
        self.page_size, self.dtype = page_size, dtype
        self.memory = torch.zeros((2, LAYERS, pages * page_size, HEADS, WIDTH), dtype=dtype)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self.memory[:, :, index : index + self.page_size]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros((2, LAYERS, self.page_size, HEADS, WIDTH), dtype=self.dtype).flatten()

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.memory[:, :, index : index + self.page_size] = data_page.reshape(2, LAYERS, self.page_size, HEADS, WIDTH)


def hashes(count: int, namespace: str = "") -> list[str]:
    """A chain of page hashes; SGLang's begins with a digest of the request's salt and extra key."""
    chain, prior = [], hashlib.sha256(namespace.encode()).digest() if namespace else b""
    for number in range(count):
        prior = hashlib.sha256(prior + number.to_bytes(4, "little")).digest()
        chain.append(prior.hex())
    return chain


def config(model: Path, **changes: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    made = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=str(model),
    )
    return replace(made, **changes)


@contextmanager
def backend(made: Any, settings: dict[str, Any], pool: HostPool | None = None) -> Iterator[Any]:
    """As SGLang's controller makes it."""
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    pool = pool or HostPool()
    made = replace(made, extra_config=MODULE | settings)
    storage = StorageBackendFactory.create_backend("dynamic", made, pool)
    storage.register_mem_pool_host(pool)
    storage.on_host_pools_registered()
    try:
        yield storage
    finally:
        storage.close()
