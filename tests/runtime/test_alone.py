"""A model that keeps part of its state in its modules answers one request at a time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.helpers.every_model import make
from tests.helpers.letters import letters

from keepwarm import Engine
from keepwarm.errors import Overloaded

TEXTS = [f"Pier {number} takes boats of {number} metres and no others." for number in range(4)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained((make("recurrent_gemma"), letters())) as engine:
        assert "lies in its modules" in engine.pipeline.model.uncached_reason
        yield engine


def digest(engine: Engine, text: str) -> str | None:
    return engine.generate(text, max_new_tokens=8, trace=True).logits_digest


def test_threads_wait_for_each_other(engine: Engine) -> None:
    alone = [digest(engine, text) for text in TEXTS]
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lambda text: digest(engine, text), TEXTS)] == alone


def test_a_second_one_in_the_same_thread_is_refused(engine: Engine) -> None:
    before = digest(engine, TEXTS[0])
    stream = engine.stream(TEXTS[0], max_new_tokens=8, trace=True)
    first = next(stream)
    assert first.result is None
    with pytest.raises(Overloaded, match="one request at a time"):
        engine.generate(TEXTS[1], max_new_tokens=1)
    assert [piece.result for piece in stream][-1].logits_digest == before  # type: ignore[union-attr]
    assert digest(engine, TEXTS[0]) == before
