"""Write a set into the note of the bundle with its prompt's KV, and read it back. The note keeps the tools' order."""

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
    """Return the note that describes the set called `name`, for a bundle of its prompt; empty if there is none."""
    versions = registry.versions(name)
    return {_NOTE: {"name": name, "version": versions[-1].to_dict()}} if versions else {}


def register_carried(
    registry: Registry, note: Mapping[str, Any], epoch: int | None = None
) -> tuple[str, Version] | None:
    """Register the set in an imported bundle's note, as the newest version of its name; return None if there is none.
    `epoch` is the store's when the import began (None: now).

    Raises BundleError for an invalid set, StoreNotWritable, PurgedMeanwhile.
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
