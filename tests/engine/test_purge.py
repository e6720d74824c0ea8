"""A tenant's purge, through the engine: nothing of it hits, in any tier, and nothing of it is left on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.conftest import tiny

from keepwarm import Engine
from keepwarm.errors import StoreLocked

IDS = [5 + i * 31 % 4000 for i in range(80)]


def test_a_purged_salt_hits_nowhere_and_others_stay(tokenizer: Any, tmp_path: Path) -> None:
    with Engine.from_pretrained((tiny("llama"), tokenizer), store=tmp_path / "store", step=16) as engine:
        for salt in ("gone", "stays"):
            engine.generate(IDS, salt=salt, max_new_tokens=1)
        engine.archive.flush()
        assert engine.purge("gone").runs > 0
        assert engine.explain(IDS, salt="gone").cached_tokens == 0
        assert engine.generate(IDS, salt="stays", max_new_tokens=1).cached_tokens == 64
        assert engine.generate(IDS, salt="gone", max_new_tokens=1).cached_tokens == 0


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
    assert warm.cached_by_tier == {"disk": 64}
    assert warm.logits_digest == cold.logits_digest
    with pytest.raises(StoreLocked):
        Engine.from_pretrained((tiny("llama"), tokenizer), **settings)
    monkeypatch.setenv("KEEPWARM_STORE_KEY", bytes(range(1, 33)).hex())
    with pytest.raises(StoreLocked):
        Engine.from_pretrained((tiny("llama"), tokenizer), **settings)
