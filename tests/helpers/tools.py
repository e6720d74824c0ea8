"""Tools, and the file of a set of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def tool(name: str, text: str = "does it") -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {}}, "required": ["b", "a"]}
    return {"name": name, "description": text, "inputSchema": schema}


def tools(*names: str) -> list[dict[str, Any]]:
    return [tool(name) for name in names]


def only_file(folder: Path) -> Path:
    (found,) = (folder / "toolsets").glob("*.json")
    return found


def place_tool(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    return {"name": name, "description": f"Looks up the {name} of a place.", "input_schema": schema}
