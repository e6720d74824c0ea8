"""The store's rules as the engine keeps them: a tenant's purge, encryption, admission."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.models import tiny

from keepwarm import Engine
from keepwarm.errors import StoreLocked

IDS = [5 + i * 31 % 4000 for i in range(80)]


def kept(engine: Engine) -> tuple[int, int]:
    """Tokens of them that are found again, and the blocks that an answer to them leaves: of pages, or of steps."""
    return (79, 3) if engine.pipeline.grid.inside else (64, 4)


def test_a_purged_salt_hits_nowhere_and_others_stay(tokenizer: Any, tmp_path: Path) -> None:
    with Engine.from_pretrained((tiny("llama"), tokenizer), store=tmp_path / "store", step=16) as engine:
        for salt in ("gone", "stays"):
            engine.generate(IDS, salt=salt, max_new_tokens=1)
        engine.flush()
        assert engine.purge("gone").runs > 0
        assert engine.explain(IDS, salt="gone").cached_tokens == 0
        assert engine.generate(IDS, salt="stays", max_new_tokens=1).cached_tokens == kept(engine)[0]
        assert engine.generate(IDS, salt="gone", max_new_tokens=1).cached_tokens == 0


@pytest.mark.slow
def test_an_encrypted_store_answers_with_its_key_alone(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    settings: dict[str, Any] = {"store": tmp_path / "store", "step": 16}
    with Engine.from_pretrained((tiny("llama"), tokenizer), **settings, store_key_file=key) as engine:
        cold = engine.generate(IDS, max_new_tokens=3, trace=True)
    with Engine.from_pretrained((tiny("llama"), tokenizer), **settings, store_key_file=key) as engine:
        warm = engine.generate(IDS, max_new_tokens=3, trace=True)
    assert warm.cached_by_tier == {"disk": kept(engine)[0]}
    assert warm.logits_digest == cold.logits_digest
    with pytest.raises(StoreLocked):
        Engine.from_pretrained((tiny("llama"), tokenizer), **settings)
    monkeypatch.setenv("KEEPWARM_STORE_KEY", bytes(range(1, 33)).hex())
    with pytest.raises(StoreLocked):
        Engine.from_pretrained((tiny("llama"), tokenizer), **settings)


@pytest.mark.hurried
def test_a_disk_slower_than_the_model_is_left_alone(tokenizer: Any, tmp_path: Path) -> None:
    """The costs are set by hand: no disk here is that slow."""
    with Engine.from_pretrained((tiny("llama"), tokenizer), store=tmp_path / "store", step=16) as engine:
        cold = engine.generate(IDS, max_new_tokens=3, trace=True)
        engine.flush()
        engine.pipeline.archive.clear_ram()
        engine.pipeline.pool.forget()
        for _ in range(50):
            engine.pipeline.costs.loaded("disk", 10_000, 1e6)
            engine.pipeline.costs.computed(10_000, 1e-3)
        explained = engine.explain(IDS)
        assert explained.cached_tokens == 0
        recomputed = engine.generate(IDS, max_new_tokens=3, trace=True)
        assert recomputed.cached_tokens == 0
        assert recomputed.exactness == "exact"
        assert recomputed.logits_digest == cold.logits_digest
        engine.flush()
        assert engine.pipeline.archive.contents.counters()["recomputed_by_choice"] == 1


def test_warming_what_is_on_disk_brings_it_into_ram(tokenizer: Any, tmp_path: Path) -> None:
    with Engine.from_pretrained((tiny("llama"), tokenizer), store=tmp_path / "store", step=16) as engine:
        engine.warm(IDS)
        engine.flush()
        engine.pipeline.archive.clear_ram()
        engine.pipeline.pool.forget()
        assert engine.warm(IDS).new_blocks == 0
        engine.flush()
        assert engine.generate([*IDS, 9, 9], max_new_tokens=1).cached_by_tier == {"ram": 80}


def test_second_use_stores_what_was_seen_before(tokenizer: Any, tmp_path: Path) -> None:
    with Engine.from_pretrained(
        (tiny("llama"), tokenizer), store=tmp_path / "store", step=16, admit="second_use"
    ) as engine:
        blocks = kept(engine)[1]
        for stored in (0, blocks, blocks):
            engine.generate(IDS, max_new_tokens=1)  # the first hit is in device memory alone
            engine.flush()
            assert engine.stats().blocks["disk"] == stored
        engine.warm([7, *IDS])  # what somebody asks for is stored at once
        engine.flush()
        assert engine.stats().blocks["disk"] > blocks


def test_short_prefixes_are_not_stored(tokenizer: Any, tmp_path: Path) -> None:
    with Engine.from_pretrained(
        (tiny("llama"), tokenizer), store=tmp_path / "store", step=16, min_store_tokens=60
    ) as engine:
        engine.generate(IDS[:50], max_new_tokens=1)
        engine.flush()
        assert engine.stats().blocks["disk"] == 0
        engine.generate(IDS, max_new_tokens=1)
        engine.flush()
        assert engine.stats().blocks["disk"] == kept(engine)[1]
