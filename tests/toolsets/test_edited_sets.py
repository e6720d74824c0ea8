"""An edited set's tail, moved and repaired instead of recomputed: opt-in, labelled, and never kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.models import tiny

from keepwarm import Engine
from keepwarm.errors import ConfigError
from keepwarm.toolsets import ToolSet

SETTINGS: dict[str, Any] = {"step": 64, "min_step": 8}
NAMES = ("wind", "tide", "rain", "snow", "fog", "heat", "dew", "hail")
BLEND: dict[str, Any] = {"reuse": "chunks", "max_new_tokens": 5, "trace": True}


def tool(name: str, more: str = "") -> dict[str, Any]:
    properties = {
        "place": {"type": "string", "description": f"Where the {name} is asked for."},
        "day": {"type": "string", "description": f"Which day's {name} is meant, by default the present one."},
    }
    schema = {"type": "object", "properties": properties, "required": ["place"]}
    return {"name": name, "description": f"Looks up the {name} of a place.{more}", "input_schema": schema}


def edited(*names: str) -> list[dict[str, Any]]:
    return [tool(name, " Asks a station." if name in names else "") for name in NAMES]


def register(engine: Engine, *names: str, warm: bool = True, **more: Any) -> ToolSet:
    found = engine.tools(edited(*names), system="You are brief.", name="weather", warm=warm, **more)
    engine.flush()  # what is still on its way to the store is not found there
    return found


def ask(found: ToolSet, **choice: Any) -> Any:
    return found.generate("Is it windy in Oslo?", **BLEND | choice)


@pytest.fixture(params=["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "mistral"))])
def engine(request: pytest.FixtureRequest, tokenizer: Any) -> Iterator[Engine]:
    with Engine.from_pretrained((tiny(request.param, torch.float32), tokenizer), **SETTINGS) as opened:
        yield opened


def test_the_tail_is_moved_and_repaired_and_nothing_of_it_is_kept(engine: Engine) -> None:
    first = register(engine).report
    assert first is not None
    found = register(engine, "rain", warm=False)
    assert found.report is None
    plan = found.look()
    own = plan.reused_tokens - plan.blended_tokens
    assert plan.changes.changed == ("rain",)
    assert plan.tokens == plan.reused_tokens + plan.recomputed_tokens
    assert own > 0
    assert plan.blended_tokens > plan.recomputed_tokens > 0
    counted = engine.stats().cached_tokens
    answer = ask(found, repair="deviation:0.2")
    assert answer.exactness == "blended"
    assert (answer.cached_tokens, answer.blended_tokens) == (plan.reused_tokens, plan.blended_tokens)
    assert answer.repaired_tokens == round(0.2 * plan.blended_tokens)
    assert engine.stats().cached_tokens == counted + own, "what is blended is not counted as a hit"
    cold, whole = ask(found, reuse="off"), ask(found, repair="deviation:1")
    assert whole.repaired_tokens == plan.blended_tokens
    assert whole.token_ids == cold.token_ids
    engine.flush()
    assert replace(found.look(), seconds=plan.seconds) == plan, "nothing was stored"
    for reuse in ("exact", "prefix"):
        assert ask(found, reuse=reuse).logits_digest == cold.logits_digest


def test_once_warmed_it_is_exact(engine: Engine) -> None:
    register(engine)
    found = register(engine, "rain", warm=False)
    assert ask(found).exactness == "blended"
    done = found.warm()
    assert (done.blended_tokens, done.reused_tokens < done.tokens) == (0, True)
    assert found.look().recomputed_tokens == found.look().blended_tokens == 0
    answer = ask(found)
    assert (answer.exactness, answer.blended_tokens) == ("exact", 0)
    assert answer.logits_digest == ask(found, reuse="off").logits_digest


def test_it_is_opt_in(engine: Engine) -> None:
    register(engine)
    found = register(engine, "tide", warm=False)
    answer = found.generate("Is it windy in Oslo?", max_new_tokens=2)
    assert (answer.exactness, answer.blended_tokens) == ("exact", 0)
    grown = engine.tools([*edited("tide"), tool("ash")], system="You are brief.", name="more", based_on="weather")
    assert ask(grown).exactness == "exact", "what is added last leaves nothing to move"


def test_of_several_edits_the_last_version_that_is_stored_is_moved(engine: Engine) -> None:
    register(engine)
    once = register(engine, "rain", warm=False)
    twice = register(engine, "rain", "snow", warm=False)
    assert (ask(once).exactness, ask(twice).exactness) == ("blended", "blended")
    twice.warm()
    engine.flush()
    other = engine.tools(edited("fog"), system="You are brief.", name="other", based_on="weather", warm=False)
    assert other.look().blended_tokens > 0


def test_a_tenants_versions_are_its_own(engine: Engine) -> None:
    register(engine, salt="one")
    found = register(engine, "rain", warm=False, salt="one")
    assert ask(found).exactness == "blended", "under the set's salt"
    assert ask(found, salt="two").exactness == "exact"
    assert ask(found, salt=None).exactness == "exact"
    assert (found.look().blended_tokens > 0, found.look(salt="two").blended_tokens) == (True, 0)


def test_a_salt_that_is_set_later_finds_its_own_versions_and_no_others(engine: Engine) -> None:
    """As a service does: it builds the request, and then says whose it is."""
    register(engine, salt="one")
    found = register(engine, "rain", warm=False, salt="one")
    asked = found.request("Is it windy in Oslo?", **BLEND)
    assert engine.generate(**asked | {"salt": "one"}).exactness == "blended"
    assert engine.explain(**found.request("Is it windy?", reuse="chunks")).chunks
    register(engine)  # now there is KV under no salt, too
    found = register(engine, "rain", warm=False)
    other = engine.generate(**found.request("Is it windy in Oslo?", **BLEND), salt="two")
    assert (other.exactness, other.cached_tokens, other.blended_tokens) == ("exact", 0, 0)
    with pytest.raises(ConfigError, match="own salt"):
        engine.generate(**asked | {"bases": [{"messages": [], "salt": "two"}]})


@pytest.mark.slow
def test_after_a_restart_it_comes_from_disk(saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = saved("llama")
    with Engine.from_pretrained(folder, store=tmp_path, dtype="float32", **SETTINGS) as engine:
        register(engine)
        here = ask(register(engine, "rain", warm=False))
    with Engine.from_pretrained(folder, store=tmp_path, dtype="float32", **SETTINGS) as engine:
        there = ask(engine.tool_sets.get("weather"))
        assert set(there.cached_by_tier) == {"disk"}
        assert (there.exactness, there.logits_digest) == ("blended", here.logits_digest)
        while runs := engine.pipeline.archive.contents.entries():
            engine.remove(runs[0].id)
        assert ask(engine.tool_sets.get("weather")).exactness == "exact"


def test_a_bound_on_divergence_is_kept(tokenizer: Any) -> None:
    deep = tiny("llama", torch.float32, num_hidden_layers=4)  # choosing computes two layers: they diverge from nothing
    with Engine.from_pretrained((deep, tokenizer), max_divergence=1e-9, **SETTINGS) as engine:
        register(engine)
        found = register(engine, "rain", warm=False)
        answer = ask(found)
        assert (answer.exactness, answer.blended_tokens) == ("exact", 0)
        assert answer.logits_digest == ask(found, reuse="off").logits_digest
        with pytest.raises(ConfigError, match="repair"):
            ask(found, repair="none")


@pytest.mark.slow
def test_the_embedded_model_says_the_same(demo_folder: Path) -> None:
    with Engine.from_pretrained(demo_folder, dtype="float32", step=64, min_step=8) as engine:
        register(engine)
        found = register(engine, "rain", warm=False)
        cold = ask(found, reuse="off")
        answer = ask(found)
        assert answer.exactness == "blended"
        assert answer.blended_tokens > 200
        assert 0 < answer.repaired_tokens < 0.2 * answer.blended_tokens
        whole = ask(found, repair="deviation:1")
        assert whole.token_ids == cold.token_ids
        if engine.pipeline.model.runner.lean is not None:  # its rows do not depend on what is computed together
            assert whole.logits_digest == cold.logits_digest
