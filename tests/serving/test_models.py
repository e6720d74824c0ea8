"""Several models in one server: loaded when asked for, given up for one another, their KV kept in the store."""

from __future__ import annotations

import gc
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.cli import Cli, cli  # noqa: F401
from tests.helpers.inside import serving, states, status
from tests.helpers.processes import DEADLINE, ServerProcess, chat
from tests.helpers.services import weather

from keepwarm.errors import ConfigError, ModelNotFound
from keepwarm.serving.app import Server
from keepwarm.serving.loaded import bytes_on_disk
from keepwarm.serving.settings import ServeConfig
from keepwarm.serving.tenancy.keys import add_key

SYSTEM = [{"role": "system", "content": "You remember everything. " * 30}, {"role": "user", "content": "Do you?"}]


@pytest.fixture(scope="module")
def models(saved: Callable[..., Path]) -> dict[str, str]:
    return {"small": str(saved("llama")), "other": str(saved("qwen2", seed=3))}


@pytest.fixture(scope="module")
def room(models: dict[str, str]) -> int:
    """Bytes that hold one of the models, and not both."""
    return max(map(bytes_on_disk, models.values())) * 5 // 4


@pytest.fixture(scope="module")
def served(models: dict[str, str], room: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Server]]:
    """Both under a cap that holds one."""
    with serving(tmp_path_factory.mktemp("store"), models=models, server__model_memory=room) as found:
        yield found


def reused(answer: httpx.Response) -> tuple[int, int]:
    """Tokens of the prompt that were reused, and all."""
    usage = answer.raise_for_status().json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


@pytest.mark.slow
def test_changing_models_and_back_costs_no_prefill(served: tuple[str, Server]) -> None:
    url, server = served
    first = chat(url, "", model="small", messages=SYSTEM)
    assert reused(first)[0] == 0
    before = weakref.ref(server.models.find("small").running)
    assert reused(chat(url, "", model="other", messages=SYSTEM))[0] == 0
    assert states(url) == {"small": "unloaded", "other": "loaded"}
    gc.collect()
    assert before() is None, "what a model took is given back"
    again = chat(url, "", model="small", messages=SYSTEM)
    cached, tokens = reused(again)
    assert cached == tokens - 1
    assert again.json()["keepwarm"]["exactness"] == "exact"
    assert again.json()["choices"] == first.json()["choices"]
    assert states(url) == {"small": "loaded", "other": "unloaded"}


@pytest.mark.slow
def test_bits_are_those_of_a_cold_run(served: tuple[str, Server]) -> None:
    url, _ = served
    for model in ("small", "other", "small", "other"):
        asked = {"messages": SYSTEM, "max_new_tokens": 3, "model": model}
        found = httpx.post(f"{url}/query/compare", json=asked, timeout=DEADLINE).raise_for_status().json()
        assert found["bit_identical"], model


@pytest.mark.slow
def test_who_is_served_is_told(served: tuple[str, Server]) -> None:
    url, _ = served
    assert chat(url, "hi", model="small").status_code == 200
    listed = httpx.get(f"{url}/v1/models", timeout=DEADLINE).json()["data"]
    assert {one["id"]: one["status"]["value"] for one in listed} == {"small": "loaded", "other": "unloaded"}
    unknown = chat(url, "hi", model="third")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"
    assert "small, other" in unknown.json()["error"]["message"]
    assert httpx.get(f"{url}/v1/models/third", timeout=DEADLINE).status_code == 404
    assert httpx.get(f"{url}/status?model=third", timeout=DEADLINE).status_code == 404
    assert status(url, "other")["model"] == "other"
    assert states(url)["other"] == "unloaded", "looking loads nothing"


@pytest.mark.slow
@pytest.mark.parametrize("named", [{}, {"model": ""}, {"model": None}], ids=["left out", "empty", "null"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": SYSTEM, "max_tokens": 2}),
        ("completions", {"prompt": "You remember", "max_tokens": 2}),
        ("responses", {"input": "Do you?", "max_output_tokens": 2}),
    ],
)
def test_a_request_that_names_no_model_goes_to_the_first(
    served: tuple[str, Server], path: str, body: dict[str, Any], named: dict[str, str | None]
) -> None:
    url, _ = served
    answer = httpx.post(f"{url}/v1/{path}", json=body | named, timeout=DEADLINE)
    assert answer.raise_for_status().json()["model"] == "small"


@pytest.mark.slow
def test_two_at_once_under_a_cap_that_holds_one(served: tuple[str, Server]) -> None:
    url, _ = served
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(chat, url, f"Question {number}", model=("small", "other")[number % 2]) for number in range(8)
        ]
        assert [each.result().status_code for each in asked] == [200] * 8
    assert sorted(states(url).values()) == ["loaded", "unloaded"]


@pytest.mark.slow
def test_a_model_is_loaded_once_for_all_who_wait(served: tuple[str, Server]) -> None:
    url, server = served
    assert chat(url, "hi", model="small").status_code == 200
    before = server.models.counts["loaded"]
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(chat, url, f"Question {number}", model="other") for number in range(4)]
        assert [each.result().status_code for each in asked] == [200] * 4
    assert server.models.counts["loaded"] == before + 1


@pytest.mark.slow
def test_a_model_with_requests_under_way_stays(served: tuple[str, Server]) -> None:
    url, _ = served
    body = {"model": "small", "messages": SYSTEM, "max_tokens": 600, "ignore_eos": True, "stream": True}
    with (
        httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=DEADLINE) as streaming,
        ThreadPoolExecutor(1) as pool,
    ):
        lines = streaming.iter_lines()
        assert next(lines)
        other = pool.submit(chat, url, "hi", model="other")
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert other.result().status_code == 200


@pytest.mark.slow
def test_a_client_that_leaves_while_its_model_loads(served: tuple[str, Server]) -> None:
    url, server = served
    assert chat(url, "hi", model="small").status_code == 200
    body = {"model": "other", "messages": SYSTEM, "max_tokens": 1}
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=0.01)
    assert chat(url, "hi", model="small").status_code == 200
    until = time.monotonic() + DEADLINE
    while any(service.uses.count for service in server.models.services):
        assert time.monotonic() < until, "a use was left behind"
        time.sleep(0.01)


@pytest.mark.slow
def test_what_is_stored_is_one_store(served: tuple[str, Server]) -> None:
    url, _ = served
    registered = httpx.post(
        f"{url}/tools", json={"name": "kept", "tools": [weather()], "model": "small"}, timeout=DEADLINE
    )
    assert registered.status_code == 200
    asked = {"tools": "kept", "query": "Rain?", "max_new_tokens": 2, "model": "other"}
    assert httpx.post(f"{url}/query", json=asked, timeout=DEADLINE).status_code == 200
    explained = {"messages": SYSTEM, "model": "small"}
    found = httpx.post(f"{url}/v1/cache/explain", json=explained, timeout=DEADLINE).raise_for_status().json()
    assert found["cached_tokens"] > 0
    session = {"x-session-id": "both"}
    spoken = [{"role": "user", "content": "Hello"}]
    said = chat(url, "", headers=session, model="small", messages=spoken).json()["choices"][0]["message"]
    spoken += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": "And?"}]
    assert chat(url, "", headers=session, model="other", messages=spoken).status_code == 200
    entries = httpx.get(f"{url}/v1/cache/entries", timeout=DEADLINE).json()["entries"]
    assert len({entry["model"] for entry in entries}) == 2
    texts = httpx.get(f"{url}/v1/cache/tree", timeout=DEADLINE).json()["stretches"]
    assert all(one["text"] for one in texts)


@pytest.mark.slow
def test_metrics_go_by_model(served: tuple[str, Server]) -> None:
    url, _ = served
    assert chat(url, "hi", model="other").status_code == 200
    text = httpx.get(f"{url}/metrics", timeout=DEADLINE).text
    assert 'keepwarm_model_loaded{model="other"} 1.0' in text
    assert 'keepwarm_model_loaded{model="small"} 0.0' in text
    assert 'keepwarm_requests_total{model="other",outcome="done",protocol="openai"}' in text
    assert text.count("# TYPE keepwarm_requests_total counter") == 1
    assert text.count("\nkeepwarm_ready") == 1
    assert 'keepwarm_model_events_total{event="given_up"}' in text
    recent = httpx.get(f"{url}/v1/cache/recent", timeout=DEADLINE).json()["answers"]
    assert {one["model"] for one in recent} == {"small", "other"}


@pytest.mark.slow
def test_a_purge_reaches_models_that_were_given_up(served: tuple[str, Server]) -> None:
    url, _ = served
    for model in ("small", "other"):
        chat(url, "", model=model, messages=SYSTEM).raise_for_status()
    assert states(url) == {"small": "unloaded", "other": "loaded"}
    assert httpx.post(f"{url}/v1/cache/purge", timeout=DEADLINE).raise_for_status().json()["runs"] > 0
    for model in ("small", "other"):
        assert reused(chat(url, "", model=model, messages=SYSTEM))[0] == 0, model


@pytest.mark.slow
def test_both_stay_where_there_is_room_and_are_found_after_a_restart(models: dict[str, str], tmp_path: Path) -> None:
    with serving(tmp_path, models=models) as (url, server):
        told = {model: chat(url, "", model=model, messages=SYSTEM).json()["choices"] for model in models}
        assert set(states(url).values()) == {"loaded"}
        rooms = [one.running.pipeline.archive._ram.cap for one in server.models.services]
        assert rooms == [2 << 30] * 2, "max_ram is the process's"
        chat(url, "hi", model="small").raise_for_status()
        assert httpx.post(f"{url}/v1/cache/purge", timeout=DEADLINE).status_code == 200
        for model in models:
            assert reused(chat(url, "", model=model, messages=SYSTEM))[0] == 0, "RAM of both is purged"
    with serving(tmp_path, models=models) as (url, _):
        for model in models:
            answer = chat(url, "", model=model, messages=SYSTEM)
            cached, tokens = reused(answer)
            assert cached == tokens - 1
            assert answer.json()["choices"] == told[model]


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_the_request_s_error(models: dict[str, str], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(models["other"], broken)
    with serving(tmp_path / "store", models=models | {"broken": str(broken)}) as (url, _):
        (broken / "model.safetensors").write_bytes(b"no weights")
        failed = chat(url, "hi", model="broken")
        assert failed.status_code == 500
        assert failed.json()["error"]["code"] == "model_not_loaded"
        assert "'broken' cannot be loaded" in failed.json()["error"]["message"]
        assert chat(url, "hi", model="small").status_code == 200
        shutil.copy(Path(models["other"]) / "model.safetensors", broken)
        assert chat(url, "hi", model="broken").status_code == 200, "it is tried again"


@pytest.mark.slow
def test_what_waits_is_told_when_the_service_stops(models: dict[str, str], room: int, tmp_path: Path) -> None:
    settings = {"server__model_memory": room, "limits__shutdown_grace": 0.1}
    with (
        ThreadPoolExecutor(1) as pool,
        serving(tmp_path, models=models, **settings) as (url, server),
        server.models.find("small").uses.one(),  # as a request under way has it
    ):
        other = pool.submit(chat, url, "hi", model="other")
        until = time.monotonic() + DEADLINE
        while not any(one["waiting"] for one in server.models.described()):
            assert time.monotonic() < until
            time.sleep(0.01)
        server.should_exit = True
        answer = other.result()
    assert answer.status_code == 503
    assert "stopping" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_a_wait_has_an_end(models: dict[str, str], room: int, tmp_path: Path) -> None:
    settings = {"server__model_memory": room, "limits__load_timeout": 0.5}
    with serving(tmp_path, models=models, **settings) as (url, server):
        with server.models.find("small").uses.one():
            late = chat(url, "hi", model="other")
            assert late.status_code == 503
            assert "small must be given up for it" in late.json()["error"]["message"]
            after = chat(url, "hi", model="small")
            assert after.status_code == 200, after.text
        time.sleep(0.2)
        assert states(url) == {"small": "loaded", "other": "unloaded"}, "nobody waits for the other one any more"
        assert not any(one.uses.count for one in server.models.services)


@pytest.mark.slow
def test_one_model_has_no_word_of_several(models: dict[str, str], tmp_path: Path) -> None:
    with serving(tmp_path, model=models["small"]) as (url, _):
        name = Path(models["small"]).name
        assert "status" not in httpx.get(f"{url}/v1/models/{name}", timeout=DEADLINE).json()
        assert "models" not in status(url)
        assert 'model="' not in httpx.get(f"{url}/metrics", timeout=DEADLINE).text
        chat(url, "hi", model=name).raise_for_status()
        (answer,) = httpx.get(f"{url}/v1/cache/recent", timeout=DEADLINE).json()["answers"]
        assert "model" not in answer


@pytest.mark.slow
def test_the_command_serves_several(models: dict[str, str], tmp_path: Path) -> None:
    further = ("--model", f"other={models['other']}", "--model-memory", "1GiB")
    server = ServerProcess(f"small={models['small']}", tmp_path, *further).ready()
    try:
        assert states(server.url) == {"small": "loaded", "other": "unloaded"}
        assert chat(server.url, "hi", model="other").status_code == 200
    finally:
        assert server.stop() == 0


def test_the_command_says_what_is_wrong(
    cli: Cli,  # noqa: F811
    tmp_path: Path,
) -> None:
    for given, said in (
        (("a=demo", "demo"), "expected NAME=PATH for each, got 'demo'"),
        (("a=demo", "a=demo"), "two models have one name, of a, a"),
        ((f"a={tmp_path}",), "has no config.json"),
    ):
        options = [part for one in given for part in ("--model", one)]
        failed = cli("serve", *options, "--store", tmp_path / "store", "--port", "0")
        assert failed.code
        assert said in " ".join(failed.err.split())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"models": {"a": "demo"}, "model": "b"}, "none of the names in"),
        ({"models": {"a": {"path": "demo", "names": ["b"]}, "b": "demo"}}, "'b' is the name of more than one"),
        ({"models": {"": "demo"}}, "is no name"),
        ({"models": {"a": {"path": "demo", "engine": {"store": "/x"}}}}, "store is that of all models"),
        ({"models": {"a": {"path": "demo", "engine": {"colour": "red"}}}}, "unknown setting 'colour'"),
        ({"models": {"a": {"names": ["b"]}}}, "models.a.path"),
        ({"models": {"a": "demo", "b": "demo"}, "engine": {"store": None}}, "need a store"),
        ({"server": {"model_memory": "much"}}, "a size looks like"),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServeConfig.load(None, settings, {})


def test_weights_beyond_the_cap_are_refused_at_start(models: dict[str, str], tmp_path: Path) -> None:
    given = {"models": models, "server.model_memory": "1MB", "engine.store": str(tmp_path), "server.port": 0}
    with pytest.raises(ConfigError, match=r"the weights of 'small' take \d+ bytes"):
        Server(ServeConfig.load(None, given, {}))
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        Server(ServeConfig.load(None, given | {"models": {"small": str(tmp_path)}}, {}))


@pytest.mark.slow
def test_no_tenant_fills_the_queue_for_a_model(models: dict[str, str], room: int, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    first, second = ({"authorization": f"Bearer {add_key(keys, name)[1]}"} for name in ("acme", "umbrella"))
    settings = {"server__model_memory": room, "batch__max_queue": 8, "tenants__keys_file": str(keys)}
    with ThreadPoolExecutor(10) as pool, serving(tmp_path / "store", models=models, **settings) as (url, server):
        with server.models.find("small").uses.one():
            crowd = [pool.submit(chat, url, "hi", headers=first, model="other") for _ in range(8)]
            until = time.monotonic() + DEADLINE
            while sum(each.done() for each in crowd) + len(server.models._by_name["other"].waiting) < 8:
                assert time.monotonic() < until
                time.sleep(0.01)
            refused = [each.result() for each in crowd if each.done()]
            assert {answer.status_code for answer in refused} == {503}
            other = pool.submit(chat, url, "hi", headers=second, model="other")
        assert other.result().status_code == 200
        answered = [each.result().status_code for each in crowd]
        assert 200 in answered
        assert {*answered} <= {200, 503}  # the batch's queue is as short, and shared as fairly
