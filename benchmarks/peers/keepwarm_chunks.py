"""Keepwarm with `reuse="chunks"`, asked as KVBoost is (`chunks.py`): texts that come in parts, `Engine.generate`."""

from __future__ import annotations

from typing import Any

import torch
from protocol import Settings, serve

from keepwarm import Engine


class KeepwarmChunks:
    hits = ("chunks", "exact")  # in this order: `exact` stores the prompt, which would then be found whole

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        self.engine = Engine.from_pretrained(settings.model, dtype=settings.dtype, reuse="chunks", learn_chunks=False)
        self.about = {"torch": torch.__version__, "repair": self.engine.pipeline.config.repair}

    def warm(self, texts: list[str]) -> dict[str, int]:
        new = sum(self.engine.warm(segments=[text]).new_blocks for text in texts)
        self.engine.flush()
        return {"chunks": new}

    def ask(self, kind: str, parts: list[str], new_tokens: int) -> dict[str, Any]:
        self.engine.pipeline.pool.forget()  # what hits comes from RAM
        result = self.engine.generate(segments=parts, max_new_tokens=new_tokens, reuse=kind)
        self.engine.flush()
        return {
            "tokens": result.token_ids,
            "ttft": result.ttft_ms,
            "total": result.total_ms,
            "told": None,
            "cached": result.cached_tokens,
            "prompt": result.prompt_tokens,
        }


if __name__ == "__main__":
    serve(KeepwarmChunks)  # type: ignore[arg-type]
