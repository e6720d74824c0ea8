"""What a test asks of vLLM's workers: that all they handed to the store is in it."""

from __future__ import annotations

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group


class Flushing:
    """An extension of vLLM's worker."""

    def flush_keepwarm(self) -> None:
        if has_kv_transfer_group():
            get_kv_transfer_group()._archive.flush()
