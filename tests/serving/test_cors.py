"""What pages of an allowed origin may send: all that the vendors' SDKs do."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import pytest

from keepwarm.serving.app import create_app
from keepwarm.serving.settings import ServeConfig

PAGE = "https://chat.example"
BROWSERS = [
    "x-stainless-helper-method",
    "anthropic-dangerous-direct-browser-access",
    "anthropic-beta",
    "openai-project",
]


def preflight(origin: str, headers: list[str]) -> Any:
    app = create_app(ServeConfig.load(None, {"server.cors_origins": [PAGE], "engine.store": None}, {}))
    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": ", ".join(headers),
    }

    async def ask() -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as client:
            return await client.options("/v1/messages", headers=asked)

    return asyncio.run(ask())


def sent_by(sdk: Any) -> list[str]:
    """Names of the headers of a real client's request, as it is built."""
    with sdk(api_key="unused", base_url=PAGE) as client:
        return [name.lower() for name in client.default_headers] + BROWSERS


@pytest.mark.parametrize("sdk", [openai.OpenAI, anthropic.Anthropic])
def test_headers_of_the_sdks_are_allowed(sdk: Any) -> None:
    names = sent_by(sdk)
    assert any(name.startswith("x-stainless-") for name in names)
    answer = preflight(PAGE, names)
    assert answer.status_code == 200, answer.text
    allowed = answer.headers["access-control-allow-headers"].lower()
    assert all(name in allowed for name in names)
    assert answer.headers["access-control-allow-origin"] == PAGE


def test_pages_of_other_origins_may_send_nothing() -> None:
    assert preflight("https://elsewhere.example", ["x-stainless-lang"]).status_code in (400, 403)
