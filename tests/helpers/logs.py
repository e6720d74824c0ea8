"""Small request logs as applications write them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from typing import Any

SYSTEM = "You are the support assistant of a ferry line. " + " ".join(
    f"Rule {i}: be polite, look the timetable up before you promise anything, and name the pier." for i in range(90)
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks up {name} in the ferry line's own system.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "day": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
    for name in ("timetable", "weather", "prices", "lost_property", "seats", "piers", "menus", "refunds")
]
GPT, CLAUDE = "gpt-4.1-2025-04-14", "claude-sonnet-4-5-20250929"


def openai(question: str, system: str = SYSTEM, tools: Any = TOOLS, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": GPT, "messages": messages, "tools": copy.deepcopy(tools)} | more


def anthropic(question: str, system: str = SYSTEM, ttl: str | None = None, **more: Any) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "text", "text": system}
    if ttl:
        block["cache_control"] = {"type": "ephemeral", "ttl": ttl}
    messages = [{"role": "user", "content": question}]
    return {"model": CLAUDE, "max_tokens": 100, "system": [block], "messages": messages} | more


def at(second: float, body: dict[str, Any]) -> dict[str, Any]:
    return {"timestamp": 1763700000 + second, "request": body}


def text(entries: Iterable[Any]) -> str:
    return "\n".join(entry if isinstance(entry, str) else json.dumps(entry, ensure_ascii=False) for entry in entries)
