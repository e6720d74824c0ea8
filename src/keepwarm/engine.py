"""The public interface of one model with its cache. `pipeline.pipeline` says how a request is answered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from keepwarm.checks import check
from keepwarm.config import EngineConfig
from keepwarm.core.identity import salt_key
from keepwarm.core.request import GenerateArgs, PromptArgs
from keepwarm.core.results import EngineStats, Explanation, Generation, Piece, WarmReport
from keepwarm.core.settings import EngineArgs
from keepwarm.models.lora_folders import settings_of
from keepwarm.pipeline.explaining import explain
from keepwarm.pipeline.pipeline import Pipeline
from keepwarm.pipeline.warming import warm
from keepwarm.runtime.adapters.registry import Adapters
from keepwarm.runtime.loader import LoadedModel, ModelSource, load
from keepwarm.sessions import Sessions
from keepwarm.store.admin.purge import Purged
from keepwarm.toolsets import ToolSet, ToolSets

log = logging.getLogger(__name__)


class Engine:
    """One model with its cache. Threads may share it; requests then take turns step by step."""

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        self.pipeline = Pipeline(model, config, Sessions)
        self._tool_sets: ToolSets | None = None
        self._making = threading.Lock()

    @classmethod
    def from_pretrained(
        cls,
        model: ModelSource,
        *,
        adapters: Mapping[str, str | Path] | None = None,
        progress: Callable[[str], None] = log.warning,
        **settings: Unpack[EngineArgs],
    ) -> Engine:
        """Load a model and open its store.

        `model` is a folder, a GGUF file, a hub id (`owner/name`, or `owner/name:Q4_K_M` for GGUF files; `HF_TOKEN` is
        honoured), `"demo"` or a loaded `(model, tokenizer)` pair; `adapters` are folders of LoRA adapters by name,
        which `Engine.adapters` loads; `settings` are the fields of `EngineConfig`; `progress` is called with what takes
        long at the first use. By default that is logged as a warning, which shows where no logging is set up. Raises
        ConfigError, ModelError and StoreError with the cure in the message.
        """
        config = EngineConfig.build(**settings)
        check(config)
        for path in (adapters or {}).values():
            settings_of(Path(path).expanduser())
        loaded = load(model, config, progress)
        for name, path in (adapters or {}).items():
            loaded.adapters.load(name, path)
        return cls(loaded, config)

    # ---- requests ----

    def generate(self, prompt: str | Sequence[int] | None = None, **arguments: Unpack[GenerateArgs]) -> Generation:
        """Answer a prompt, reusing stored KV and storing what was computed.

        Arguments are the fields of `core.request.Request` (`messages`, `tools`, `documents`, `segments`, `salt`) and of
        `core.request.Decoding` (`max_new_tokens`, `temperature`, `stop`, `reuse`, ...). With `session`, a name, the
        request is a turn of that session: `messages` are the whole conversation, a prompt is what the user says next
        (see `sessions`). Raises PromptError and ConfigError, and Overloaded when other requests take all of
        `max_device`.
        """
        return self.pipeline.generate(prompt, **arguments)

    def stream(
        self, prompt: str | Sequence[int] | None = None, **arguments: Unpack[GenerateArgs]
    ) -> Generator[Piece, None, None]:
        """Answer as `generate` does, piece by piece. The last piece carries the result. This call itself refuses a bad
        request."""
        return self.pipeline.stream(prompt, **arguments)

    def count_tokens(self, prompt: str | Sequence[int] | None = None, **arguments: Unpack[GenerateArgs]) -> int:
        """Return how many tokens `generate` would run for a prompt, even if the context window holds fewer."""
        return self.pipeline.prompts.count_tokens(prompt, **arguments)

    def warm(
        self, prompt: str | Sequence[int] | None = None, *, name: str | None = None, **arguments: Unpack[PromptArgs]
    ) -> WarmReport:
        """Compute and store the KV of a prompt's beginning, so that later prompts that begin with it hit.

        Takes the prompt arguments of `generate`. Later prompts reuse it up to the first token that differs. Where
        models run through transformers, they reuse it up to the last cut before that token: a cut of a header (system
        prompt, tools, documents), a segment or a message, or of whole steps of `EngineConfig.step` tokens. Returns when
        the KV is usable in this process; `close` (or leaving the `with` block) makes it durable. `name` labels it in
        the catalogue. With `reuse="chunks"`, and without messages or tools, nothing is computed as a prefix. Each
        document, segment and chunk of a raw prompt is then computed by itself, for reuse at any position.
        """
        return warm(self.pipeline, arguments, prompt=prompt, name=name)

    def explain(self, prompt: str | Sequence[int] | None = None, **arguments: Unpack[GenerateArgs]) -> Explanation:
        """Return what a prompt would hit, where that ends, and what differs there. Runs and stores nothing.

        Takes the arguments of `generate`, `session` included, and plans as that would at this instant. The answer
        would reuse the same tokens and give the same reason for ending there (`miss`), unless stored bytes turn out to
        be damaged when they are read, or chunks diverge too far when they are computed.
        """
        return explain(self.pipeline, prompt, arguments)

    # ---- adapters, conversations and sets ----

    @property
    def adapters(self) -> Adapters:
        """The LoRA adapters that requests may name (`generate(adapter=...)`)."""
        return self.pipeline.model.adapters

    @property
    def sessions(self) -> Sessions:
        """Conversations by name, with branches; with a store they outlive the process."""
        made = self.pipeline.turns
        assert isinstance(made, Sessions)
        return made

    @property
    def tool_sets(self) -> ToolSets:
        """The registered sets of tools, system prompts and documents; with a store they outlive the process."""
        with self._making:
            if self._tool_sets is None:
                self._tool_sets = ToolSets(self.pipeline)
            return self._tool_sets

    def tools(
        self,
        schemas: Sequence[Any] | Mapping[str, Any] = (),
        *,
        system: str | None = None,
        documents: Sequence[Any] = (),
        name: str | None = None,
        based_on: str | None = None,
        warm: bool = True,
        salt: str | None = None,
    ) -> ToolSet:
        """Register tools (OpenAI's, Anthropic's or MCP's shape) with a system prompt and documents, and warm them.

        A set that continues one of the same `name`, or `based_on` another, keeps its order and puts new and changed
        tools last, so that only what follows the unchanged head is computed. With `warm` off, nothing is computed:
        requests compute it later or, with `reuse="chunks"`, take it from the version before, moved and repaired (see
        `ToolSet.look`). A set under a `salt` is found only with that salt, and is removed when the salt is purged.
        Raises PromptError naming the tool and the path in its schema, and ConfigError.
        """
        return self.tool_sets.register(
            schemas, system=system, documents=documents, name=name, based_on=based_on, warm=warm, salt=salt
        )

    # ---- what is stored ----

    def purge(self, *salts: str) -> Purged:
        """Remove the KV, the sessions and the tool sets stored under some salts, from every tier. Nothing of them is
        left in the store's folder, and no process stores later what is under way now.

        Raises StoreError when the store refuses. Calling again, or opening the store, then finishes the work; nothing
        is stored under these salts until that is done.
        """
        return self.pipeline.archive.purge(*(salt_key(salt) for salt in salts))

    def purge_all(self) -> Purged:
        """Remove all KV, sessions and tool sets as `purge` does, under salts and under none."""
        return self.pipeline.archive.purge_all()

    def remove(self, run_id: str) -> int:
        """Remove a stored run and every run that continues it, from every tier; returns how many there were.

        Raises StoreError when the store refuses.
        """
        removed = self.pipeline.archive.remove(run_id)
        self.pipeline.forget()
        return removed

    def flush(self) -> None:
        """Wait until all that was computed is written."""
        self.pipeline.archive.flush()

    def stats(self) -> EngineStats:
        """Counters of this engine and sizes of its tiers."""
        counts = self.pipeline.counts.named()
        stored = self.pipeline.archive.stats()
        for what, number in self.pipeline.pool.stats().items():
            stored[what] = {"device": number, **stored[what]}
        return EngineStats(
            requests=counts["requests"],
            prompt_tokens=counts["prompt_tokens"],
            cached_tokens=counts["cached_tokens"],
            cached_by_tier=self.pipeline.counts.by_tier,
            constraint_tables_ms=self.pipeline.constraints.tables_ms,
            **stored | {"extra": stored["extra"] | {"chunks": self.pipeline.chunks.stats()}},
        )

    def close(self) -> None:
        """Settle sessions, write what is still queued and release the store. It may be called twice.

        An engine that is not closed by its user is closed when the program ends, within `exit_timeout` seconds. One
        that is garbage-collected before that writes what is queued in the background.
        """
        self.pipeline.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
