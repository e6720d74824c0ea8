"""Tells each coding agent which server and model to use, by its environment and its arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from keepwarm.errors import ConfigError

_WINDOW = 32_768  # tokens; for agents that need the number before the server can be asked
_ANSWER = 8_192  # the most tokens of an answer


@dataclass(frozen=True)
class Endpoint:
    """A server, as an agent sees it."""

    url: str  # without /v1
    model: str
    key: str = "none"  # any text, if the server needs no key
    window: int = _WINDOW  # tokens of prompt and answer together

    @property
    def answer(self) -> int:
        """The most tokens that an agent should ask for."""
        return min(_ANSWER, self.window // 2)

    @property
    def openai(self) -> str:
        """The address of OpenAI's protocol."""
        return f"{self.url}/v1"


@dataclass(frozen=True)
class Start:
    """How an agent is started."""

    arguments: tuple[str, ...] = ()  # they come before those that the user passes on
    environment: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()  # variables to remove, or the agent would send the user's own key to the server


@dataclass(frozen=True)
class Agent:
    """A program, how it is installed, and how it is started against a server."""

    program: str
    install: str
    start: Callable[[Endpoint], Start]


def _qwen_code(server: Endpoint) -> Start:
    settings = {"OPENAI_BASE_URL": server.openai, "OPENAI_API_KEY": server.key, "OPENAI_MODEL": server.model}
    return Start(("--auth-type", "openai"), settings)


def _opencode(server: Endpoint) -> Start:
    limit = {"context": server.window, "output": server.answer}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": server.openai, "apiKey": server.key},
        "models": {server.model: {"limit": limit}},
    }
    settings = {"provider": {"keepwarm": provider}, "model": f"keepwarm/{server.model}"}
    return Start((), {"OPENCODE_CONFIG_CONTENT": json.dumps(settings)})  # it overrides the project's own file


def _codex(server: Endpoint) -> Start:
    provider = {"name": "Keepwarm", "base_url": server.openai, "wire_api": "responses", "env_key": "KEEPWARM_API_KEY"}
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in provider.items())
    settings = {
        "model": json.dumps(server.model),
        "model_provider": '"keepwarm"',
        "model_context_window": str(server.window),
        "model_providers.keepwarm": f"{{ {table} }}",
    }
    arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    return Start(tuple(arguments), {"KEEPWARM_API_KEY": server.key})


def _claude(server: Endpoint) -> Start:
    settings = {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_AUTH_TOKEN": server.key}
    settings |= dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"), server.model)
    # else it takes an unknown model's window for a million tokens, of which it keeps 32,000 free for an answer
    settings["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(server.window)
    settings["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(server.answer)
    return Start((), settings, removed=("ANTHROPIC_API_KEY",))


def _aider(server: Endpoint) -> Start:
    settings = dict.fromkeys(("OPENAI_API_BASE", "OPENAI_BASE_URL"), server.openai) | {"OPENAI_API_KEY": server.key}
    return Start(("--model", f"openai/{server.model}"), settings)


AGENTS = {
    "qwen-code": Agent("qwen", "npm install -g @qwen-code/qwen-code", _qwen_code),
    "opencode": Agent("opencode", "npm install -g opencode-ai", _opencode),
    "codex": Agent("codex", "npm install -g @openai/codex", _codex),
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "aider": Agent("aider", "python -m pip install aider-install && aider-install", _aider),
}


def agent_of(name: str) -> Agent:
    """Return the agent of that name. Raises ConfigError, which lists them."""
    if name not in AGENTS:
        raise ConfigError(f"no agent is called {name!r}; known are {', '.join(AGENTS)}")
    return AGENTS[name]
