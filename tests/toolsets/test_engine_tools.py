"""`Engine.tools`: the public door to tool sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.models import tiny
from tests.helpers.tools import place_tool as tool

from keepwarm import Engine
from keepwarm.errors import PromptError


def test_a_set_is_warmed_and_hit_and_an_edit_reuses_its_head(tokenizer: Any, tmp_path: Path) -> None:
    with Engine.from_pretrained((tiny("llama"), tokenizer), store=tmp_path / "store", step=64, min_step=8) as engine:
        tools = [tool(name) for name in ("tide", "wind", "rain", "snow", "fog", "heat")]
        first = engine.tools(tools, system="You are brief.", name="weather")
        assert first.report is not None
        assert first.report.reused_tokens == 0
        warm = first.generate("Is it windy in Oslo?", max_new_tokens=3, trace=True)
        cold = first.generate("Is it windy in Oslo?", max_new_tokens=3, trace=True, reuse="off")
        assert warm.cached_tokens > 0
        assert warm.logits_digest == cold.logits_digest
        edited = engine.tools([*tools, tool("dew")], system="You are brief.", name="weather")
        assert edited.report is not None
        assert edited.report.reused_tokens > edited.report.recomputed_tokens
        assert engine.tool_sets.names() == ("weather",)
        with pytest.raises(PromptError, match="tide"):
            engine.tools([tool("tide") | {"input_schema": {"type": 7}}])
    with Engine.from_pretrained((tiny("llama"), tokenizer), store=tmp_path / "store", step=64, min_step=8) as engine:
        assert engine.tool_sets.get("weather").tools == edited.tools
