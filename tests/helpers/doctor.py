"""`keepwarm doctor`, asked for its findings by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.cli import Cli
from tests.helpers.remotes import free_port

from keepwarm.store import Archive
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, namespace, prompt

Look = Callable[..., tuple[int, dict[str, Any]]]

KEY = bytes(range(32))


def filled(folder: Path, key: bytes | None = None) -> Path:
    with Archive.open(folder, max_ram=0, max_disk=1 << 24, key=key) as archive:
        archive.put(MemoryKV.random(UNEVEN, 40, 1), blocks_of(prompt(40, 1)), namespace())
        archive.flush()
    return folder


@pytest.fixture
def look(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Look:
    """Run the doctor on a free port; the exit code, and findings by name."""
    monkeypatch.setenv("KEEPWARM__SERVER__PORT", str(free_port()))
    monkeypatch.setattr("keepwarm.cli.doctor.stores._PATIENCE", 0.05)

    def looked(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
        result = cli("doctor", "--json", *arguments)
        assert all(each["advice"] for each in result.json["findings"] if each["status"] != "ok")
        return result.code, {each["name"]: each for each in result.json["findings"]}

    return looked
