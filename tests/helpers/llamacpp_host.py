"""A `Llama` with a cache, asked with token ids; it tells tokens and the logits that each was chosen by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import Llama, LogitsProcessorList
from llama_cpp.llama_cache import BaseLlamaCache
from tests.helpers.llamacpp_models import VOCABULARY, WORDS

from keepwarm.integrations.llamacpp import KeepwarmCache

NEW = 6
# Of the largest logit; another token anywhere in a prompt changes logits by more. Flash attention over float16 sums in
# float16, and otherwise for one row than for many.
ROUNDING, FLASH_ROUNDING = 1e-3, 2e-2


@dataclass(frozen=True)
class Answer:
    """Chosen tokens, and the logits before each, `[tokens, vocabulary]`."""

    tokens: list[int]
    logits: np.ndarray[Any, np.dtype[np.float32]]
    cached: int
    rounding: float

    def equals(self, other: Answer) -> bool:
        return self.tokens == other.tokens and self.logits.tobytes() == other.logits.tobytes()

    def agrees(self, other: Answer) -> bool:
        """Whether the first logits are the same up to rounding, and so the answer unless two tokens were as good."""
        first, second = self.logits[0][WORDS:], other.logits[0][WORDS:]
        best = np.sort(first)[-2:]
        close = bool(np.allclose(first, second, atol=self.rounding * float(np.abs(first).max())))
        return close and (self.tokens[0] == other.tokens[0] or best[1] - best[0] < 2 * self.rounding * best[1])


class Host:
    """`cache` are settings of KeepwarmCache, a cache of the library's own, or None."""

    def __init__(self, path: Path, cache: dict[str, Any] | BaseLlamaCache | None, settings: dict[str, Any]) -> None:
        given = {"n_ctx": 512, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
        self.llm = Llama(str(path), **(given | settings))
        self.cache: Any = KeepwarmCache(self.llm, **cache) if isinstance(cache, dict) else cache
        self.llm.set_cache(self.cache)
        self._rounding = FLASH_ROUNDING if settings.get("flash_attn") else ROUNDING

    def ask(self, ids: Sequence[int], new: int = NEW) -> Answer:
        tokens: list[int] = []
        seen: list[np.ndarray[Any, np.dtype[np.float32]]] = []

        def note(given: Any, logits: Any) -> Any:
            seen.append(np.array(logits, np.float32))
            tokens.append(int(np.argmax(logits)))
            return logits

        told = LogitsProcessorList([note])
        self.llm.create_completion([*ids], max_tokens=new, temperature=0, logits_processor=told)
        return Answer(tokens, np.array(seen), getattr(self.cache, "cached_tokens", 0), self._rounding)

    def cold(self, ids: Sequence[int], new: int = NEW) -> Answer:
        """Answer from an empty context, and without a cache."""
        self.forget()
        self.llm.set_cache(None)
        try:
            return self.ask(ids, new)
        finally:
            self.llm.set_cache(self.cache)
            self.forget()

    def forget(self) -> None:
        """Empty the context, so that only the cache is left."""
        self.llm._ctx.kv_cache_clear()
        self.llm.reset()

    def flush(self) -> None:
        self.cache.flush()

    def close(self) -> None:
        if isinstance(self.cache, KeepwarmCache):
            self.cache.close()
        self.llm.close()


def prompt(count: int, seed: int) -> list[int]:
    """Token ids at random."""
    return [int(each) for each in np.random.default_rng(seed).integers(3, VOCABULARY, count)]
