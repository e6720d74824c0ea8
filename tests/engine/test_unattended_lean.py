"""What a windowed layer does not attend to is neither loaded nor stored as if it were there, on the compiled kernels:
all of an arena that a request was not given is NaN, and every answer is that of a cold run to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.lean_families import lean_family
from tests.helpers.poison import drop, poisoned

from keepwarm import Engine
from keepwarm.pipeline import prefix_loader

pytestmark = pytest.mark.host_memory("the compiled kernels run in host memory")

LONG = [3 + number * 7919 % 600 for number in range(330)]


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_loader, "place", poisoned)


@pytest.fixture(scope="module")
def model() -> Any:
    return lean_family("gemma3")


@pytest.fixture(scope="module")
def plain(model: Any, tokenizer: Any) -> Iterator[Engine]:
    with Engine.from_pretrained((model, tokenizer), reuse="off") as engine:
        assert engine.pipeline.model.runner.lean is not None
        yield engine


def right(engine: Engine, plain: Engine, prompt: list[int]) -> dict[str, int]:
    """Where the tokens came from, once the answer is known to be that of a cold run."""
    warm = engine.generate(prompt, max_new_tokens=4, trace=True)
    cold = plain.generate(prompt, max_new_tokens=4, trace=True)
    assert (warm.exactness, warm.token_ids, warm.logits_digest) == ("exact", cold.token_ids, cold.logits_digest)
    return dict(warm.cached_by_tier)


def shorter_ones_are_right(engine: Engine, plain: Engine, tier: str) -> None:
    for length in (320, 64, 200, 128):
        drop(engine, tier)
        right(engine, plain, [*LONG[:length], 6, 7])


def test_what_was_not_loaded_is_not_stored_when_the_store_lost_it(
    model: Any, plain: Engine, tokenizer: Any, tmp_path: Path
) -> None:
    with Engine.from_pretrained((model, tokenizer), store=tmp_path, min_store_tokens=1) as engine:
        engine.warm([*LONG, 5])
        drop(engine, "disk")
        assert right(engine, plain, [*LONG, 5]) == {"disk": len(LONG)}
        engine.flush()
        for entry in engine.pipeline.archive.contents.entries():
            engine.pipeline.archive.remove(entry.id)
        assert right(engine, plain, [*LONG, 5]) == {"device": len(LONG)}
        shorter_ones_are_right(engine, plain, "disk")


@pytest.mark.slow
def test_what_was_not_loaded_is_not_stored_when_memory_lost_it(model: Any, plain: Engine, tokenizer: Any) -> None:
    with Engine.from_pretrained((model, tokenizer), store_answers=False) as engine:
        engine.warm([*LONG, 5])
        drop(engine, "ram")
        assert right(engine, plain, [*LONG, 5]) == {"ram": len(LONG)}
        engine.flush()
        engine.pipeline.archive.clear_ram()
        right(engine, plain, [*LONG, 5])
        shorter_ones_are_right(engine, plain, "ram")


def test_a_hit_partly_in_memory_and_partly_on_disk(model: Any, plain: Engine, tokenizer: Any, tmp_path: Path) -> None:
    with Engine.from_pretrained((model, tokenizer), store=tmp_path) as engine:
        for length in (200, 330):
            engine.generate(LONG[:length], max_new_tokens=1)
            engine.flush()
    with Engine.from_pretrained((model, tokenizer), store=tmp_path) as engine:
        engine.generate([*LONG[:190], 9], max_new_tokens=1)
        drop(engine, "ram")
        tiers = right(engine, plain, [*LONG, 5])
        assert tiers.keys() == {"ram", "disk"}
