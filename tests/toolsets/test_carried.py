"""A set in a bundle: its order and cuts arrive with its KV, and its requests hit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.cli import Cli, cli  # noqa: F401
from tests.helpers.tools import place_tool as tool

from keepwarm import Engine
from keepwarm.errors import BundleError
from keepwarm.toolsets import Registry
from keepwarm.toolsets.carried import note_of, register_carried

STEPS: dict[str, Any] = {"step": 64, "min_step": 8}
NAMES = ("wind", "tide", "rain", "snow")


@pytest.mark.slow
def test_an_edited_set_hits_where_its_bundle_was_imported(
    cli: Cli,  # noqa: F811
    saved: Callable[..., Path],
    tmp_path: Path,
) -> None:
    folder, here, there, file = saved("llama"), tmp_path / "here", tmp_path / "there", tmp_path / "weather.kw"
    with Engine.from_pretrained(folder, store=here, **STEPS) as engine:
        engine.tools([tool(name) for name in NAMES], system="Be brief.", name="weather")
        ours = engine.tools([tool(name) for name in (*NAMES, "dew")], system="Be brief.", name="weather")
        assert [schema["function"]["name"] for schema in ours.tools][-1] == "dew", "not in the order of names"
        wanted = ours.generate("Is it windy?", max_new_tokens=3, trace=True)
    assert cli("export", "weather", file, "--store", here).code == 0
    imported = cli("import", file, "--store", there, "--json")
    assert imported.code == 0, imported.err
    assert imported.json["tool_set"] == {"name": "weather", "version": 1}
    assert "'weather' is registered: 5 tools, version 1" in cli("import", file, "--store", there).out
    with Engine.from_pretrained(folder, store=there, **STEPS) as engine:
        theirs = engine.tool_sets.get("weather")
        assert (theirs.tools, theirs.version.ends) == (ours.tools, ours.version.ends)
        answer = theirs.generate("Is it windy?", max_new_tokens=3, trace=True)
        assert (answer.cached_tokens, answer.exactness) == (wanted.cached_tokens, "exact")
        assert answer.cached_tokens > 0
        assert answer.logits_digest == wanted.logits_digest
        grown = engine.tools([tool(name) for name in (*NAMES, "dew", "ash")], system="Be brief.", name="weather")
        assert grown.report is not None
        assert grown.report.reused_tokens > grown.report.recomputed_tokens, "the unchanged head is reused here, too"


def test_a_prompt_that_is_no_set_brings_none_and_nonsense_is_refused(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    assert note_of(registry, "weather") == {}
    assert register_carried(registry, {}) is None
    registry.register([tool("tide"), tool("wind")], name="weather")
    note = note_of(registry, "weather")
    version = note["tool_set"]["version"]
    for damage in (
        {"tools": [tool("tide")]},
        {"tools": 7},
        {"ends": [9]},
        {"number": None, "tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": 7}}}]},
    ):
        with pytest.raises(BundleError, match="not the tool set"):
            register_carried(registry, {"tool_set": {"name": "weather", "version": version | damage}})
    with pytest.raises(BundleError, match="name"):
        register_carried(registry, {"tool_set": {"name": "", "version": version}})
    assert [v.number for v in registry.versions("weather")] == [1]
