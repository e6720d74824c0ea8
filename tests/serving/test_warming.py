"""What a service warms at its start: what was used most lately, under the names that it has."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.batches import STEP, until
from tests.helpers.models import tiny
from tests.helpers.processes import DEADLINE, ServerProcess, chat
from tests.helpers.prompts import ids
from tests.helpers.services import weather

from keepwarm import Engine
from keepwarm.serving.warming import latest


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> tuple[Any, Any]:
    return tiny("llama"), tokenizer


def opened(model: tuple[Any, Any], store: Path, **settings: Any) -> Engine:
    return Engine.from_pretrained(model, store=store, step=STEP, min_step=4, **settings)


def warmed(engine: Engine, most: int) -> int:
    """Warm as a service does, and return how many headers there were."""
    work = [*latest(engine, most)]
    for each in work:
        each()
    engine.flush()
    return len(work)


def tiers(engine: Engine, prompt: list[int], salt: str | None = None) -> dict[str, int]:
    return engine.explain(prompt, salt=salt).cached_by_tier


@pytest.mark.slow
def test_the_latest_headers_are_in_ram_under_their_own_salts(model: tuple[Any, Any], tmp_path: Path) -> None:
    old, new, alone = ids(200, 1), ids(220, 2), ids(240, 3)
    with opened(model, tmp_path) as engine:
        for head, salt in ((old, None), (new, "acme")):
            for number in range(2):
                engine.generate(head + ids(40, 10 + number), max_new_tokens=1, salt=salt)
            engine.flush()
            time.sleep(0.01)  # the times of use differ
        engine.generate(alone, max_new_tokens=1)
        cold = engine.generate(new + ids(9, 20), max_new_tokens=4, trace=True, reuse="off")
    with opened(model, tmp_path) as engine:
        assert warmed(engine, 1) == 1
        found = tiers(engine, new + ids(9, 20), "acme")
        assert (found["ram"], found.get("disk", 0)) == (sum(found.values()), 0)
        assert found["ram"] >= 192
        assert not any(tiers(engine, new + ids(9, 20)).values()), "a salt's KV is that salt's"
        assert not any(tiers(engine, new + ids(9, 20), "umbrella").values())
        assert not tiers(engine, old + ids(9, 20)).get("ram")
        answer = engine.generate(new + ids(9, 20), max_new_tokens=4, trace=True, salt="acme")
        assert (answer.exactness, answer.logits_digest) == ("exact", cold.logits_digest)
        assert answer.cached_by_tier.get("ram", 0) >= 192
    with opened(model, tmp_path) as engine:
        assert warmed(engine, 9) == 2, "what nothing else begins with is no header"
        assert tiers(engine, old + ids(9, 20))["ram"] >= 192
    with opened(model, tmp_path, max_ram=0) as engine:
        assert warmed(engine, 9) == 0, "there is no room"


def test_a_set_without_salt_is_computed_if_its_kv_is_gone(model: tuple[Any, Any], tmp_path: Path) -> None:
    with opened(model, tmp_path) as engine:
        engine.tools([weather(words=30)], system="You are brief.", name="desk")
        engine.tools([weather(words=20)], name="acme:desk", salt="acme")
    with opened(model, tmp_path) as engine:
        desk = engine.tool_sets.get("desk")
        assert warmed(engine, 9) == 2
        assert desk.explain("Hi").cached_by_tier["ram"] > 64
        for entry in engine.pipeline.archive.contents.entries():
            engine.remove(entry.id)
        assert not desk.explain("Hi").cached_tokens
        assert warmed(engine, 9) == 1, "under a salt nothing is computed that nobody asked for"
        assert desk.explain("Hi").cached_tokens > 64
        assert not engine.tool_sets.get("acme:desk", salt="acme").explain("Hi").cached_tokens


@pytest.mark.slow
def test_a_service_warms_at_its_start(saved: Callable[..., Path], tmp_path: Path) -> None:
    model, store = saved("llama"), tmp_path / "store"
    system = {"role": "system", "content": "You are the clerk of a harbour. " * 20}

    def ask(url: str, question: str) -> dict[str, Any]:
        found = chat(url, "", messages=[system, {"role": "user", "content": question}], model=model.name)
        return dict(found.raise_for_status().json())

    first = ServerProcess(model, store).ready()
    for question in ("How deep is pier one?", "And pier two, at low tide?"):
        ask(first.url, question)
    assert first.stop() == 0
    second = ServerProcess(model, store, "--warm-last", "3").ready()

    def in_ram() -> bool:
        entries = httpx.get(f"{second.url}/v1/cache/entries", timeout=DEADLINE).raise_for_status().json()
        return any(entry["tier"] == "ram" for entry in entries["entries"])

    until(in_ram)
    answer = ask(second.url, "Who is on watch?")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
    assert "disk" not in answer["keepwarm"]["cached_by_tier"]
    assert second.stop() == 0
