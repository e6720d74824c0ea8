"""A real MLX, in `.peers/mlx` (`make test-mlx`). Nothing here imports torch, which that environment has not:
`--confcutdir` keeps the other tests' conftest.py out."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
HAS_LIBRARY = importlib.util.find_spec("mlx") is not None and importlib.util.find_spec("mlx_lm") is not None

if not HAS_LIBRARY:
    collect_ignore = [path.name for path in HERE.glob("test_*.py") if path.name != "test_installed.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a tiny model of a kind, once."""
    from tests.helpers.mlx_models import write

    base = tmp_path_factory.mktemp("models")

    def make(kind: str = "llama", seed: int = 0, **changes: Any) -> Path:
        named = "".join(f"-{name}-{value}" for name, value in changes.items())
        folder = base / f"{kind}-{seed}{named}"
        return folder if folder.exists() else write(folder, kind, seed, **changes)

    return make


@pytest.fixture(autouse=True)
def own_identity_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPWARM_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def start(model: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts a `Host`, as a new process would: a model of its own, and a cache over the folder `store`."""
    from tests.helpers.mlx_host import Host

    opened: list[Any] = []

    def one(
        kind: str = "llama", *, seed: int = 0, cache: Any = None, changes: dict[str, Any] | None = None, **settings: Any
    ) -> Any:
        asked = {"store": tmp_path / "store", "max_disk": "64MiB"}
        given = asked | (cache or {}) if cache is None or isinstance(cache, dict) else cache
        opened.append(Host(model(kind, seed, **(changes or {})), given, **settings))
        return opened[-1]

    yield one
    for host in opened:
        host.close()
