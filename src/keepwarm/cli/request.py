"""What a command line asks a model: a prompt, or messages with tools and documents."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from keepwarm.core.request import split
from keepwarm.errors import ConfigError


@dataclass(frozen=True)
class RequestOptions:
    """The inputs of `run`, `warm`, `explain` and `prove`."""

    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What the user says; '-' reads it from standard input.")
    ] = None
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None
    messages: Annotated[
        str | None,
        typer.Option(
            "--messages",
            metavar="FILE",
            help="JSON list of chat messages, or a chat request with 'messages' and 'tools'; PROMPT follows them.",
        ),
    ] = None
    tools: Annotated[str | None, typer.Option("--tools", metavar="FILE", help="JSON list of tool schemas.")] = None
    documents: Annotated[
        list[Path] | None,
        typer.Option("--documents", "--document", metavar="FILE", help="Text file; once per document."),
    ] = None
    raw: Annotated[bool, typer.Option("--raw", help="PROMPT is the model's whole input: no chat template.")] = False
    salt: Annotated[
        str | None, typer.Option("--salt", help="Keeps this request's KV apart from that of other salts.")
    ] = None

    def build(self) -> dict[str, Any]:
        """Keyword arguments of the engine's calls, JSON-ready. Raises ConfigError."""
        if self.raw:
            return self._salted({"prompt": self._raw_prompt()})
        messages, tools = self._conversation()
        request: dict[str, Any] = {"messages": messages}
        if tools is not None:
            request["tools"] = tools
        if self.documents:
            request["documents"] = [{"title": path.name, "text": _text(str(path))} for path in self.documents]
        if not (messages or tools or self.documents):
            raise ConfigError(
                "nothing to read: give PROMPT, or '-' for standard input, or --messages, --system, --tools"
            )
        return self._salted(request)

    def turn(self, session: str) -> dict[str, Any]:
        """Keyword arguments for a turn of a session: PROMPT is what the user says next, --messages the whole
        conversation. Raises ConfigError."""
        if self.raw:
            raise ConfigError("--raw goes with no --session: a turn is rendered with the chat template")
        request = self.build() | {"session": session}
        if self.messages is None:
            if self.system is not None or self.prompt is None:
                raise ConfigError(
                    "--session takes PROMPT, what the user says next, or --messages, the whole conversation; the "
                    "system prompt is the session's own"
                )
            request["prompt"] = request.pop("messages")[-1]["content"]
        return request

    def text(self) -> str | None:
        """PROMPT, or standard input for '-'."""
        return sys.stdin.read() if self.prompt == "-" else self.prompt

    def _raw_prompt(self) -> str:
        if self.prompt is None or self.system or self.messages or self.tools or self.documents:
            raise ConfigError("--raw takes a PROMPT alone, without --system, --messages, --tools or --documents")
        return self.text() or ""

    def _conversation(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        messages: list[dict[str, Any]] = []
        tools = None
        if self.messages is not None:
            given = _json(self.messages)
            if isinstance(given, dict):
                tools = _objects(given.get("tools"), self.messages, "tools") if "tools" in given else None
                given = given.get("messages")
            messages = _objects(given, self.messages, "messages")
        if self.tools is not None:
            if tools is not None:
                raise ConfigError(f"tools are given twice: in {self.messages} and in {self.tools}")
            given = _json(self.tools)
            tools = _objects(given.get("tools") if isinstance(given, dict) else given, self.tools, "tools")
        if self.system is not None:
            if messages and messages[0].get("role") == "system":
                raise ConfigError(f"a system prompt is given twice: in {self.messages} and by --system")
            messages.insert(0, {"role": "system", "content": self.system})
        if self.prompt is not None:
            if self.prompt == "-" and "-" in (self.messages, self.tools):
                raise ConfigError("only one of PROMPT, --messages and --tools can be '-': there is one standard input")
            content = sys.stdin.read() if self.prompt == "-" else self.prompt
            messages.append({"role": "user", "content": content})
        return messages, tools

    def _salted(self, request: dict[str, Any]) -> dict[str, Any]:
        return request if self.salt is None else request | {"salt": self.salt}


def refuse_call(call: dict[str, Any]) -> None:
    """Check the arguments of a call before a model is loaded for it. Raises ConfigError."""
    split(call.get("prompt"), {name: value for name, value in call.items() if name != "prompt"})


def _text(name: str) -> str:
    if name == "-":
        return sys.stdin.read()
    try:
        return Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from None


def _json(name: str) -> Any:
    try:
        return json.loads(_text(name))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None


def _objects(value: Any, name: str, what: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ConfigError(f"{name}: expected a JSON list of {what}, got {type(value).__name__}")
    return value
