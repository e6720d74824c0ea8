"""A small share of `tests/stress/crowding.py`: the worst bodies of some tenants, short questions of another.

How long an answer takes is measured there. Here nothing may be stuck, and nobody turned away for what another does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.stress.bodies import worst
from tests.stress.crowding import TIMEOUT, Crowd, Service, asked

SIZE = 256 << 10  # bytes of a body
ENDS = 9.0  # seconds: limits.shutdown_grace and limits.shutdown_timeout
GENEROUS = 30.0  # seconds more, for machines that do much else


@pytest.fixture(scope="module")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    started = Service(tmp_path_factory.mktemp("crowded"), str(tiny_model), crowds=2)
    yield started
    started.process.kill()


@pytest.mark.slow
def test_short_questions_are_answered_beside_the_worst_bodies_and_the_process_ends(service: Service) -> None:
    async def crowded() -> list[float]:
        async with Crowd(service.url, service.crowd, worst("served", SIZE)) as crowd:
            times = await asked(service.url, service.asking, "served", 25, 0.1)
            assert crowd.answers, "nobody is answered at all"
            assert not [name for name in crowd.answers if name.endswith(": 500")], crowd.answers
            started = time.monotonic()
            assert await asyncio.to_thread(service.process.stop) in (0, 1)
            assert time.monotonic() - started < ENDS + GENEROUS
        return times

    times = asyncio.run(crowded())
    assert max(times) < TIMEOUT, times
