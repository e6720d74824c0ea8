"""`explain` plans as a request made that instant would, and an answer says of itself what `explain` said of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepwarm import Batcher, Engine
from keepwarm.core.results import Explanation, Generation, Miss
from keepwarm.errors import CorruptRun

STEP = 32
SYSTEMS = [
    "You are a careful assistant of a travel agency. " + " ".join(f"Rule {i} {verb}." for i in range(20))
    for verb in ("holds", "stands")
]
SYSTEMS.append(SYSTEMS[0].replace("Rule 13 holds", "Rule 13 fails"))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Look up the {name}. " * 4,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("weather", "trains", "hotels")
]
DOCUMENTS = [f"The pier number {i} is {i + 3} metres deep. " * 8 for i in range(3)]
SAID = ["Where to? " * 6, "And then? " * 6, "Why there? " * 6]


@pytest.fixture(scope="module")
def folder(saved: Callable[..., Path]) -> Path:
    return saved("llama", max_position_embeddings=4096)


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Iterator[Engine]:
    settings: dict[str, Any] = {"step": STEP, "min_step": 8, "settle_after": None}
    with Engine.from_pretrained(folder, store=tmp_path / "store", **settings) as engine:
        yield engine


def request(rng: random.Random, talks: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """One of many requests that begin alike: edited, longer, shorter, under a salt, in a session."""
    asked: dict[str, Any] = {"reuse": rng.choice([None, None, "exact", "prefix", "off"])}
    asked["salt"] = rng.choice([None, None, "a", "b"])
    kind = rng.choice(["chat", "chat", "session", "session", "prompt", "ids", "segments"])
    if kind == "prompt":
        return asked | {"prompt": rng.choice(SYSTEMS) + rng.choice(SAID) * rng.randint(0, 3)}
    if kind == "ids":
        return asked | {"prompt": [*range(5, 5 + 20 * rng.randint(1, 8)), rng.randint(5, 9)]}
    if kind == "segments":
        return asked | {"segments": [rng.choice(SYSTEMS), *rng.sample(DOCUMENTS, rng.randint(0, 2)), SAID[0]]}
    chat = [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < 0.8 else []
    for turn in range(rng.randint(0, 2)):
        chat += [
            {"role": "user", "content": rng.choice(SAID)},
            {"role": "assistant", "content": f"To pier {turn}. " * 6},
        ]
    chat.append({"role": "user", "content": rng.choice(SAID)})
    if rng.random() < 0.5:
        asked["tools"] = TOOLS[: rng.randint(1, 3)]
    if rng.random() < 0.3:
        asked["documents"] = rng.sample(DOCUMENTS, rng.randint(1, 2))
    if kind == "session":
        name = rng.choice(["first", "second"])
        asked |= {"session": name, "reuse": rng.choice([None, "prefix"])}
        key = f"{name}/{asked['salt']}"
        if key in talks and rng.random() < 0.7:
            said = {"role": "user", "content": rng.choice(SAID)}
            if rng.random() < 0.5:
                return {"prompt": said["content"], "session": name, "salt": asked["salt"], "reuse": asked["reuse"]}
            chat = [*talks[key], said]
        talks[key] = chat
    return asked | {"messages": chat}


def untimed(miss: Miss | None) -> Miss | None:
    """All but the time that computing takes, which each answer measures anew."""
    return miss and replace(miss, lost_ms=None)


def told(explained: Explanation) -> dict[str, Any]:
    return {
        "prompt": explained.prompt_tokens,
        "cached": explained.cached_tokens,
        "tiers": explained.cached_by_tier,
        "exactness": explained.exactness,
        "miss": untimed(explained.miss),
    }


def found(result: Generation) -> dict[str, Any]:
    return {
        "prompt": result.prompt_tokens,
        "cached": result.cached_tokens,
        "tiers": result.cached_by_tier,
        "exactness": result.exactness,
        "miss": untimed(result.miss),
    }


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_explain_says_what_a_request_then_does(engine: Engine, seed: int) -> None:
    rng = random.Random(seed)
    talks: dict[str, list[dict[str, Any]]] = {}
    seen = set()
    for _ in range(60):
        asked = request(rng, talks)
        asked["max_new_tokens"] = rng.randint(1, 6)
        engine.flush()
        explained = engine.explain(**asked)
        result = engine.generate(**asked)
        assert found(result) == told(explained), asked
        if "session" in asked:
            talks[f"{asked['session']}/{asked['salt']}"] = list(
                engine.sessions.show(asked["session"], asked["salt"]).messages
            )
        seen.add(result.miss.reason if result.miss else "")
        match rng.randrange(8):
            case 0:
                engine.sessions.settle()
            case 1:
                engine.pipeline.pool.forget()
            case 2:
                engine.flush()
                engine.pipeline.archive.clear_ram()
    assert {"", "never_stored", "tokens_differ", "reuse_off"} <= seen


def test_a_turn_of_a_session_is_explained_as_that_turn(engine: Engine) -> None:
    session = engine.sessions.open("talk", system=SYSTEMS[0])
    session.say("Where to? " * 6, max_new_tokens=40)
    session.settle()
    engine.flush()
    explained = engine.explain("And then?", session="talk")
    alone = engine.explain(messages=[*session.show().messages, {"role": "user", "content": "And then?"}])
    result = session.say("And then?", max_new_tokens=4)
    assert found(result) == told(explained)
    assert explained.cached_tokens >= alone.cached_tokens


def test_answers_of_a_batch_say_the_same(engine: Engine) -> None:
    asked = [
        {"messages": [{"role": "system", "content": system}, {"role": "user", "content": SAID[0]}], "reuse": reuse}
        for system in (SYSTEMS[0], SYSTEMS[2])
        for reuse in (None, "off")
    ]
    with Batcher(engine) as batcher:
        for one in asked:
            explained = engine.explain(**one)  # type: ignore[arg-type]
            result = batcher.submit(**one, max_new_tokens=3).result(60)  # type: ignore[arg-type]
            assert found(result) == told(explained)
            engine.flush()
    assert explained.miss is not None


def test_damage_that_is_met_on_the_way_is_the_answers_reason(engine: Engine) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "system", "content": SYSTEMS[0]}, {"role": "user", "content": "Hi"}]}
    engine.generate(**asked, max_new_tokens=1)
    engine.flush()
    engine.pipeline.archive.clear_ram()
    engine.pipeline.pool.forget()
    disk = engine.pipeline.archive._disk
    assert disk is not None
    for entry in engine.pipeline.archive.contents.entries():
        disk.quarantine(entry.id, CorruptRun("a flipped bit"))
    result = engine.generate(**asked, max_new_tokens=1)
    assert result.miss is not None
    assert (result.cached_tokens, result.miss.reason) == (0, "corrupt")


def test_what_runs_without_the_cache_says_so(engine: Engine) -> None:
    engine.pipeline.model.model.train()
    try:
        explained, result = engine.explain("Where to?"), engine.generate("Where to?", max_new_tokens=1)
    finally:
        engine.pipeline.model.model.eval()
    assert found(result) == told(explained)
    assert result.miss is not None
    assert result.miss.reason == "uncacheable"
    assert result.miss.detail == result.uncached_reason == result.to_dict()["uncached_reason"]
