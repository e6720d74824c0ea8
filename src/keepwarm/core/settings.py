"""Types of an engine's settings as callers write them, so that a type checker finds a misspelt name or a wrong value.

`EngineConfig` checks the same settings at run time and says what each means.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from keepwarm.config import Reuse, ToolOrder

ReuseMode = Literal["off", "exact", "prefix", "chunks"] | Reuse
Size = int | str  # bytes, or a text such as "4GiB"
Folder = str | os.PathLike[str]
Policy = Literal["lru", "lfu", "s3fifo"]


class EngineArgs(TypedDict, total=False):
    """Keyword arguments of `Engine.from_pretrained`, as `EngineConfig` describes them."""

    store: Folder | None
    reuse: ReuseMode
    device: str | None
    dtype: Literal["float32", "bfloat16", "float16"] | None
    kv_codec: Literal["raw", "int8", "int4", "fp8"]
    kv_in_memory: Literal["decoded", "encoded"]
    store_key_file: Folder | None
    max_ram: Size
    max_device: Size | None
    device_timeout: float
    max_pages: Size | None
    max_disk: Size
    ram_policy: Policy
    disk_policy: Policy
    admit: Literal["always", "second_use"]
    min_store_tokens: int
    min_write_tokens: int
    store_answers: bool
    draft_tokens: int
    store_ttl: float | None
    store_timeout: float
    exit_timeout: float
    map_files: bool
    max_disk_writes_per_day: Size | None
    remote: str | Sequence[str] | None
    remote_timeout: float
    remote_load_timeout: float
    max_remote: Size | None
    step: int | None
    snapshot_budget: float
    max_scratch: Size
    min_step: int
    chunker: Literal["fixed", "semantic", "document", "content"]
    chunk_size: int
    chunk_least: int
    chunk_partial: bool
    chunk_start: str | None
    chunk_contexts: Literal["neutral", "any"]
    learn_chunks: bool
    repair: str
    max_divergence: float | None
    shadow: float
    tool_order: ToolOrder
    session_tokens: Literal["canonical", "as_generated"]
    least_text_share: float
    settle_after: float | None
    session_ttl: float | None
    template_args: dict[str, Any]
    trust_remote_code: bool
    attention: Literal["auto", "model", "triton"]
