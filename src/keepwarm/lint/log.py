"""Read request logs: OpenAI's and Anthropic's bodies, bare, as batch lines, or wrapped by the logger."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

OPENAI, ANTHROPIC = "openai", "anthropic"

_BODIES = ("body", "request", "params", "payload", "input_body", "request_body")
_ANSWERS = ("response", "output", "result", "response_body")
_TIMES = ("timestamp", "time", "ts", "created_at", "created", "start_time", "request_time", "@timestamp", "date")
_PADDING = "\ufeff \t\r\n\x1e"  # a byte order mark; white space; the separator of RFC 7464
_MILLISECONDS = 1e11  # larger numbers are milliseconds: as seconds, this is the year 5138


@dataclass(frozen=True)
class Usage:
    """Prompt tokens as the vendor billed them."""

    prompt: int
    cached: int
    written: int = 0


@dataclass(frozen=True)
class Logged:
    """One request of a log."""

    line: int  # counted from 1
    vendor: str
    body: Mapping[str, Any]
    at: float | None  # seconds since the epoch
    usage: Usage | None = None

    @property
    def model(self) -> str:
        return str(self.body.get("model") or "unknown")


@dataclass(frozen=True)
class Broken:
    """A line that is not a request."""

    line: int
    why: str


def read_log(text: str, vendor: str | None = None) -> tuple[list[Logged], list[Broken]]:
    """Return a log's requests, by time if every one has a time, else in the log's order, and its unusable lines.

    A log has one JSON object per line, or is one JSON list of them (numbered like lines). `vendor` decides whose rules
    apply when a request does not tell. A line that cannot be used is reported, not raised.
    """
    requests: list[Logged] = []
    broken: list[Broken] = []
    for number, entry in enumerate(_entries(text), start=1):
        if isinstance(entry, str) and not entry.strip(_PADDING):
            continue
        try:
            loaded = _loaded(entry) if isinstance(entry, str) else entry
            requests.append(_logged(number, loaded, vendor))
        except json.JSONDecodeError as error:
            broken.append(Broken(number, f"not JSON: {error.msg} at character {error.pos}"))
        except RecursionError:
            broken.append(Broken(number, "not usable: nested too deeply"))
        except ValueError as error:
            broken.append(Broken(number, str(error)))
    if all(request.at is not None for request in requests):
        requests.sort(key=lambda request: request.at or 0.0)
    return requests, broken


def _entries(text: str) -> Sequence[Any]:
    if text.lstrip(_PADDING).startswith("["):
        with suppress(ValueError, RecursionError):
            whole = _loaded(text)
            if isinstance(whole, list):
                return whole
    return text.split("\n")  # other line separators may stand inside JSON strings


def _loaded(text: str) -> Any:
    """Return the JSON value. Lone surrogates, which no output can show, become question marks."""
    value = json.loads(text.strip(_PADDING))
    if "\\ud" in text.lower():
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value


def _logged(number: int, entry: Any, vendor: str | None) -> Logged:
    if not isinstance(entry, dict):
        raise ValueError(f"expected a JSON object, got {type(entry).__name__}")
    body = _body(entry)
    if body is None:
        raise ValueError("no request: expected 'messages' or 'input', bare or under 'body', 'request' or 'params'")
    wrong = [key for key in ("messages", "tools") if body.get(key) is not None and not _objects(body[key])]
    if wrong:
        raise ValueError(f"'{wrong[0]}' must be a list of objects")
    whose = _vendor(entry, body) or vendor or OPENAI
    return Logged(number, whose, body, _time(entry), _usage(entry, whose))


def _body(entry: Mapping[str, Any], depth: int = 0) -> Mapping[str, Any] | None:
    if isinstance(entry.get("messages"), list):
        return entry
    for key in _BODIES:
        inner = entry.get(key)
        if isinstance(inner, str):  # a body logged as text
            try:
                inner = json.loads(inner)
            except ValueError:
                continue
        if isinstance(inner, dict) and depth < 3 and (found := _body(inner, depth + 1)) is not None:
            return found
    return entry if isinstance(entry.get("input"), str | list) else None


def _objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _vendor(entry: Mapping[str, Any], body: Mapping[str, Any]) -> str | None:
    """Return the vendor of a request, from what only that vendor's have; None when nothing tells."""
    said = str(entry.get("vendor") or entry.get("provider") or "").lower()
    where = said + " " + str(entry.get("url") or entry.get("path") or entry.get("endpoint") or "").lower()
    model = str(body.get("model") or "").lower()
    if ANTHROPIC in where or "/v1/messages" in where or "claude" in model:
        return ANTHROPIC
    if OPENAI in where or "/completions" in where or "/responses" in where:
        return OPENAI
    if model.startswith(("gpt-", "o1", "o3", "o4", "chatgpt", "openai/")):
        return OPENAI
    tools = body.get("tools") or ()
    if "system" in body or "anthropic_version" in body or any("input_schema" in tool for tool in tools):
        return ANTHROPIC
    if "params" in entry and "custom_id" in entry:
        return ANTHROPIC
    if any("function" in tool for tool in tools) or any(
        message.get("role") in ("system", "developer", "tool") for message in body.get("messages") or ()
    ):
        return OPENAI
    return None


def _time(entry: Mapping[str, Any]) -> float | None:
    for key in _TIMES:
        value = entry.get(key)
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, str):
            try:
                parsed = datetime.fromisoformat(value)
            except ValueError:
                try:
                    value = float(value)
                except ValueError:
                    continue
            else:
                return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, int | float) and math.isfinite(value) and value > 0:
            return float(value) / (1000 if value > _MILLISECONDS else 1)
    return None


def _usage(entry: Mapping[str, Any], vendor: str) -> Usage | None:
    found = entry.get("usage")
    for key in _ANSWERS:
        answer = entry.get(key)
        if not isinstance(found, dict) and isinstance(answer, dict):
            inner = answer.get("body")
            found = answer.get("usage") or (inner.get("usage") if isinstance(inner, dict) else None)
    if not isinstance(found, dict):
        return None
    details = found.get("prompt_tokens_details") or found.get("input_tokens_details") or {}
    if vendor == ANTHROPIC and "input_tokens" in found:
        read, written = _count(found, "cache_read_input_tokens"), _count(found, "cache_creation_input_tokens")
        return Usage(_count(found, "input_tokens") + read + written, read, written)
    prompt = _count(found, "prompt_tokens") or _count(found, "input_tokens")
    cached = _count(details, "cached_tokens") if isinstance(details, dict) else 0
    return Usage(prompt, min(cached, prompt)) if prompt else None


def _count(found: Mapping[str, Any], key: str) -> int:
    value = found.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
