"""A registered set on an engine: warmed once, it begins many requests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from keepwarm.config import store_key
from keepwarm.core.identity import json_digest
from keepwarm.core.request import Decoding
from keepwarm.core.results import Explanation, Generation, Piece
from keepwarm.core.spans import Reuse
from keepwarm.core.tools import ToolCall
from keepwarm.errors import ConfigError
from keepwarm.pipeline.explaining import explain
from keepwarm.pipeline.pipeline import Pipeline
from keepwarm.pipeline.warming import warm
from keepwarm.store.runfile.crypto import StoreKey
from keepwarm.toolsets.registry import Registry
from keepwarm.toolsets.versions import Changes, Version, changes


@dataclass(frozen=True)
class SetReport:
    """The outcome of warming a set."""

    name: str
    version: int
    tokens: int  # of the set's prompt
    recomputed_tokens: int  # by this call
    reused_tokens: int  # stored already
    seconds: float
    changes: Changes  # of tools, since the version this one continues
    blended_tokens: int = 0  # among the reused ones: after an edit, from the KV of an earlier version

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class ToolSet:
    """One version of a set. Every request through it begins with its system prompt, tools and documents."""

    def __init__(
        self, sets: ToolSets, name: str, version: Version, base: Version | None = None, salt: str | None = None
    ) -> None:
        self.sets, self.pipeline = sets, sets.pipeline
        self.name = name
        self.version = version
        self.salt = salt  # the set's; requests are under it, unless they give their own
        self._base = base
        self.report: SetReport | None = None  # of the last `warm` or `look`

    @property
    def hash(self) -> str:
        """Hash of the content: tools, system prompt, documents; independent of the order of tools and of their keys."""
        return self.version.hash

    @property
    def key(self) -> str:
        """Hash of the content and of everything that determines its KV: model, arithmetic, chat template."""
        namespace = self.pipeline.model.namespace()
        return json_digest(
            "keepwarm set key 1", [self.hash, namespace.exact_root.hex(), self.pipeline.adapter.identity]
        )

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools as they are shown to the model, in the set's order."""
        return list(self.version.tools)

    def warm(self, *, salt: str | None = None, public: bool = False, epoch: int | None = None) -> SetReport:
        """Compute the part of the set's KV that is not stored yet. After an edit, that is all after the unchanged head.

        The KV is under the set's salt, under `salt` if given, or under none if `public`. Pass `epoch` (from
        `Archive.epoch`) if the work began earlier.
        """
        under = None if public else salt or self.salt
        given: Any = self.version.prompt(()) | {"salt": under}
        done = warm(self.pipeline, given, epoch, name=self.name)
        return self._reported(done.tokens, done.reused_tokens, done.seconds)

    def look(self, *, salt: str | None = None) -> SetReport:
        """Report how many of the set's tokens a request with `reuse="chunks"` reuses, moves (`blended_tokens`) and
        computes. Computes nothing.

        Until a changed set is warmed, KV after the edit is moved from the earlier version's and repaired. Each answer
        is then labelled `blended`, says how many tokens were moved and repaired, and stores none.
        """
        started = time.perf_counter()
        self.pipeline.archive.flush()  # a lookup does not find what is still queued for the store
        tokens = len(self.pipeline.prompts.compiled(None, self.version.prompt(())).tokens)
        found = self.explain(".", salt=salt or self.salt, reuse="chunks")
        blended = sum(hit.end - hit.start for hit in found.chunks)
        return self._reported(tokens, found.cached_tokens, time.perf_counter() - started, blended)

    def _reported(self, tokens: int, reused: int, seconds: float, blended: int = 0) -> SetReport:
        made = changes(self._base, self.version)
        self.report = SetReport(self.name, self.version.number, tokens, tokens - reused, reused, seconds, made, blended)
        return self.report

    def _earlier(self) -> list[Version]:
        """Return the versions of which this one is an edit, the last one first."""
        kept = self.sets.registry.versions(self.name, self.salt)
        earlier = [version for version in reversed(kept) if version.number < self.version.number]
        if self._base is not None and self._base not in earlier:
            earlier.append(self._base)
        return earlier

    def generate(
        self, prompt: str | None = None, *, messages: Sequence[Mapping[str, Any]] | None = None, **arguments: Any
    ) -> Generation:
        """Answer a question, or a conversation's next turn, with this set. Other arguments: see `Engine.generate`."""
        return self.pipeline.generate(**self.request(prompt, messages=messages, **arguments))

    def stream(
        self, prompt: str | None = None, *, messages: Sequence[Mapping[str, Any]] | None = None, **arguments: Any
    ) -> Iterator[Piece]:
        """Do what `generate` does, and yield the answer piece by piece."""
        return self.pipeline.stream(**self.request(prompt, messages=messages, **arguments))

    def explain(
        self, prompt: str | None = None, *, messages: Sequence[Mapping[str, Any]] | None = None, **arguments: Any
    ) -> Explanation:
        """Explain what a request with this set would reuse."""
        return explain(self.pipeline, None, self.request(prompt, messages=messages, **arguments))

    def calls(self, answer: str) -> list[ToolCall]:
        """Return the calls of this set's tools in an answer's text."""
        return self.pipeline.adapter.parse_tool_calls(answer, self.tools)

    def request(
        self, prompt: str | None = None, *, messages: Sequence[Mapping[str, Any]] | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Return arguments of `Engine.generate` for a question, or a conversation's next turn, with this set.

        With `reuse="chunks"` they also name the earlier versions: see `look`.
        """
        if (prompt is None) == (messages is None):
            raise ConfigError("pass either a question or messages=")
        if theirs := sorted({"tools", "documents", "tool_order", "segments"} & set(arguments)):
            raise ConfigError(f"{', '.join(theirs)}: the set brings its own; register another set, or use the engine")
        turns = [{"role": "user", "content": prompt}] if messages is None else list(messages)
        if turns and turns[0].get("role") == "system":
            if turns[0].get("content") != self.version.system:
                raise ConfigError("the set has a system prompt of its own, or none: leave the system message out")
            turns = turns[1:]
        if Decoding(reuse=arguments.get("reuse")).reuse_mode(self.pipeline.config.reuse) is Reuse.CHUNKS:
            arguments["bases"] = [version.prompt(()) for version in self._earlier()]
        own: dict[str, Any] = {} if self.salt is None else {"salt": self.salt}
        return self.version.prompt(turns) | own | arguments


class ToolSets:
    """The sets of one engine: `Engine.tools` registers and warms here."""

    def __init__(self, pipeline: Pipeline) -> None:
        secret = store_key(pipeline.config.store_key_file) if pipeline.config.store is not None else None
        self.pipeline = pipeline
        key = None if secret is None else StoreKey(secret)
        self.registry = Registry(pipeline.config.store, key, pipeline.archive.epochs, pipeline.archive.room)
        pipeline.on_purge.append(self.registry.purged)

    def register(
        self,
        tools: Sequence[Any] | Mapping[str, Any] = (),
        *,
        system: str | None = None,
        documents: Sequence[Any] = (),
        name: str | None = None,
        based_on: str | None = None,
        warm: bool = True,
        salt: str | None = None,
        epoch: int | None = None,
    ) -> ToolSet:
        """Register a set (see `Registry.register`) and warm it; `ToolSet.report` then says what was recomputed.

        Without `warm` nothing is computed; `ToolSet.look` then says what requests will reuse. A set under a salt is
        found only with it, and a purge of the salt removes the set. For `epoch` see `ToolSet.warm`.
        """
        epoch = self.pipeline.archive.epoch() if epoch is None else epoch
        name, version, base = self.registry.register(
            tools, system=system, documents=documents, name=name, based_on=based_on, salt=salt, epoch=epoch
        )
        found = ToolSet(self, name, version, base, salt)
        if warm:
            found.warm(epoch=epoch)
        return found

    def get(self, name: str, version: int | None = None, *, salt: str | None = None) -> ToolSet:
        """Return a set registered by this or an earlier process. Raises ConfigError for an unknown name."""
        return ToolSet(self, name, self.registry.get(name, version, salt=salt), salt=salt)

    def names(self, salt: str | None = None) -> tuple[str, ...]:
        """Return the names of the sets under a salt (None: under none)."""
        return self.registry.names(salt)

    def remove(self, name: str, salt: str | None = None) -> bool:
        return self.registry.remove(name, salt)
