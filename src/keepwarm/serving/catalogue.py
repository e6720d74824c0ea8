"""The public catalogue: tools, system prompts and documents that the operator declares public.

Tenants share the KV of these headers, and nothing else. A request whose whole header is an entry of the catalogue,
shown in the same order, puts its salt after the header. Any other request is private from its first token on. A request
is always shown as it was sent, so the same tools in another order are not an entry.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from keepwarm.config import ToolOrder
from keepwarm.core.identity import json_text
from keepwarm.core.tools import shown_tools, tool_list
from keepwarm.errors import ConfigError, PromptError
from keepwarm.models.schemas import checked_tools
from keepwarm.serving.settings import CatalogueEntry

if TYPE_CHECKING:  # they load torch
    from keepwarm.engine import Engine
    from keepwarm.toolsets import Version

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # words that say nothing of a tenant
PREFIX = "public "  # of an entry's name in the store; no tenant's set is called so


@dataclass(frozen=True)
class Catalogue:
    """Entries by name, shown in the service's `order` of tools."""

    entries: Mapping[str, Version] = field(default_factory=dict)
    order: ToolOrder = "as_sent"

    @classmethod
    def read(cls, given: Sequence[CatalogueEntry], order: ToolOrder) -> Catalogue:
        """Read the entries. Raises ConfigError naming the entry and what is wrong with it."""
        from keepwarm.toolsets.versions import next_version

        entries: dict[str, Version] = {}
        for entry in given:
            try:
                tools = [] if entry.tools is None else json.loads(entry.tools.expanduser().read_text(encoding="utf-8"))
                documents = [path.expanduser().read_text(encoding="utf-8") for path in entry.documents]
                entries[entry.name] = next_version(checked_tools(tools, order), entry.system, documents)
            except (OSError, ValueError, PromptError) as error:
                raise ConfigError(f"the catalogue's entry {entry.name!r} cannot be used: {error}") from None
        return cls(entries, order)

    def warm(self, engine: Engine) -> None:
        """Compute the entries, under no salt."""
        from keepwarm.toolsets import ToolSet

        for name, version in self.entries.items():
            ToolSet(engine.tool_sets, PREFIX + name, version).warm()

    def find(self, arguments: Mapping[str, Any]) -> Version | None:
        """Return the entry that equals a request's whole header (tools, system prompt, documents), if there is one."""
        if not self.entries or arguments.get("messages") is None:
            return None
        if not all(isinstance(value, bool) or value in _EFFORTS for value in _variables(arguments)):
            return None  # it may be a text of the tenant's, and the template may show it in the header
        messages = arguments["messages"]
        system = None
        if messages and messages[0].get("role") == "system":
            if messages[0].get("name") is not None:
                return None  # a text of the tenant's, too
            system = messages[0].get("content")
        documents = arguments.get("documents") or ()
        if not (arguments.get("tools") or system or documents) or not (system is None or isinstance(system, str)):
            return None
        try:
            tools = tool_list(arguments.get("tools") or ())
            if len(tools) not in {len(entry.tools) for entry in self.entries.values()}:
                return None
            shown = shown_tools(tools, arguments.get("tool_order") or self.order)
            return self._shown.get(json_text([shown, system or None, list(documents)]))
        except (PromptError, TypeError, ValueError):
            return None  # the engine says what is wrong with it

    @cached_property
    def _shown(self) -> dict[str, Version]:
        """Entries by what they show."""
        return {
            json_text([entry.tools, entry.system or None, entry.documents]): entry for entry in self.entries.values()
        }


def _variables(arguments: Mapping[str, Any]) -> Iterable[Any]:
    """Return the values that a request gives to variables of the chat template."""
    return (arguments.get("template_args") or {}).values()
