"""Adapters behind the service: listed, and chosen by a request's model in every protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.adapters import MLP, adapter
from tests.helpers.lean import compiled
from tests.helpers.models import tiny
from tests.helpers.processes import DEADLINE, ServerProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compiled is None, reason="no C++ compiler: adapters need the compiled kernels"),
]

MESSAGES = [{"role": "user", "content": "Which pier is the largest of all that there are in the whole harbour?"}]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, saved: Callable[..., Path]) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("adapters")
    one, two = (adapter(folder / name, tiny("llama"), MLP, seed=i) for i, name in enumerate(("one", "two")))
    options = ("--adapter", f"one={one}", "--adapter", f"two={two}")
    process = ServerProcess(saved("llama"), folder / "store", *options).ready()
    yield process
    assert process.stop() == 0


def asked(url: str, path: str, body: dict[str, Any]) -> Any:
    return httpx.post(f"{url}{path}", json=body, timeout=DEADLINE).raise_for_status().json()


def test_adapters_are_listed_behind_the_model(adapted: ServerProcess) -> None:
    listed = httpx.get(f"{adapted.url}/v1/models", timeout=DEADLINE).json()["data"]
    assert [each["id"] for each in listed][1:] == ["one", "two"]
    assert httpx.get(f"{adapted.url}/v1/models/two", timeout=DEADLINE).json()["id"] == "two"


def test_a_requests_model_chooses(adapted: ServerProcess) -> None:
    """Each finds again what it computed itself, and nothing of the others."""
    names = [each["id"] for each in httpx.get(f"{adapted.url}/v1/models", timeout=DEADLINE).json()["data"]]
    chats, texts = [], []
    for name in names:
        chat = {"model": name, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
        first, again = (asked(adapted.url, "/v1/chat/completions", chat) for _ in range(2))
        assert first["model"] == name
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert again["choices"][0]["message"] == first["choices"][0]["message"]
        chats.append(first["choices"][0]["message"]["content"])
        message = asked(adapted.url, "/v1/messages", chat)
        assert message["content"][0]["text"] == chats[-1]
        assert message["usage"]["cache_read_input_tokens"] > 0
        given = {"model": name, "input": MESSAGES, "max_output_tokens": 8, "temperature": 0, "store": False}
        response = asked(adapted.url, "/v1/responses", given)
        assert response["output"][0]["content"][0]["text"] == chats[-1]
        plain = {"model": name, "prompt": "The harbour has three piers", "max_tokens": 8, "temperature": 0}
        texts.append(asked(adapted.url, "/v1/completions", plain)["choices"][0]["text"])
    assert len(set(chats)) == len(set(texts)) == 3


def test_another_name_is_not_served(adapted: ServerProcess) -> None:
    body = {"model": "three", "messages": MESSAGES}
    refused = httpx.post(f"{adapted.url}/v1/chat/completions", json=body, timeout=DEADLINE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
