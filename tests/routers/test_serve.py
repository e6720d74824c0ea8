"""Replicas of `keepwarm serve` behind vLLM's router: what begins alike goes to one replica, and is reused there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.processes import DEADLINE, ServerProcess
from tests.helpers.routers import routing

RULES = "Answer briefly and kindly, whatever the guest asks of you. " * 20
HEADS = [f"{name} is where you are the clerk. {RULES}" for name in ("Harbour", "Museum", "Garden", "Station")]


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    folder = tmp_path_factory.mktemp("replicas")
    found = [ServerProcess("demo", folder / str(number)) for number in range(2)]
    try:
        yield [one.ready() for one in found]
    finally:
        for one in found:
            one.stop()


def ask(url: str, head: str, question: str, replicas: list[ServerProcess], **headers: str) -> tuple[int, Any]:
    """Return which replica answered, and the answer."""
    before = [answered(one) for one in replicas]
    messages = [{"role": "system", "content": head}, {"role": "user", "content": question}]
    body = {"model": "demo", "messages": messages, "max_tokens": 3, "temperature": 0}
    found = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=DEADLINE)
    assert found.status_code == 200, found.text
    (number,) = (number for number, one in enumerate(replicas) if answered(one) > before[number])
    return number, found.json()


def answered(replica: ServerProcess) -> float:
    text = httpx.get(f"{replica.url}/metrics", timeout=DEADLINE).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("keepwarm_requests_total"))


@pytest.mark.parametrize(("policy", "session"), [("cache_aware", False), ("consistent_hash", True)])
def test_what_begins_alike_goes_to_one_replica(
    router: Path, replicas: list[ServerProcess], policy: str, session: bool
) -> None:
    """The router tokenizes nothing here, since the service has no endpoint for that: it compares texts, or sessions."""
    with routing(router, policy, [one.url for one in replicas]) as url:
        places: list[set[int]] = [set() for _ in HEADS]
        for question in ("How deep is it?", "Who built it?", "When does it close?"):
            for number, head in enumerate(HEADS):
                headers = {"x-session-id": f"{policy}-{number}"} if session else {}
                place, found = ask(url, f"{policy}: {head}", question, replicas, **headers)
                if places[number]:
                    used = found["usage"]
                    assert used["prompt_tokens_details"]["cached_tokens"] > used["prompt_tokens"] * 0.8
                places[number].add(place)
    assert [len(found) for found in places] == [1] * len(HEADS)
