"""The versions of a registered set. A new version keeps as much as it can of an earlier one's order and cuts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keepwarm.core.identity import json_digest, json_text
from keepwarm.core.tools import in_order_of, tool_name, tool_text, tools_hash


@dataclass(frozen=True)
class Version:
    """A set's content in the order in which it is rendered. `ends` are numbers of leading tools, each with a cut after
    it."""

    number: int
    tools: tuple[dict[str, Any], ...]  # as they are shown to the model
    system: str | None = None
    documents: tuple[Any, ...] = ()
    ends: tuple[int, ...] = ()
    created: float = 0.0  # seconds since the epoch
    hash: str = field(init=False)  # of the content; independent of the order of tools and of their keys

    def __post_init__(self) -> None:
        content = [tools_hash(self.tools), self.system, list(self.documents)]
        object.__setattr__(self, "hash", json_digest("keepwarm group 1", content))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool_name(tool) for tool in self.tools)

    @property
    def text(self) -> str:
        """The tools as they are shown to the model, in their order."""
        return json_text(self.tools)

    def prompt(self, turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return arguments of `Engine.generate` that begin with this version; `turns` are the messages after it."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        prompt: dict[str, Any] = {"messages": [*system, *turns]}
        if self.tools:
            prompt["tools"] = [
                {**tool, "cache_control": {"type": "ephemeral"}} if number in self.ends else tool
                for number, tool in enumerate(self.tools, 1)
            ]
            prompt["tool_order"] = "as_sent"
        if self.documents:
            prompt["documents"] = list(self.documents)
        return prompt

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("number", "tools", "system", "documents", "ends", "created")}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Version:
        lists = {name: tuple(value[name]) for name in ("tools", "documents", "ends")}
        return cls(value["number"], system=value["system"], created=value["created"], **lists)


@dataclass(frozen=True)
class Changes:
    """Names of tools, by how they changed between two versions."""

    kept: tuple[str, ...]
    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]


def next_version(
    tools: Sequence[dict[str, Any]],
    system: str | None,
    documents: Sequence[Any],
    base: Version | None = None,
    number: int = 1,
) -> Version:
    """Return the version with this content. `tools` are as shown to the model, in the order in which they were sent.

    With a base, unchanged tools keep its order, also of their keys; new and changed ones come last. What was edited
    once is likely to be edited again, and an edit at the end leaves the KV before it valid. A changed tool's keys keep
    their order, too. There is a cut where the tools end, and the base's cuts are kept up to the first tool that is gone
    or changed.
    """
    ends: tuple[int, ...] = ()
    if base is None:
        ordered = list(tools)
    else:
        texts = {tool_name(tool): tool_text(tool) for tool in tools}
        kept = [tool for tool in base.tools if texts.get(tool_name(tool)) == tool_text(tool)]
        names, before = set(map(tool_name, kept)), {tool_name(tool): tool for tool in base.tools}
        new = [tool for tool in tools if tool_name(tool) not in names]
        ordered = [*kept, *(in_order_of(tool, before.get(tool_name(tool), {})) for tool in new)]
        same = next((n for n, (a, b) in enumerate(zip(base.tools, kept, strict=False)) if a is not b), len(kept))
        ends = tuple(end for end in base.ends if end <= same) if base.system == system else ()
    return Version(
        number, tuple(ordered), system, tuple(documents), _merged((*ends, len(ordered))), created=time.time()
    )


def changes(before: Version | None, after: Version) -> Changes:
    earlier = {tool_name(tool): tool_text(tool) for tool in before.tools} if before else {}
    now = {tool_name(tool): tool_text(tool) for tool in after.tools}
    return Changes(
        kept=tuple(name for name in now if earlier.get(name) == now[name]),
        added=tuple(name for name in now if name not in earlier),
        changed=tuple(name for name in now if name in earlier and earlier[name] != now[name]),
        removed=tuple(name for name in earlier if name not in now),
    )


def _merged(ends: Sequence[int]) -> tuple[int, ...]:
    """Keep only ends whose gaps shrink, so that there are few: join a gap with the one before if it is as long.

    Every cut costs a prefill step. A set that grows n times by one tool has about log2(n) cuts, and each of its tools
    is recomputed about log2(n) times in all.
    """
    kept: list[int] = []
    for end in ends:
        if end in (0, *kept[-1:]):
            continue
        while kept and kept[-1] - (kept[-2] if len(kept) > 1 else 0) <= end - kept[-1]:
            kept.pop()
        kept.append(end)
    return tuple(kept)
