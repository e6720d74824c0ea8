"""Several models in one server, at the moments between two states: while one loads, leaves, or is too large."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from tests.helpers.inside import serving, states
from tests.helpers.processes import DEADLINE, chat
from tests.helpers.services import weather

from keepwarm.serving.app import Server
from keepwarm.serving.loaded import bytes_on_disk
from keepwarm.serving.tenancy.keys import add_key

LONG = [{"role": "system", "content": "You remember everything. " * 30}, {"role": "user", "content": "Do you?"}]


@pytest.fixture(scope="module")
def models(saved: Callable[..., Path]) -> dict[str, str]:
    return {"small": str(saved("llama")), "other": str(saved("qwen2", seed=3))}


@pytest.fixture(scope="module")
def room(models: dict[str, str]) -> int:
    """Bytes that hold one of the models, and not both."""
    return max(map(bytes_on_disk, models.values())) * 5 // 4


@contextmanager
def no_load_ends(store: Path) -> Iterator[None]:
    """Hold the lock that an engine needs to open a store, as a process does that repairs it."""
    with open(store / "lock", "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not until():
        assert time.monotonic() < end
        time.sleep(0.01)


def waiting(server: Server, name: str) -> int:
    return next(int(one["waiting"]) for one in server.models.described() if one["name"] == name)


def cached(answer: httpx.Response) -> int:
    return int(answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.slow
def test_a_model_whose_clients_left_is_not_loaded_where_there_is_room(models: dict[str, str], tmp_path: Path) -> None:
    three = models | {"third": models["other"]}
    with serving(tmp_path, models=three) as (url, server), ThreadPoolExecutor(2) as pool:
        with no_load_ends(tmp_path):
            other = pool.submit(chat, url, "hi", model="other")
            wait(lambda: waiting(server, "other") == 1)
            body = {"model": "third", "messages": LONG}
            with pytest.raises(httpx.TimeoutException):
                httpx.post(f"{url}/v1/chat/completions", json=body, timeout=0.5)
            wait(lambda: waiting(server, "third") == 0)
        assert other.result().status_code == 200
        wait(lambda: "loading" not in states(url).values())
        assert states(url) == {"small": "loaded", "other": "loaded", "third": "unloaded"}


@pytest.fixture(scope="module")
def half(saved: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], int]:
    """Two models that take twice the bytes of their files, and bytes that hold one and the other's files."""
    models = {name: str(saved(family, dtype=torch.bfloat16)) for name, family in (("a", "llama"), ("b", "qwen2"))}
    with serving(tmp_path_factory.mktemp("store"), models=models, engine__dtype="float32") as (url, server):
        assert chat(url, "hi", model="b").status_code == 200
        a, b = (int(one["bytes"]) for one in server.models.described())
    files = bytes_on_disk(models["b"])
    assert files < b
    return models, a + (files + b) // 2


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True])
def test_the_cap_holds_after_a_load_that_took_more_than_its_files(
    half: tuple[dict[str, str], int], tmp_path: Path, busy: bool
) -> None:
    models, cap = half
    settings: dict[str, Any] = {"models": models, "engine__dtype": "float32", "server__model_memory": cap}
    with serving(tmp_path, **settings) as (url, server):
        first = server.models.find("a").uses
        assert not busy or first.begin()
        assert chat(url, "hi", model="b").status_code == 200
        if busy:
            assert states(url) == {"a": "loaded", "b": "loaded"}, "requests under way are waited for"
            first.end()
        wait(lambda: states(url) == {"a": "unloaded", "b": "loaded"})
        assert sum(one["bytes"] for one in server.models.described() if one["state"] == "loaded") <= cap
        assert chat(url, "hi", model="a").status_code == 200
        assert states(url) == {"a": "loaded", "b": "unloaded"}


@pytest.mark.slow
def test_a_stop_waits_for_no_load_before_it_writes(models: dict[str, str], tmp_path: Path) -> None:
    keys, store = tmp_path / "keys.json", tmp_path / "store"
    bearer = {"authorization": f"Bearer {add_key(keys, 'acme')[1]}"}
    settings: dict[str, Any] = {"models": models, "tenants__keys_file": str(keys), "limits__shutdown_grace": 0.1}
    with ThreadPoolExecutor(1) as pool, serving(store, **settings) as (url, server):
        assert chat(url, "hi", headers=bearer, model="small").status_code == 200
        with no_load_ends(store):
            other = pool.submit(chat, url, "hi", headers=bearer, model="other")
            wait(lambda: waiting(server, "other") == 1)
            server.should_exit = True
            assert other.result().status_code == 503
            usage = store / "tenants" / "usage.json"
            wait(usage.exists)
            assert json.loads(usage.read_text())["acme"][1] > 0


@pytest.mark.slow
def test_who_looks_brings_back_no_model_that_leaves(models: dict[str, str], room: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"models": models, "server__model_memory": room}
    with serving(tmp_path, **settings) as (url, server), ThreadPoolExecutor(2) as pool:
        with server.models.find("small").uses.one():
            other = pool.submit(chat, url, "hi", model="other")
            wait(lambda: waiting(server, "other") == 1)
            looks = pool.submit(httpx.get, f"{url}/v1/cache/entries", timeout=DEADLINE)
            wait(lambda: waiting(server, "other") + waiting(server, "small") == 2)
        assert other.result().status_code == looks.result().status_code == 200
        wait(lambda: "loading" not in states(url).values())
        assert states(url) == {"small": "unloaded", "other": "loaded"}
        assert server.models.counts == {"loaded": 2, "given_up": 1}


@pytest.mark.slow
def test_looking_is_no_use_of_a_model(models: dict[str, str], tmp_path: Path) -> None:
    three = models | {"third": models["other"]}
    room = max(map(bytes_on_disk, models.values())) * 9 // 4
    with serving(tmp_path, models=three, server__model_memory=room, engine__dtype="bfloat16") as (url, _):
        assert chat(url, "hi", model="other").status_code == 200
        assert httpx.get(f"{url}/v1/cache/entries", timeout=DEADLINE).status_code == 200
        assert chat(url, "hi", model="third").status_code == 200
        assert states(url) == {"small": "unloaded", "other": "loaded", "third": "loaded"}


@pytest.mark.slow
def test_what_comes_while_no_model_is_loaded_is_stored_after_a_purge(
    models: dict[str, str], room: int, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"models": models, "server__model_memory": room}
    with serving(tmp_path, **settings) as (url, server), ThreadPoolExecutor(2) as pool:
        assert httpx.post(f"{url}/v1/cache/purge", timeout=DEADLINE).status_code == 200
        assert chat(url, "hi", model="small").status_code == 200
        with no_load_ends(tmp_path):
            first = pool.submit(chat, url, "hi", model="other")
            wait(lambda: states(url) == {"small": "unloaded", "other": "loading"})
            second = pool.submit(chat, url, "", model="other", messages=LONG)
            wait(lambda: waiting(server, "other") == 2)
        assert first.result().status_code == 200
        assert cached(second.result()) < 10  # at most the beginning that both prompts share
        assert cached(chat(url, "", model="other", messages=LONG)) > 100


@pytest.mark.slow
def test_no_model_goes_for_one_whose_folder_is_gone(models: dict[str, str], room: int, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    shutil.copytree(models["other"], gone)
    settings: dict[str, Any] = {"models": models | {"other": str(gone)}, "server__model_memory": room}
    with serving(tmp_path / "store", **settings) as (url, _):
        shutil.rmtree(gone)
        failed = chat(url, "hi", model="other")
        assert failed.status_code == 500
        assert failed.json()["error"]["code"] == "model_not_loaded"
        assert states(url) == {"small": "loaded", "other": "unloaded"}


@pytest.mark.slow
def test_sets_are_read_into_the_ram_of_the_model_that_computed_them(
    models: dict[str, str], room: int, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"models": models, "server__model_memory": room}

    def kept(server: Server, name: str) -> list[Any]:
        archive = server.models.find(name).running.pipeline.archive
        archive.flush()
        return archive._ram.runs()

    with serving(tmp_path, **settings) as (url, server):
        body = {"name": "kept", "tools": [weather("kept", 30)], "model": "small"}
        assert httpx.post(f"{url}/tools", json=body, timeout=DEADLINE).status_code == 200
        for _ in range(2):
            assert httpx.get(f"{url}/tools", params={"model": "other"}, timeout=DEADLINE).status_code == 200
            assert not kept(server, "other")
            assert httpx.get(f"{url}/tools", params={"model": "small"}, timeout=DEADLINE).status_code == 200
            assert kept(server, "small")


def test_files_that_are_not_loaded_count_for_nothing(tmp_path: Path) -> None:
    for name, size in (("model-00001-of-00002", 10), ("model-00002-of-00002", 20), ("consolidated", 100)):
        (tmp_path / f"{name}.safetensors").write_bytes(bytes(size))
    assert bytes_on_disk(str(tmp_path)) == 30
