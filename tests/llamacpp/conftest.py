"""A real llama.cpp, in `.peers/llamacpp` (`make test-llamacpp`). Nothing here imports torch, which that environment has
not: `--confcutdir` keeps the other tests' conftest.py out."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
HAS_LIBRARY = importlib.util.find_spec("llama_cpp") is not None and importlib.util.find_spec("diskcache") is not None

if not HAS_LIBRARY:
    collect_ignore = [path.name for path in HERE.glob("test_*.py") if path.name != "test_installed.py"]

if HAS_LIBRARY and importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("llamacpp", deadline=None)
    settings.load_profile("llamacpp")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a tiny model of a kind, once."""
    from tests.helpers.llamacpp_models import write

    folder = tmp_path_factory.mktemp("gguf")

    def make(kind: str = "llama", seed: int = 0) -> Path:
        path = folder / f"{kind}-{seed}.gguf"
        return path if path.exists() else write(path, kind, seed)

    return make


@pytest.fixture(autouse=True)
def own_identity_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPWARM_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def start(model: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts a `Host`, as a new process would: a model of its own, and a cache over the folder `store`."""
    from tests.helpers.llamacpp_host import Host

    opened: list[Any] = []

    def one(kind: str = "llama", *, seed: int = 0, cache: dict[str, Any] | None = None, **settings: Any) -> Any:
        asked = {"store": tmp_path / "store", "max_ram": 0, "max_disk": "64MiB"} | (cache or {})
        opened.append(Host(model(kind, seed), asked, settings))
        return opened[-1]

    yield one
    for host in opened:
        host.close()
