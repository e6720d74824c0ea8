"""Two real servers for the whole session: one of this machine's user with the embedded model, one with tenants and a
tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.browser import launched, opened, ready
from tests.helpers.processes import DEADLINE, ServerProcess
from tests.helpers.services import CATALOGUE_SYSTEM, Keyed, weather

from keepwarm.serving.tenancy.keys import add_key


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The embedded model, without keys."""
    process = ServerProcess(
        "demo",
        tmp_path_factory.mktemp("served"),
        environment={
            "KEEPWARM__SERVER__MODEL_NAMES": '["gpt-4o"]',
            "KEEPWARM__SERVER__MID_CHAT_SYSTEM": "true",
            "KEEPWARM__ENGINE__DTYPE": "float32",
        },
    ).ready()
    yield process
    assert process.stop() == 0


@pytest.fixture(scope="session")
def tiny_model(saved: Callable[..., Path]) -> Path:
    return saved("llama")


@pytest.fixture(scope="session")
def keyed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Keyed]:
    """A tiny model, API keys, a public catalogue."""
    folder = tmp_path_factory.mktemp("keyed")
    keys = folder / "keys.json"
    made = {name: add_key(keys, name)[1] for name in ("acme", "umbrella")}
    made["narrow"] = add_key(keys, "narrow", limits={"requests_per_minute": 3, "max_concurrent": 2})[1]
    made["short"] = add_key(keys, "short", limits={"max_new_tokens": 3})[1]
    made["admin"] = add_key(keys, "operator", admin=True)[1]
    tools = folder / "tools.json"
    tools.write_text(json.dumps([weather("desk_weather", 10), weather("desk_time", 10)]))
    config = folder / "serve.toml"
    config.write_text(
        f'[server]\nmodel_names = ["tiny"]\n[tenants]\nkeys_file = "{keys}"\n'
        f'[limits]\nmax_body = "1MiB"\nmax_tools = 200\n'
        f'[[catalogue]]\nname = "desk"\ntools = "{tools}"\nsystem = "{CATALOGUE_SYSTEM}"\n'
    )
    store = folder / "store"
    process = ServerProcess(tiny_model, store, "--config", str(config)).ready()
    yield Keyed(process, store, keys, **made)
    assert process.stop() == 0


# ---- the web page ----


@pytest.fixture(scope="module")  # Playwright's loop, while it runs, leaves no room for asyncio's in other tests
def browser() -> Iterator[Any]:
    with launched() as found:
        yield found


@pytest.fixture
def empty(server: ServerProcess) -> Iterator[ServerProcess]:
    """The service with an empty store; it is left so."""
    httpx.post(f"{server.url}/v1/cache/purge", timeout=DEADLINE).raise_for_status()
    yield server
    httpx.post(f"{server.url}/v1/cache/purge", timeout=DEADLINE).raise_for_status()


@pytest.fixture
def page(browser: Any, empty: ServerProcess) -> Iterator[Any]:
    """The page, ready."""
    server = empty
    found = opened(browser, server.url)
    ready(found)
    yield found
    found.context.close()
    assert found.complaints == []
    assert all(url.startswith(f"{server.url}/") for url in found.asked)
