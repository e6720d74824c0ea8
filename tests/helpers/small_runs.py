"""Runs of one prompt each in a store with room for few of them, and a clock that is set by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from keepwarm.store import Archive
from keepwarm.store.catalog import schema
from keepwarm.store.retention import Rules
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, make_run, namespace, prompt

LENGTH = 64
LARGE = 2048  # tokens of a run that outweighs the catalogue


ROOM = schema.WAL_BYTES + (352 << 10)


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def run_for(seed: int, length: int = LARGE, first: int = 0, last: int | None = None) -> Any:
    return make_run(MemoryKV.random(UNEVEN, length, seed), blocks_of(prompt(length, seed), 256)[first:last])


SIZE = run_for(0).nbytes + 8192


def put(archive: Archive, seed: int, turns: int | None = None, **arguments: Any) -> list[bytes]:
    blocks = blocks_of(prompt(LENGTH, seed))[:turns]
    archive.put(MemoryKV.random(UNEVEN, LENGTH, seed), blocks, namespace(), **arguments)
    archive.flush()
    return [block.exact for block in blocks]


def opened(folder: Path | None, **rules: Any) -> Archive:
    return Archive.open(folder, max_ram=1 << 24, max_disk=1 << 26, rules=Rules(**rules))
