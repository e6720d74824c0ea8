"""The prompt cache for mlx-lm: `KeepwarmPromptCache`, in place of `LRUPromptCache`.

mlx-lm's server asks it for each prompt, and hands a sequence over at the end of the system prompt, of the prompt and of
the answer. mlx-lm's own cache in memory is kept, under a cap: what it holds is found there, as without Keepwarm. The
store is below it.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache
from pydantic import Field, field_validator

from keepwarm.config import parse_bytes
from keepwarm.core.blocks import TokenIds, token_ids
from keepwarm.core.identity import salt_key, salt_tag
from keepwarm.core.schedule import PAGE_TOKENS
from keepwarm.errors import ConfigError, KeepwarmError
from keepwarm.integrations.kept import Kept
from keepwarm.integrations.mlx.form import Caches, Maker, Unsuitable, form_of, makers_of, position_of
from keepwarm.integrations.mlx.identity import Loaded, namespace_of
from keepwarm.integrations.mlx.memory import CacheSource, Placed, tail_of
from keepwarm.integrations.settings import StoreSettings
from keepwarm.store.admin.purge_epochs import EVERYTHING
from keepwarm.store.archive import Archive

log = logging.getLogger(__name__)

_REQUESTS = 64  # of which it is known when they began


class PromptCacheSettings(StoreSettings):
    """The store's settings, and those of this cache only."""

    max_ram: int = Field(1 << 30, description="bytes of prompts that mlx-lm's own cache keeps in this process")
    salt: str | None = Field(None, description="a tenant's secret: KV under one salt is never found under another")

    @field_validator("max_ram", mode="before")
    @classmethod
    def _ram(cls, value: int | str) -> int:
        return parse_bytes(value)


class KeepwarmPromptCache(LRUPromptCache):  # type: ignore[misc]  # the library has no types that are seen here
    """Prompts and answers in memory and on disk: verified, capped, shared with other processes.

    Use it from the thread that generates, as mlx-lm does. Failures of the store never reach a request: the prompt is
    computed. So is what the store does not take; `stats()["refused"]` counts it by reason.
    """

    def __init__(self, loaded: Loaded | Callable[[], Loaded], max_size: int = 10, **settings: Any) -> None:
        """`loaded` is the model whose prompts these are, or returns the one that is loaded at present. `max_size` is
        mlx-lm's own limit of sequences in memory. `settings` are those of `PromptCacheSettings`: `store`, `max_ram`,
        `max_disk`, `salt` and others. Raises ConfigError for unsuitable settings and StoreError for the folder.
        """
        checked = PromptCacheSettings.of(settings, "KeepwarmPromptCache")
        super().__init__(max_size, checked.max_ram)
        self.cached_by_tier: dict[str, int] = {}  # of the last prompt; mlx-lm's own cache is "memory"
        self._loaded = loaded if callable(loaded) else lambda: loaded
        self._salt = checked.salt
        self.archive = checked.open(0)
        self._model: _Model | None = None
        self._requests = _Requests()
        self._tags = {salt_tag(salt_key(checked.salt))} if checked.salt is not None else set[bytes]()
        self._purges = _Purges(self._tags)
        self.archive.on_purge(self._purges.told)
        self._asked: Counter[str] = Counter()
        self._cached: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    # ---- mlx-lm's interface ----

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Caches | None, list[int]]:
        """Return a prompt cache with the longest beginning of a prompt that memory or the store holds, and the tokens
        that are left to compute: at least one. None, and all tokens, if there is none."""
        self._requests.began(tokens, self.archive.epoch())
        if self._purges.taken():
            self.trim_to(n_sequences=0)
        found, held = self._in_memory(model, tokens)
        taken = {"memory": held} if held else {}
        named = self._named(tokens)
        if named is not None and (loaded := self._restored(model, named, held)) is not None:
            found, taken = loaded
            # The next request with this beginning has it from memory, also when mlx-lm cannot cut what it gets back.
            super().insert_cache(model, tokens[: sum(taken.values())], copy.deepcopy(found))
        self.cached_by_tier = taken
        self._asked.update(prompts=1, tokens=len(tokens))
        self._cached.update(taken)
        return found, tokens[sum(taken.values()) :]

    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: Caches, *, cache_type: str = "assistant"
    ) -> None:
        """Keep a prompt cache after these tokens in memory, and store in the background what is not stored of it."""
        epoch = self._requests.epoch_of(tokens, self.archive)
        if not self.archive.allows(epoch, self._tags):
            return  # purged since the request began
        super().insert_cache(model, tokens, prompt_cache, cache_type=cache_type)
        named = self._named(tokens)
        if named is None or (bound := self._bound(model)) is None:
            return
        try:
            bound.put(prompt_cache, named, epoch)
        except Unsuitable as reason:
            self._refuse(str(reason))

    # ---- ours ----

    def stats(self) -> dict[str, Any]:
        """Prompts and tokens that were asked for, tokens that were found by tier, what was not stored by reason, and
        the store's own sizes and counts."""
        counts = {"asked": dict(self._asked), "cached": dict(self._cached), "refused": dict(self._refused)}
        return counts | {"store": self.archive.stats()}

    def flush(self) -> None:
        """Wait until all that was handed over is on disk."""
        self.archive.flush()

    def close(self) -> None:
        """Write what is left and close the store. If this is never called, it happens when the program ends."""
        self.archive.close()

    def __enter__(self) -> KeepwarmPromptCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def purge(self) -> int:
        """Remove everything that is stored under this cache's salt, for every process, and all that this one holds in
        memory. Return how many runs there were. Raises ConfigError without a salt, and StoreError."""
        if self._salt is None:
            raise ConfigError("purge: this cache has no salt; `keepwarm purge --all` empties a store")
        self.trim_to(n_sequences=0)
        return self.archive.purge(salt_key(self._salt)).runs

    def _in_memory(self, model: Any, tokens: list[int]) -> tuple[Caches | None, int]:
        """Return what mlx-lm's own cache has, and how many tokens that serves. A token must be left to compute."""
        found, rest = super().fetch_nearest_cache(model, tokens)
        if found is None or rest:
            return found, len(tokens) - len(rest)
        if len(tokens) > 1 and can_trim_prompt_cache(found):
            trim_prompt_cache(found, 1)
            return found, len(tokens) - 1
        return None, 0

    def _restored(self, model: Any, tokens: TokenIds, held: int) -> tuple[Caches, dict[str, int]] | None:
        """Load what the store has of a prompt, if that is longer than the `held` tokens by what a load is worth."""
        least = held + PAGE_TOKENS if held else 0
        if least >= len(tokens) or (bound := self._bound(model)) is None:
            return None
        return bound.restore(tokens, least)

    def _bound(self, model: Any) -> _Model | None:
        """Return what is known of the loaded model. None if its prompts are not stored."""
        loaded = self._loaded()
        if loaded.key != model:
            self._refuse("another model is loaded")
            return None
        if self._model is None or not self._model.is_of(loaded):
            self._model = _Model(loaded, self.archive, self._salt)
        if self._model.refused is not None:
            self._refuse(self._model.refused)
            return None
        return self._model

    def _named(self, ids: Sequence[int]) -> TokenIds | None:
        """Return token ids; None if some stand for something other than a token, as mlx-lm's negative ids of images."""
        found = np.asarray(ids, np.int64)
        if not len(found):
            return None
        if found.min() >= 0:
            return token_ids(found)
        self._refuse("the prompt has images, and token ids do not name those")
        return None

    def _refuse(self, reason: str) -> None:
        if not self._refused[reason]:
            log.warning("not stored: %s", reason)
        self._refused[reason] += 1


class _Model:
    """One loaded model's prompts, in each form in which mlx-lm may hold them."""

    def __init__(self, loaded: Loaded, archive: Archive, salt: str | None) -> None:
        self._of = replace(loaded, model=weakref.ref(loaded.model))
        self.refused: str | None = None
        self._forms: list[tuple[Maker, Placed, Kept]] = []
        if loaded.draft_path is not None:
            self.refused = "there is a draft model, whose state is not stored"
            return
        try:
            for maker in makers_of(loaded.model, loaded.quantization):
                place = Placed(maker)
                kept = Kept(archive, namespace_of(loaded, maker.form), place, salt)
                self._forms.append((maker, place, kept))
        except KeepwarmError as error:
            self.refused = str(error)

    def is_of(self, loaded: Loaded) -> bool:
        """Whether this is about that model."""
        return replace(self._of, model=self._of.model()).is_same(loaded)

    def restore(self, tokens: TokenIds, above: int) -> tuple[Caches, dict[str, int]] | None:
        """Load the longest stored beginning of a prompt if it is longer than `above` tokens. Return it with its tokens
        by tier."""
        found: tuple[Caches, dict[str, int]] | None = None
        for maker, place, kept in self._forms:
            restore = kept.restore_whole if maker.form.has_tail else kept.restore
            taken = restore(tokens, above)
            if taken:
                found, above = (place.take(), taken), sum(taken.values())
        return found

    def put(self, caches: Caches, tokens: TokenIds, epoch: int) -> None:
        """Store a prompt cache. Raises Unsuitable."""
        at = position_of(caches, len(tokens))
        form = form_of(caches)
        for maker, _, kept in self._forms:
            if maker.form == form:
                kept.put(CacheSource(caches, form), tail_of(caches), tokens[:at], epoch)
                return
        raise Unsuitable("its form is not that of this model's prompts")


class _Requests:
    """When the last requests began, so that nothing is kept of one that began before a purge."""

    def __init__(self) -> None:
        self._began: deque[tuple[list[int], int]] = deque(maxlen=_REQUESTS)

    def began(self, prompt: list[int], epoch: int) -> None:
        """Note a request."""
        self._began.append((prompt[:], epoch))

    def epoch_of(self, tokens: list[int], archive: Archive) -> int:
        """Return the epoch in which the request of these tokens began: the oldest one, if several may be meant."""
        for at, (prompt, epoch) in enumerate(self._began):
            both = min(len(prompt), len(tokens))
            if prompt[:both] == tokens[:both]:
                if len(tokens) > len(prompt):  # an answer is the last that is handed over
                    del self._began[at]
                return epoch
        return min((epoch for _, epoch in self._began), default=archive.epoch())


class _Purges:
    """Whether something of ours was purged, by any process, since that was last asked."""

    def __init__(self, tags: set[bytes]) -> None:
        self._ours = tags | {EVERYTHING}
        self._told = False

    def told(self, tags: frozenset[bytes]) -> None:
        """Note a purge of these salts' data. Any thread may call it."""
        self._told = self._told or not self._ours.isdisjoint(tags)

    def taken(self) -> bool:
        """Return the answer, and forget it."""
        told, self._told = self._told, False
        return told
