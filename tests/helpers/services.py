"""What the services of the tests offer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.processes import ServerProcess

CATALOGUE_SYSTEM = "You are the front desk. " + "Be brief, be kind, and call a tool when one fits. " * 12


def weather(name: str = "get_weather", words: int = 1) -> dict[str, Any]:
    """A tool in OpenAI's shape."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    description = "Current weather of a city. " * words
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


@dataclass(frozen=True)
class Keyed:
    """A server with tenants, and their keys."""

    process: ServerProcess
    store: Path
    keys_file: Path
    acme: str
    umbrella: str
    narrow: str  # of a tenant with small limits
    short: str  # of a tenant whose answers are cut to three tokens
    admin: str

    @property
    def url(self) -> str:
        return self.process.url
