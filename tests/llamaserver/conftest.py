"""A real llama-server: `$KEEPWARM_LLAMA_SERVER`, else the one in `.peers/llama-server` (`make test-llamaserver`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.helpers.llamaserver_hosts import Host, Keeping, keeping, llama_server

HERE = Path(__file__).parent
PROGRAM = Path(
    os.environ.get("KEEPWARM_LLAMA_SERVER", HERE.parents[1] / ".peers" / "llama-server" / "bin" / "llama-server")
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.path.name not in ("test_proxy.py", "test_slot_file.py"):
            item.add_marker(pytest.mark.slow)
            if not PROGRAM.is_file():
                item.add_marker(pytest.mark.skip(reason="llama-server is not compiled: make test-llamaserver"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a tiny model of a kind, once."""
    from tests.helpers.llamacpp_models import write

    folder = tmp_path_factory.mktemp("gguf")

    def make(kind: str = "llama", seed: int = 0) -> Path:
        path = folder / f"{kind}-{seed}.gguf"
        return path if path.exists() else write(path, kind, seed)

    return make


@pytest.fixture
def running() -> Iterator[ExitStack]:
    """What ends with the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def host(model: Callable[..., Path], tmp_path: Path, running: ExitStack) -> Callable[..., Host]:
    """Starts a llama-server with a tiny model, and a folder for its slots."""

    def start(kind: str = "llama", *more: str, seed: int = 0, slots: str = "slots") -> Host:
        (tmp_path / slots).mkdir(exist_ok=True)
        return running.enter_context(llama_server(PROGRAM, model(kind, seed), tmp_path / slots, *more))

    return start


@pytest.fixture
def keep(tmp_path: Path, running: ExitStack) -> Callable[..., Keeping]:
    """Starts `keepwarm slots` in front of a server, over the folder `store`."""

    def start(host: Host, *more: str) -> Keeping:
        return running.enter_context(keeping(host, tmp_path / "store", *more))

    return start
