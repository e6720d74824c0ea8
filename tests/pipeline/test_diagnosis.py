"""`explain` names the first differing character, token and segment, what changed, and what that costs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keepwarm import Engine
from keepwarm.core.results import Miss
from keepwarm.errors import CorruptRun

SYSTEM = "Du bist höflich 👋, 你好. " + " ".join(f"Rule {i} holds." for i in range(30))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Look up the {name}.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("weather", "trains")
]
CHAT = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "Where to? " * 8},
    {"role": "assistant", "content": "To the sea. " * 8},
    {"role": "user", "content": "And then? " * 8},
]
STEP = 32


@pytest.fixture(scope="module")
def folder(saved: Callable[..., Path]) -> Path:
    return saved("llama")


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(folder, store=tmp_path / "store", step=STEP, min_step=8) as engine:
        engine.generate(messages=CHAT, tools=TOOLS, max_new_tokens=1)
        engine.flush()
        yield engine


def difference(engine: Engine, **asked: Any) -> Miss:
    found = engine.explain(**asked).miss
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("changed", "old", "new"),
    [
        ("system", "Rule 17 holds", "Rule 17 fails"),
        ("system", "你好", "您好"),
        ("tools", "the trains", "the boats"),
        ("message", "To the sea. To", "To the lake. To"),
    ],
)
def test_first_difference_to_the_character(engine: Engine, changed: str, old: str, new: str) -> None:
    def edited(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(old, new, 1)
        if isinstance(value, dict):
            return {key: edited(item) for key, item in value.items()}
        return [edited(item) for item in value]

    messages, tools = edited(CHAT), edited(TOOLS)
    found = difference(engine, messages=messages, tools=tools)
    assert found.reason == "tokens_differ"
    assert found.changed == found.segment == changed
    text = engine.pipeline.adapter.render(messages, tools).text
    before = engine.pipeline.adapter.render(CHAT, TOOLS).text
    at = next(i for i, (a, b) in enumerate(zip(text, before, strict=False)) if a != b)
    assert found.character == at
    assert found.in_segment is not None
    assert 0 <= found.in_segment <= at
    assert text[at] in found.wanted
    assert before[at] in found.stored
    assert found.lost_tokens > 0
    assert found.lost_blocks > 0
    assert found.lost_bytes == found.lost_tokens * engine.pipeline.model.geometry.bytes_per_token
    assert found.lost_ms is None or found.lost_ms > 0


def test_what_nobody_stored_is_not_lost(engine: Engine) -> None:
    found = difference(engine, messages=[*CHAT, {"role": "assistant", "content": "Home. " * 99}, CHAT[1]], tools=TOOLS)
    assert (found.reason, found.lost_blocks, found.lost_ms) == ("never_stored", 0, None)


def test_a_changed_template_is_told_from_changed_text(engine: Engine, folder: Path) -> None:
    other = copy.deepcopy(engine.pipeline.tokenizer._tokenizer)
    other.chat_template = other.chat_template.replace("<|im_start|>", "<|im_start|> ")
    store = engine.pipeline.config.store
    with Engine.from_pretrained((engine.pipeline.model.model, other), store=store, step=STEP, min_step=8) as changed:
        found = difference(changed, messages=CHAT, tools=TOOLS)
    assert (found.reason, found.changed) == ("template_changed", "template")


def test_salt(engine: Engine) -> None:
    assert difference(engine, messages=CHAT, tools=TOOLS, salt="a").changed == "salt"


def test_corrupt(engine: Engine) -> None:
    disk = engine.pipeline.archive._disk
    assert disk is not None
    runs = [entry.id for entry in engine.pipeline.archive.contents.entries()]
    engine.pipeline.archive.clear_ram()
    engine.pipeline.pool.forget()
    disk.quarantine(runs[0], CorruptRun("a flipped bit"))
    found = difference(engine, messages=CHAT, tools=TOOLS)
    assert (found.reason, found.changed) == ("corrupt", "corrupt")
    assert found.lost_blocks > 0


@pytest.mark.parametrize(
    ("tier", "ttl"),
    [
        ("ram", None),
        pytest.param("ram", 1e-6, marks=pytest.mark.slow),
        pytest.param("disk", None, marks=pytest.mark.slow),
        ("disk", 1e-6),
    ],
)
def test_evicted_and_expired(folder: Path, tmp_path: Path, tier: str, ttl: float | None) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 9999, 400).tolist() for _ in range(8)]
    where = (
        {"store": tmp_path / "store", "max_disk": "1500KiB", "max_ram": 0} if tier == "disk" else {"max_ram": "500KiB"}
    )
    with Engine.from_pretrained(folder, dtype="float32", step=STEP, min_step=8, store_ttl=ttl, **where) as engine:
        for prompt in prompts:
            engine.generate(prompt, max_new_tokens=1)
            engine.flush()
        engine.pipeline.pool.forget()
        gone = [found for prompt in prompts if (found := engine.explain(prompt).miss) is not None]
    assert gone
    assert {found.reason for found in gone} == {"evicted" if ttl is None else "expired"}
    assert all(found.lost_tokens > 300 for found in gone)


def test_a_purge_leaves_no_note_of_what_went(engine: Engine) -> None:
    engine.generate(messages=CHAT, salt="gone", max_new_tokens=1)
    engine.flush()
    disk = engine.pipeline.archive._disk
    assert disk is not None
    with disk.index.database.transaction() as db:
        db.execute("INSERT INTO evictions VALUES (x'00', 1, 'evicted')")
    engine.purge("gone")
    assert disk.index.eviction_reason(b"\x00") is None
