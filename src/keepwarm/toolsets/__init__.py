"""Tool sets: tools, system prompt and documents compiled once, as one named group, and used by many requests."""

from keepwarm.toolsets.registry import Registry
from keepwarm.toolsets.toolset import SetReport, ToolSet, ToolSets
from keepwarm.toolsets.versions import Version

__all__ = ["Registry", "SetReport", "ToolSet", "ToolSets", "Version"]
