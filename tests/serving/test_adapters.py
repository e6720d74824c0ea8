"""Adapters behind the service: listed, and chosen by a request's model in every protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.adapters import MLP, adapter
from tests.helpers.inside import serving
from tests.helpers.lean import compiled
from tests.helpers.models import tiny
from tests.helpers.processes import DEADLINE, ServerProcess, chat
from tests.helpers.services import weather

from keepwarm.serving.loaded import _bytes_of

pytestmark = [
    pytest.mark.slow,  # their kernels are compiled first
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
        said = {"model": name, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
        looked = {"model": name, "messages": MESSAGES}
        assert asked(adapted.url, "/v1/cache/explain", looked)["cached_tokens"] == 0
        first, again = (asked(adapted.url, "/v1/chat/completions", said) for _ in range(2))
        assert first["model"] == name
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert again["choices"][0]["message"] == first["choices"][0]["message"]
        chats.append(first["choices"][0]["message"]["content"])
        message = asked(adapted.url, "/v1/messages", said)
        assert message["content"][0]["text"] == chats[-1]
        assert message["usage"]["cache_read_input_tokens"] > 0
        given = {"model": name, "input": MESSAGES, "max_output_tokens": 8, "temperature": 0, "store": False}
        response = asked(adapted.url, "/v1/responses", given)
        assert response["output"][0]["content"][0]["text"] == chats[-1]
        query = {"model": name, "messages": MESSAGES, "max_new_tokens": 8}
        answer = asked(adapted.url, "/query", query)
        assert (answer["answer"], answer["cached_tokens"]) == (chats[-1], answer["prompt_tokens"] - 1)
        compared = asked(adapted.url, "/query/compare", query)
        assert compared["bit_identical"]
        assert compared["cold"]["answer"] == chats[-1]
        assert asked(adapted.url, "/v1/cache/explain", looked)["cached_tokens"] == answer["cached_tokens"]
        plain = {"model": name, "prompt": "The harbour has three piers", "max_tokens": 8, "temperature": 0}
        texts.append(asked(adapted.url, "/v1/completions", plain)["choices"][0]["text"])
    assert len(set(chats)) == len(set(texts)) == 3


def test_another_name_is_not_served(adapted: ServerProcess) -> None:
    body = {"model": "three", "messages": MESSAGES}
    refused = httpx.post(f"{adapted.url}/v1/chat/completions", json=body, timeout=DEADLINE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_a_registered_set_is_asked_with_an_adapter(adapted: ServerProcess) -> None:
    registered = {"name": "piers", "tools": [weather()]}
    assert asked(adapted.url, "/tools", registered)["name"] == "piers"
    answers = []
    for name in ("one", "two"):
        query = {"model": name, "tools": "piers", "query": "Rain at the harbour?", "max_new_tokens": 8}
        first, again = (asked(adapted.url, "/query", query) for _ in range(2))
        assert first["cached_tokens"] < 16, "no more than any prompt's first words: the set is warm without an adapter"
        assert again["cached_tokens"] == again["prompt_tokens"] - 1
        explained = {"model": name, "tools": "piers", "query": "Rain at the harbour?"}
        assert asked(adapted.url, "/v1/cache/explain", explained)["cached_tokens"] == again["cached_tokens"]
        answers.append(first["answer"])
    assert answers[0] != answers[1]


def test_of_several_models_the_first_has_them(tmp_path: Path, saved: Callable[..., Path]) -> None:
    """What is stored for an adapter is shown with its text, and its bytes are among the model's."""
    folder = adapter(tmp_path / "one", tiny("llama"))
    models = {"first": str(saved("llama")), "other": str(saved("qwen2", seed=3))}
    with serving(tmp_path / "store", models=models, adapters={"one": folder}) as (url, server):
        for name in ("first", "one", "other", "one"):
            chat(url, "", model=name, messages=MESSAGES).raise_for_status()
        stretches = httpx.get(f"{url}/v1/cache/tree", timeout=DEADLINE).json()["stretches"]
        assert len(stretches) >= 3
        assert all(each["text"] for each in stretches)
        engine = server.models.first.running
        whole, nbytes = _bytes_of(engine), engine.adapters.nbytes
        assert server.models.described()[0]["bytes"] == whole
        engine.adapters.remove("one")
        assert _bytes_of(engine) == whole - nbytes < whole
