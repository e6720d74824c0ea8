"""KVBoost: `InferenceEngine.generate` on text, which it tokenizes itself; its own clock is kept beside ours.

Kinds of hit: `prefix` (its prefix cache), `selective` and `cacheblend` (its chunk reuse, with either repair). Ours is
wall time from the call to the first token; KVBoost's `ttft_ms` begins after lookup, merge and repair.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import torch
from kvboost.engine import GenerationMode, InferenceEngine, RecomputeStrategy
from protocol import Answer, Prompt, Settings, serve
from transformers import AutoModelForCausalLM, AutoTokenizer

_KINDS = {
    "prefix": (RecomputeStrategy.NONE, GenerationMode.PREFIX_CACHE),
    "selective": (RecomputeStrategy.SELECTIVE, GenerationMode.CHUNK_KV_REUSE),
    "cacheblend": (RecomputeStrategy.CACHEBLEND, GenerationMode.CHUNK_KV_REUSE),
}
_CACHE = 8 << 30  # bytes; more than anything here fills


class KVBoostPeer:
    hits = tuple(_KINDS)

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=getattr(torch, settings.dtype)).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(settings.model)
        self.engines = {
            kind: InferenceEngine(model, self.tokenizer, max_cache_bytes=_CACHE, recompute_strategy=how, device="cpu")
            for kind, (how, _) in _KINDS.items()
        }
        self.about = {
            "kvboost": version("kvboost"),
            "torch": torch.__version__,
            "transformers": version("transformers"),
        }

    def cold(self, prompt: Prompt) -> Answer:
        text = self._text(prompt)
        answer = self._ask("prefix", text, 1, GenerationMode.BASELINE)
        for kind in self.hits:  # each engine has a cache of its own
            self._ask(kind, text, 1)
        return Answer(answer["tokens"], answer["ttft"], answer["total"])

    def hit(self, kind: str, prompt: Prompt, new_tokens: int) -> Answer:
        answer = self._ask(kind, self._text(prompt), new_tokens)
        return Answer(answer["tokens"], answer["ttft"], answer["total"])

    def warm(self, texts: list[str]) -> dict[str, int]:
        return {kind: sum(engine.warm(text).chunks_stored for text in texts) for kind, engine in self.engines.items()}

    def ask(self, kind: str, parts: list[str], new_tokens: int) -> dict[str, Any]:
        """Answer a text that comes in parts; of `off` nothing is reused."""
        if kind == "off":
            return self._ask("prefix", "".join(parts), new_tokens, GenerationMode.BASELINE)
        return self._ask(kind, "".join(parts), new_tokens)

    def _ask(self, kind: str, text: str, new_tokens: int, mode: GenerationMode | None = None) -> dict[str, Any]:
        tokens: list[int] = []
        first = 0.0

        def take(token: int) -> None:
            nonlocal first
            if not tokens:
                first = time.perf_counter()
            tokens.append(token)

        started = time.perf_counter()
        result = self.engines[kind].generate(text, new_tokens, mode or _KINDS[kind][1], on_token=take)
        total = time.perf_counter() - started
        return {
            "tokens": tokens,
            "ttft": (first - started) * 1e3,
            "total": total * 1e3,
            "told": result.ttft_ms,
            "cached": result.cached_tokens,
            "prompt": result.prompt_tokens,
        }

    def _text(self, prompt: Prompt) -> str:
        text = self.tokenizer.decode(prompt.ids)
        if self.tokenizer.encode(text) != prompt.ids:
            raise RuntimeError("the prompt's text has other ids than the others get")
        return str(text)


if __name__ == "__main__":
    serve(KVBoostPeer)
