"""The clients: how each is asked a first question, and how it goes on with a conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.install import PACKAGES

from keepwarm.cli.agents import AGENTS, Endpoint


@dataclass(frozen=True)
class Client:
    """`{}` in the arguments is the question."""

    name: str
    package: str
    first: tuple[str, ...] = ("{}",)
    then: tuple[str, ...] = ("--continue", "{}")  # in the same home and project
    environment: Mapping[str, str] = field(default_factory=dict)  # what runs it without a terminal
    behind: int = 0  # tokens that it puts behind every question, so that they cannot be reused
    refused: bool = False  # whether it first asks for what is refused here, and then goes without
    longest: int = 256  # tokens of an answer: a small model does not always find an end

    @property
    def version(self) -> str:
        """The pinned one."""
        folder = PACKAGES / self.name
        if (folder / "package.json").exists():
            return str(json.loads((folder / "package.json").read_text())["dependencies"][self.package])
        found = re.search(
            rf"^{re.escape(self.package)}==(\S+)", (folder / "requirements.txt").read_text(), re.MULTILINE
        )
        assert found is not None
        return found[1]

    def command(self, installed: Path, server: Endpoint, question: str, then: bool) -> tuple[list[str], dict[str, str]]:
        """Return what is run, and its variables. An agent is told what `keepwarm launch` tells it."""
        asked = [part.replace("{}", question) for part in (self.then if then else self.first)]
        if self.name in AGENTS:
            agent = AGENTS[self.name]
            start = agent.start(server)
            return [agent.program, *start.arguments, *asked], {**start.environment, **self.environment}
        told = {"OPENAI_BASE_URL": server.openai, "OPENAI_API_KEY": server.key, "OPENAI_MODEL": server.model}
        program = next(installed.glob("program.*"))
        runner = "node" if program.suffix == ".mjs" else "python"
        return [runner, str(program), *asked], {**told, **self.environment}


_AIDER = ("--no-git", "--yes-always", "--no-show-model-warnings", "--read", "handbook.txt", "--message")
_CODEX = ("exec", "--skip-git-repo-check")

CLIENTS = {
    client.name: client
    for client in (
        Client("qwen-code", "@qwen-code/qwen-code", ("-p", "{}"), ("--continue", "-p", "{}")),
        Client("opencode", "opencode-ai", ("run", "{}"), ("run", "--continue", "{}")),
        Client("openai-agents", "openai-agents", environment={"OPENAI_AGENTS_DISABLE_TRACING": "1"}),
        Client("pydantic-ai", "pydantic-ai-slim"),
        Client("ai-sdk", "ai"),
        Client("openai-ts", "openai"),
        Client("aider", "aider-chat", (*_AIDER, "{}"), ("--restore-chat-history", *_AIDER, "{}"), behind=215),
        Client("codex", "@openai/codex", (*_CODEX, "{}"), (*_CODEX, "resume", "--last", "{}")),
        # a system message behind the question is refused; and it ends with an error if an answer is cut
        Client(
            "claude", "@anthropic-ai/claude-code", ("-p", "{}"), ("--continue", "-p", "{}"), refused=True, longest=1024
        ),
    )
}
