"""Sets on an engine: compiled once, hit by every request, and recomputed only from what changed on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.models import tiny

from keepwarm.engine import Engine
from keepwarm.errors import ConfigError
from keepwarm.toolsets import ToolSets

SYSTEM = "You call tools."


def tool(number: int, text: str = "") -> dict[str, Any]:
    properties = {"first": {"type": "string", "enum": ["x", "y"]}, "second": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["second", "first"]}
    return {"name": f"tool_{number:02}", "description": text or f"Does number {number}.", "input_schema": schema}


FIFTY = [tool(n) for n in range(50)]


@pytest.fixture
def engine(tokenizer: Any, tmp_path: Path) -> Iterator[Engine]:
    model = tiny("llama", max_position_embeddings=8192)
    with Engine.from_pretrained((model, tokenizer), store=tmp_path, step=2048) as opened:
        yield opened


def test_a_set_is_computed_once_and_hit_by_every_request(engine: Engine, tokenizer: Any, tmp_path: Path) -> None:
    sets = ToolSets(engine.pipeline)
    found = sets.register(FIFTY[:6], system=SYSTEM, name="six")
    assert found.report is not None
    assert found.report.reused_tokens == 0
    assert found.report.changes.added == found.version.names
    answer = found.generate("What now?", max_new_tokens=4, trace=True)
    assert answer.cached_tokens == found.report.tokens
    assert answer.exactness == "exact"
    cold = found.generate("What now?", max_new_tokens=4, trace=True, reuse="off")
    assert answer.logits_digest == cold.logits_digest
    conversation = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "And now?"}]
    assert found.generate(messages=conversation, max_new_tokens=1).cached_tokens >= found.report.tokens
    shuffled = copy.deepcopy(FIFTY[:6])[::-1]
    shuffled[0]["input_schema"]["required"].reverse()
    engine.flush()
    same = sets.register({"tools": shuffled}, system=SYSTEM, name="six")
    assert same.report is not None
    assert (same.report.recomputed_tokens, same.key, same.version) == (0, found.key, found.version)
    engine.close()
    with Engine.from_pretrained((tiny("llama", max_position_embeddings=8192), tokenizer), store=tmp_path) as later:
        again = ToolSets(later.pipeline).get("six")
        assert again.key == found.key
        assert again.generate("What now?", max_new_tokens=4, trace=True).logits_digest == answer.logits_digest
        reached = answer.prompt_tokens - 1 if later.pipeline.grid.inside else found.report.tokens
        assert again.explain("What now?").cached_tokens == reached


@pytest.mark.parametrize("change", ["enum", "description", "system"])
def test_a_change_misses(engine: Engine, change: str) -> None:
    sets = ToolSets(engine.pipeline)
    found = sets.register(FIFTY[:3], system=SYSTEM, name="three")
    changed = copy.deepcopy(FIFTY[:3])
    if change == "enum":
        changed[0]["input_schema"]["properties"]["first"]["enum"].reverse()
    if change == "description":
        changed[0]["description"] += "!"
    other = sets.register(changed, system=SYSTEM + ("!" if change == "system" else ""), name="other", warm=False)
    assert other.key != found.key
    assert other.explain("Hi").cached_tokens < found.explain("Hi").cached_tokens
    answer = other.generate("Hi", max_new_tokens=2, trace=True)
    assert answer.logits_digest == other.generate("Hi", max_new_tokens=2, trace=True, reuse="off").logits_digest


def test_adding_one_tool_to_fifty_recomputes_little(engine: Engine) -> None:
    sets = ToolSets(engine.pipeline)
    first = sets.register(FIFTY, system=SYSTEM, name="fifty")
    grown = sets.register([*FIFTY, tool(7, "x").copy() | {"name": "a_new_tool"}], system=SYSTEM, name="fifty")
    assert first.report is not None
    assert grown.report is not None
    assert grown.version.names[-1] == "a_new_tool"
    assert grown.report.changes.added == ("a_new_tool",)
    assert grown.report.recomputed_tokens < 0.1 * grown.report.tokens
    assert grown.report.reused_tokens > 0.9 * first.report.tokens
    warm = grown.generate("What now?", max_new_tokens=3, trace=True)
    assert warm.exactness == "exact"
    assert warm.logits_digest == grown.generate("What now?", max_new_tokens=3, trace=True, reuse="off").logits_digest
    edited = [tool(49, "Does it anew.") if t["name"] == "tool_49" else t for t in FIFTY]
    second = sets.register(edited, system=SYSTEM, name="fifty")
    assert second.report is not None
    assert second.report.changes.removed == ("a_new_tool",)
    assert second.version.names[-1] == "tool_49"


def test_documents_and_system_prompts_are_sets_too(engine: Engine) -> None:
    found = ToolSets(engine.pipeline).register(
        system=SYSTEM, documents=[{"title": "a.py", "text": "print(1)"}], name="code"
    )
    assert found.report is not None
    assert found.generate("What does it print?", max_new_tokens=1).cached_tokens == found.report.tokens
    assert found.calls('{"name": "tool_01", "arguments": {}}') == []


def test_wrong_use_is_named(engine: Engine) -> None:
    found = ToolSets(engine.pipeline).register(FIFTY[:2], system=SYSTEM, warm=False)
    with pytest.raises(ConfigError, match="either a question or messages"):
        found.generate()
    with pytest.raises(ConfigError, match="tools: the set brings its own"):
        found.generate("Hi", tools=FIFTY)
    with pytest.raises(ConfigError, match="leave the system message out"):
        found.generate(messages=[{"role": "system", "content": "Another."}, {"role": "user", "content": "Hi"}])
    calls = found.calls('{"name": "tool_01", "arguments": {"second": 2}}\n{"name": "rm", "arguments": {}}')
    assert [(call.name, call.arguments) for call in calls] == [("tool_01", {"second": 2})]
