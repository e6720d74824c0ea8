"""Real services, and archives that have them as a remote tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.remote_archives import NUMBERS, PATIENT
from tests.helpers.remotes import RedisServer, S3Server, redis_server, s3_server

from keepwarm.store import Archive
from keepwarm.store.remote.limits import Limits


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(params=["redis", "s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        return f"{request.getfixturevalue('redis').url}?prefix=test{next(NUMBERS)}:"
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3")
        return server.bucket(f"test{next(NUMBERS)}")
    return f"file://{tmp_path}/objects"


@pytest.fixture
def opened() -> Iterator[Callable[..., Archive]]:
    """Opens archives; RAM and nothing else unless a folder is given."""
    made: list[Archive] = []

    def open_(*urls: str, folder: Path | None = None, limits: Limits = PATIENT, **settings: Any) -> Archive:
        made.append(Archive.open(folder, max_ram=1 << 24, max_disk=1 << 24, remotes=urls, limits=limits, **settings))
        return made[-1]

    yield open_
    for each in made:
        each.close()
