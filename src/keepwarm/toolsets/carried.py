"""A set that travels with the KV of its prompt, in a bundle's note: the order of its tools belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keepwarm.core.identity import json_text
from keepwarm.errors import BundleError, KeepwarmError, PurgedMeanwhile
from keepwarm.models.schemas import checked_tools
from keepwarm.toolsets.registry import Registry
from keepwarm.toolsets.versions import Version

_NOTE = "tool_set"


def note_of(registry: Registry, name: str) -> dict[str, Any]:
    """What a bundle of the prompt called `name` says of the set it was warmed for; nothing if there is no such set."""
    versions = registry.versions(name)
    return {_NOTE: {"name": name, "version": versions[-1].to_dict()}} if versions else {}


def register_carried(
    registry: Registry, note: Mapping[str, Any], epoch: int | None = None
) -> tuple[str, Version] | None:
    """Register the set that an imported bundle brings, as the newest version of its name; None if it brings none.
    `epoch` is that of the store at which the import began (None: now).

    Raises BundleError for what is no set, StoreNotWritable, PurgedMeanwhile.
    """
    if _NOTE not in note:
        return None
    try:
        name, version = note[_NOTE]["name"], Version.from_dict(note[_NOTE]["version"])
        if version.text != json_text(checked_tools(version.tools)):
            raise BundleError("its tools are not in the form in which they are shown")
        if not set(version.ends) <= set(range(1, len(version.tools) + 1)):
            raise BundleError(f"its cuts {version.ends} are not among {len(version.tools)} tools")
        return name, registry.adopt(name, version, epoch)
    except PurgedMeanwhile:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, KeepwarmError) as error:
        raise BundleError(f"the prompt was imported, but not the tool set that came with it: {error}") from error
