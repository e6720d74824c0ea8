"""What a request does not say of how tokens are chosen is what the model recommends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.inside import serving
from tests.helpers.processes import DEADLINE

RECOMMENDED = {"temperature": 1.3, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.2}
CHAT = {"model": "tiny", "seed": 5, "messages": [{"role": "user", "content": "Which pier is free?"}], "max_tokens": 12}
TEXT = {"model": "tiny", "seed": 5, "prompt": "The piers are", "max_tokens": 12}
GREEDY = {"temperature": 0, "repetition_penalty": 1}


@pytest.fixture(scope="module")
def folder(saved: Callable[..., Path]) -> Path:
    folder = saved("llama")
    said = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(said | RECOMMENDED | {"do_sample": True, "min_p": 7}))
    return folder


def text(url: str, path: str, body: dict[str, Any]) -> str:
    answer = httpx.post(f"{url}{path}", json=body, timeout=DEADLINE).raise_for_status().json()
    if "content" in answer:
        return str(answer["content"][0]["text"])
    (choice,) = answer["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def responses(url: str, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "input": "Which pier is free?", "max_output_tokens": 4} | more
    return dict(httpx.post(f"{url}/v1/responses", json=body, timeout=DEADLINE).raise_for_status().json())


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_it_stands_in_for_what_is_not_said(folder: Path, tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    with serving(tmp_path, models={"tiny": str(folder)}) as (url, server):
        assert server.service.sampling == RECOMMENDED, "a min_p of 7 is none"
        said = text(url, path, body)
        assert said == text(url, path, body | RECOMMENDED)
        assert said != text(url, path, body | {"temperature": 1, "top_p": 1, "top_k": -1, "repetition_penalty": 1})
        assert text(url, path, body | {"top_k": 1, "repetition_penalty": 1}) == text(url, path, body | GREEDY)
        assert text(url, path, body | {"temperature": 0}) == text(
            url, path, body | GREEDY | {"repetition_penalty": 1.2}
        )


def test_every_protocol_of_a_vendor_takes_it(folder: Path, tmp_path: Path) -> None:
    # In bfloat16 two logits may be equal, and `top_k` keeps both.
    with serving(tmp_path, models={"tiny": str(folder)}, engine__dtype="float32") as (url, _):
        assert [responses(url)[name] for name in ("temperature", "top_p")] == [1.3, 0.8]
        assert [responses(url, top_p=0.5)[name] for name in ("temperature", "top_p")] == [1.3, 0.5]
        query = {"query": "Which pier is free?", "max_new_tokens": 12}
        native = httpx.post(f"{url}/query", json=query, timeout=DEADLINE)
        assert native.raise_for_status().json()["answer"] == text(url, "/v1/chat/completions", CHAT | GREEDY)
        body = {name: value for name, value in CHAT.items() if name != "seed"} | {"top_k": 1}
        assert text(url, "/v1/messages", body) == text(url, "/v1/chat/completions", CHAT | {"top_k": 1})
        assert text(url, "/v1/messages", body | GREEDY) == text(url, "/v1/chat/completions", CHAT | GREEDY)


def test_nothing_is_taken_from_the_model_if_so_set(folder: Path, tmp_path: Path) -> None:
    with serving(tmp_path, models={"tiny": str(folder)}, server__sampling_defaults="openai") as (url, server):
        assert server.service.sampling == {"temperature": 1.0}
        said = text(url, "/v1/completions", TEXT)
        assert said == text(url, "/v1/completions", TEXT | {"temperature": 1, "top_p": 1})
        assert [responses(url)[name] for name in ("temperature", "top_p")] == [1, 1]
