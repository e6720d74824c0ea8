"""Tool sets: tools, system prompt and documents compiled once, as one named group, and used by many requests."""

from typing import TYPE_CHECKING, Any

from keepwarm.toolsets.registry import Registry
from keepwarm.toolsets.versions import Version

if TYPE_CHECKING:
    from keepwarm.toolsets.toolset import SetReport, ToolSet, ToolSets

__all__ = ["Registry", "SetReport", "ToolSet", "ToolSets", "Version"]


def __getattr__(name: str) -> Any:  # imported on first use: `toolset` needs an engine, which loads torch
    if name in __all__:
        from keepwarm.toolsets import toolset

        return getattr(toolset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
