"""What mlx-lm's server does with its prompt cache, for prompts of token ids; it tells tokens and all their logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from mlx_lm.utils import load_model
from tests.helpers.mlx_models import VOCABULARY

from keepwarm.integrations.mlx import KeepwarmPromptCache, Loaded
from keepwarm.integrations.mlx.form import Quantization

NEW = 6
ROUNDING = 1e-3  # of the largest logit; where attention reads a token, another one changes logits by more


@dataclass(frozen=True)
class Answer:
    """Chosen tokens, and the logits before each, `[tokens, vocabulary]`."""

    tokens: list[int]
    logits: np.ndarray[Any, np.dtype[np.float32]]
    cached: int

    def equals(self, other: Answer) -> bool:
        return self.tokens == other.tokens and self.logits.tobytes() == other.logits.tobytes()

    def agrees(self, other: Answer) -> bool:
        """Whether tokens are the same, and logits up to rounding."""
        close = np.allclose(self.logits, other.logits, atol=ROUNDING * float(np.abs(other.logits).max()))
        return self.tokens == other.tokens and bool(close)


class Host:
    """One process's model. `cache` are settings of KeepwarmPromptCache, a cache of mlx-lm's own, or None."""

    def __init__(
        self,
        folder: Path,
        cache: dict[str, Any] | LRUPromptCache | None,
        *,
        adapter: Path | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        self.model, _ = load_model(folder)
        self.loaded = Loaded(self.model, str(folder), str(adapter) if adapter else None, quantization=quantization)
        self.cache: Any = KeepwarmPromptCache(self.loaded, **cache) if isinstance(cache, dict) else cache

    def ask(self, ids: Sequence[int], new: int = NEW, system: int = 0) -> Answer:
        """Answer a prompt whose first `system` tokens are a segment of their own."""
        if self.loaded.quantization is not None:
            return self._ask_alone([*ids], new)
        return self.ask_all([(ids, system)], new)[0]

    def cold(self, ids: Sequence[int], new: int = NEW) -> Answer:
        """Answer without a cache."""
        cache, self.cache = self.cache, None
        try:
            return self.ask(ids, new)
        finally:
            self.cache = cache

    def ask_all(self, prompts: Sequence[tuple[Sequence[int], int]], new: int = NEW) -> list[Answer]:
        """Answer prompts at once, in the order of the server's calls."""
        generator = BatchGenerator(self.model, max_tokens=new)
        asked: dict[int, tuple[int, list[int], list[Any]]] = {}
        for given, system in prompts:
            ids = [*given]
            found, rest = (
                self.cache.fetch_nearest_cache(self.loaded.key, ids) if self.cache is not None else (None, ids)
            )
            cached = len(ids) - len(rest)
            cut = max(system - cached, 0)
            (uid,) = generator.insert_segments(
                segments=[[rest[:cut], rest[cut:]]], max_tokens=[new], caches=[found], all_tokens=[ids[:cached]]
            )
            asked[uid] = (cached, [], [])
        left = set(asked)
        while left:
            prompt_responses, responses = generator.next()
            ended = [r.uid for r in prompt_responses if r.end_of_segment and not r.end_of_prompt]
            for caches, key in generator.extract_cache(ended).values():
                self._keep(key[:], caches)
            for response in responses:
                asked[response.uid][1].append(response.token)
                asked[response.uid][2].append(np.array(response.logprobs.astype(mx.float32)))
                if response.finish_reason is not None:
                    self._keep(response.all_tokens[:], response.prompt_cache)
                    left.discard(response.uid)
        generator.close()
        return [Answer(tokens, np.array(seen), cached) for cached, tokens, seen in asked.values()]

    def _ask_alone(self, ids: list[int], new: int) -> Answer:
        """As the server answers one request after the other, which it does with quantized caches."""
        how = self.loaded.quantization
        assert how is not None
        found, rest = self.cache.fetch_nearest_cache(self.loaded.key, ids) if self.cache is not None else (None, ids)
        caches = found if found is not None else make_prompt_cache(self.model)
        tokens: list[int] = []
        seen: list[Any] = []
        settings = {"kv_bits": how.bits, "kv_group_size": how.group_size, "quantized_kv_start": how.start}
        for token, logits in generate_step(mx.array(rest), self.model, max_tokens=new, prompt_cache=caches, **settings):
            tokens.append(token)
            seen.append(np.array(logits.astype(mx.float32)))
        self._keep([*ids, *tokens], caches)
        return Answer(tokens, np.array(seen), len(ids) - len(rest))

    def _keep(self, tokens: list[int], caches: list[Any]) -> None:
        if self.cache is not None:
            self.cache.insert_cache(self.loaded.key, tokens, caches)

    def forget(self) -> None:
        """Empty mlx-lm's own cache in memory, so that only the store is left."""
        self.cache.trim_to(n_sequences=0)

    def flush(self) -> None:
        self.cache.flush()

    def close(self) -> None:
        if isinstance(self.cache, KeepwarmPromptCache):
            self.cache.close()


def prompt(count: int, seed: int) -> list[int]:
    """Token ids at random."""
    return [int(each) for each in np.random.default_rng(seed).integers(3, VOCABULARY, count)]
