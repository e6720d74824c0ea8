"""Pages as vLLM itself makes them."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    compute_layer_kv_cache_shape_bytes,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

PAGES, LAYERS, PAGE = 12, 3, 64
NUMBERS = {"num_kv_heads": 4, "head_size": 16, "block_size": PAGE}
SPECS: dict[str, Any] = {
    "grouped": FullAttentionSpec(**NUMBERS, dtype=torch.bfloat16),
    "fp8": FullAttentionSpec(**NUMBERS, dtype=torch.float8_e4m3fn),
    "MLA": MLAAttentionSpec(**NUMBERS | {"num_kv_heads": 1, "head_size": 72}, dtype=torch.bfloat16),
    "padded": FullAttentionSpec(**NUMBERS, dtype=torch.bfloat16, page_size_padded=(64 * 4 * 32 * 2) + 4096),
}


def made(spec: Any, layout: KVCacheLayout, kernel: int | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """vLLM's memory for some layers, and its views of it."""
    strides = compute_layout_strides(spec, PAGES, LAYERS, layout)
    shape = (LAYERS, *compute_layer_kv_cache_shape_bytes(spec, PAGES))
    size = max(stride * count for stride, count in zip(strides, shape, strict=True)) + spec.page_size_bytes
    raw = torch.zeros(size, dtype=torch.int8)
    tensor = KVCacheTensor(size, [f"layer {at}" for at in range(LAYERS)], strides[0], strides[1])
    return raw, create_kv_cache_views(raw, spec, PAGES, layout, tensor, kernel)
