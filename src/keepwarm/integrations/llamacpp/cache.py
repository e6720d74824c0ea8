"""The cache for llama-cpp-python: `KeepwarmCache`, for `Llama.set_cache`.

`Llama` asks a cache for the prompt before it evaluates anything, and hands over its whole state after the answer. Here
the first puts the stored beginning straight into the context, where `Llama` then finds it: no copy of the vocabulary's
scores is made, read or stored. The second stores what the store does not hold.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
from llama_cpp import Llama, LlamaState
from llama_cpp.llama_cache import BaseLlamaCache
from pydantic import Field, field_validator

from keepwarm.config import parse_bytes
from keepwarm.core.blocks import TokenIds, common_length, token_ids
from keepwarm.core.identity import salt_key
from keepwarm.errors import ConfigError, UnsupportedModel
from keepwarm.integrations.kept import Kept
from keepwarm.integrations.llamacpp.context import Context
from keepwarm.integrations.llamacpp.form import State, Unreadable
from keepwarm.integrations.llamacpp.identity import namespace_of
from keepwarm.integrations.llamacpp.memory import StateSource
from keepwarm.integrations.settings import StoreSettings

log = logging.getLogger(__name__)

_LEAST_STEP = 64  # tokens between two snapshots of a prompt


class CacheSettings(StoreSettings):
    """The store's settings, and those of this cache only."""

    max_ram: int = Field(1 << 30, description="bytes of KV that this process keeps in RAM, above the folder")
    salt: str | None = Field(None, description="a tenant's secret: KV under one salt is never found under another")
    snapshot_tokens: int = Field(
        1024, ge=_LEAST_STEP, description="tokens from snapshot to snapshot, in models whose state cannot be cut"
    )

    @field_validator("max_ram", mode="before")
    @classmethod
    def _ram(cls, value: int | str) -> int:
        return parse_bytes(value)


class InPlace(LlamaState):  # type: ignore[misc]  # the library has no types that are seen here
    """The result of a lookup: the beginning of the prompt that is in the context now. `Llama` has nothing to load."""

    def __init__(self, tokens: TokenIds) -> None:
        super().__init__(tokens.astype(np.intc), np.empty((0, 0), np.single), len(tokens), b"", 0, 0)


class KeepwarmCache(BaseLlamaCache):  # type: ignore[misc]  # the same
    """Prompts and answers of one `Llama` on disk and in RAM: verified, capped, shared with other processes.

    A lookup changes the `Llama`: the longest stored beginning of the prompt is put into its context. So use it from the
    thread that generates, as `Llama` does. Failures of the store never reach a request: the prompt is computed.
    """

    def __init__(self, llm: Llama, **settings: Any) -> None:
        """`settings` are those of `CacheSettings`: `store`, `max_ram`, `max_disk`, `salt` and others.

        Evaluates a few tokens if the context is empty, to see in which form this build writes states. Raises
        ConfigError for unsuitable settings, UnsupportedModel for a model whose KV does not belong to its token ids, and
        StoreError for the folder.
        """
        checked = CacheSettings.of(settings, "KeepwarmCache")
        if not _is_text(llm):
            raise UnsupportedModel(
                "the chat handler puts images or audio into the context, and token ids do not name those: "
                "use KeepwarmCache with text, and Llama without a cache for the rest"
            )
        super().__init__(checked.max_disk)
        self.cached_tokens = 0  # of the last prompt: restored from the store
        self.prompt_tokens = 0
        self.cached_by_tier: dict[str, int] = {}
        self._llm = weakref.ref(llm)  # the Llama holds its cache
        self._every = checked.snapshot_tokens
        self._context = Context(llm)
        self._namespace = namespace_of(llm, self._context.form)
        self.archive = checked.open(checked.max_ram)
        self._kept = Kept(self.archive, self._namespace, self._context, checked.salt)
        self._salt = checked.salt
        self._epoch = self.archive.epoch()

    # ---- the library's interface ----

    @property
    def cache_size(self) -> int:
        """Bytes of KV in the store, of all its users. Without a folder these are in RAM."""
        sizes = self.archive.stats()["bytes"]
        return int(sizes.get("disk", sizes["ram"]))

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        """Put the longest stored beginning of a prompt into the context, if it is longer than the one that is there.
        Return what is there then. Raises KeyError if that is nothing."""
        self.cached_tokens, self.cached_by_tier, self.prompt_tokens = 0, {}, len(key)
        self._epoch = self.archive.epoch()
        llm, tokens = self._usable(), _named(key)
        if llm is None or tokens is None:
            raise KeyError("these tokens do not name KV")
        self._prepare(llm, tokens)
        reached = self._in_memory(llm, tokens)
        if not reached:
            raise KeyError("no beginning of this prompt is stored")
        return InPlace(tokens[:reached])

    def __contains__(self, key: Sequence[int]) -> bool:
        """Whether any beginning of these tokens is stored. Changes nothing."""
        tokens = _named(key)
        return tokens is not None and self._kept.find(tokens)[1] > 0

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        """Store a state after an answer. The state itself names its tokens: the last token of the key was not
        evaluated."""
        if self._usable() is None:
            return
        tokens = _named(value.input_ids[: value.n_tokens])
        if tokens is not None:
            data = np.frombuffer(value.llama_state, np.uint8)
            self._keep(tokens, partial(self._context.handed_over, data, tokens))

    # ---- ours ----

    def flush(self) -> None:
        """Wait until all that was handed over is on disk."""
        self.archive.flush()

    def close(self) -> None:
        """Write what is left and close the store. If this is never called, it happens when the program ends."""
        self.archive.close()

    def __enter__(self) -> KeepwarmCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def purge(self) -> int:
        """Remove everything that is stored under this cache's salt, for every process. Return how many runs there were.
        Raises ConfigError without a salt, and StoreError."""
        if self._salt is None:
            raise ConfigError("purge: this cache has no salt; `keepwarm purge --all` empties a store")
        return self.archive.purge(salt_key(self._salt)).runs

    def _usable(self) -> Llama | None:
        llm = self._llm()
        return llm if llm is not None and _is_text(llm) else None

    @staticmethod
    def _in_memory(llm: Llama, tokens: TokenIds) -> int:
        """Return how many leading tokens of the prompt are in the context."""
        return common_length(token_ids(llm._input_ids), tokens)

    def _prepare(self, llm: Llama, tokens: TokenIds) -> None:
        held = self._in_memory(llm, tokens)
        if not self._context.form.has_tail:
            self._count(self._kept.restore(tokens, held))
            return
        # The context's content cannot be cut, so it serves as a whole or not at all.
        held = held if held == llm.n_tokens < len(tokens) else 0
        taken = self._kept.restore_whole(tokens, held)
        self._count(taken)
        if not held and not taken:
            self._context.clear()
        self._advance(llm, tokens)

    def _count(self, taken: dict[str, int]) -> None:
        self.cached_by_tier, self.cached_tokens = taken, sum(taken.values())

    def _advance(self, llm: Llama, tokens: TokenIds) -> None:
        """Evaluate a prompt up to its last token, and store its state on the way. `Llama` hands over its state only
        after the answer, and that state cannot be cut back to the prompt."""
        last = len(tokens) - 1
        grid = range(self._every, last - _LEAST_STEP + 1, self._every)
        for at in (*grid, last):
            if at > llm.n_tokens:
                llm.eval(tokens[llm.n_tokens : at].tolist())
                self._keep(tokens[:at], self._context.now)

    def _keep(self, tokens: TokenIds, read: Callable[[], State | None]) -> None:
        """Hand a state after `tokens` to the store."""
        try:
            state = read()
        except Unreadable as error:
            log.warning("%d tokens are not stored: %s", len(tokens), error)
            return
        if state is not None and state.form == self._context.form:
            self._kept.put(StateSource(state), state.tail, tokens, self._epoch)
        else:
            log.warning("%d tokens are not stored: llama.cpp wrote their state in another form", len(tokens))


def _named(ids: Sequence[int]) -> TokenIds | None:
    """Return token ids; None if there are none, or if some stand for something other than a token."""
    found = np.asarray(ids, np.int64)
    return token_ids(found) if len(found) and found.min() >= 0 else None


def _is_text(llm: Llama) -> bool:
    """Whether the context holds nothing but tokens of text."""
    return not hasattr(llm.chat_handler, "mtmd_ctx")
