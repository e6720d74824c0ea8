"""Keys without positions: the rotation is exact, composition is what it is, full repair is full prefill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.helpers.models import tiny

from keepwarm import Engine
from keepwarm.core.blocks import token_ids
from keepwarm.errors import UnsupportedModel
from keepwarm.runtime.runner import Runner
from papers import bfcl, nope
from papers.conditions import FULL, GROUP, PER_TOOL, Conditions
from papers.journal import Journal
from papers.nope_keys import capture, verify_rotation
from papers.nope_report import report

pytestmark = pytest.mark.slow

TOOLS: list[dict[str, Any]] = [
    {
        "name": f"tool_{word}",
        "description": f"{word.title()} something {number} times.",
        "parameters": {"type": "object", "properties": {word: {"type": "string"}}, "required": [word]},
    }
    for number, word in enumerate(("fold", "paint", "weigh", "count"))
]
QUESTION = "Please fold the letter."
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


def conditions(family: str, tokenizer: Any, **settings: Any) -> Conditions:
    engine = Engine.from_pretrained((tiny(family, num_hidden_layers=3), tokenizer), **settings)
    return Conditions(engine, max_new_tokens=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_rotating_captured_keys_gives_the_cached_keys(family: str, dtype: torch.dtype) -> None:
    runner = Runner(tiny(family, dtype), None)
    differences = verify_rotation(runner, token_ids(range(5, 300)))
    assert len(differences) == 2
    assert max(differences) == 0


def test_the_same_under_four_bit_weights(tmp_path: Path) -> None:
    """Modules are listened to, not weights; bitsandbytes needs no accelerator for 4 bit."""
    pytest.importorskip("bitsandbytes")
    tiny("qwen3", intermediate_size=128).save_pretrained(tmp_path)  # 4 bit wants whole groups of 64
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path, quantization_config=settings, device_map="cpu")
    assert model.is_loaded_in_4bit
    assert max(verify_rotation(Runner(model, None), token_ids(range(5, 40)))) == 0


def test_captured_keys_do_not_depend_on_where_the_text_stands(tokenizer: Any) -> None:
    runner = Runner(tiny("qwen3"), None)
    tokens = token_ids(range(5, 60))
    alone = capture(runner, tokens)
    later = capture(runner, token_ids([*range(100, 140), *range(5, 60)])).tail(40)
    assert torch.allclose(alone.keys[0], later.keys[0], atol=1e-5)  # the first layer has seen no other token
    assert torch.allclose(alone.values[0], later.values[0], atol=1e-5)
    assert not torch.allclose(alone.keys[1], later.keys[1], atol=1e-2)  # this is why composition fails
    assert not runner.model.model.layers[0].self_attn.k_norm._forward_hooks


def test_a_model_without_rotary_embedding_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="key projection"):
        capture(Runner(tiny("gpt2"), None), token_ids(range(5, 20)))


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_the_prompt_and_first_layers_are_the_same(family: str, tokenizer: Any) -> None:
    asked = conditions(family, tokenizer)
    chosen = asked.registered("set", TOOLS)
    cut = asked.parts(chosen, QUESTION)
    texts = [tokenizer.decode(cut.tokens[a:b]) for a, b in cut.spans]
    assert len(texts) == len(TOOLS)
    for text, tool in zip(texts, chosen.tools, strict=True):
        assert tool["function"]["name"] in text
        assert text.lstrip().startswith('{"type":"function"')
    assert len(cut.tokens) == chosen.generate(QUESTION, max_new_tokens=1).prompt_tokens
    full = nope.full_prefill(asked, cut)
    for start in nope.STARTS:
        base = nope.composed(asked, cut, start)
        for plane in (0, 1):
            assert torch.allclose(base[0][plane], full.planes[0][plane], atol=1e-4)
        header = cut.ends[0]
        for (keys, _), (theirs, _) in zip(base, full.planes, strict=True):
            assert torch.allclose(keys[:, :header], theirs[:, :header], atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_recomputing_everything_is_full_prefill_and_less_is_in_between(family: str, tokenizer: Any) -> None:
    asked = conditions(family, tokenizer)
    cut = asked.parts(asked.registered("set", TOOLS), QUESTION)
    full = nope.full_prefill(asked, cut)
    base = nope.composed(asked, cut, "alone")
    every = np.arange(cut.ends[0], cut.ends[-1], dtype=np.int32)
    whole = nope.compared(full, nope.repaired(asked, full, base, every))
    none = nope.compared(full, nope.repaired(asked, full, base, token_ids([])))
    half = nope.compared(full, nope.repaired(asked, full, base, nope.choose("deviation", 0.5, cut, base, full.planes)))
    assert whole["kl"] == pytest.approx(0, abs=1e-6)
    assert whole["agreement"] == 1
    assert none["kl"] > 1e-3
    assert half["kl"] < none["kl"]
    assert none["recomputed"] == 0


def test_strategies_choose_the_asked_share(tokenizer: Any) -> None:
    asked = conditions("llama", tokenizer)
    cut = asked.parts(asked.registered("set", TOOLS), QUESTION)
    full, base = nope.full_prefill(asked, cut), nope.composed(asked, cut, "alone")
    tokens = cut.ends[-1] - cut.ends[0]
    leading = nope.choose("leading", 0.25, cut, base, full.planes)
    deviating = nope.choose("deviation", 0.25, cut, base, full.planes)
    assert {a for a, _ in cut.spans} <= set(leading.tolist())
    assert 0.25 * tokens <= len(leading) <= 0.25 * tokens + len(TOOLS)
    assert 0.25 * tokens <= len(deviating) <= 0.25 * tokens + 1
    assert (np.diff(deviating) > 0).all()
    assert len(nope.choose("leading", 0.0, cut, base, full.planes)) == 0


def test_group_cache_answers_as_full_prefill_does(tokenizer: Any) -> None:
    asked = conditions("qwen2", tokenizer)
    with asked.engine:
        full, group, again, alone = (
            asked.answer(name, "set", TOOLS, QUESTION) for name in (FULL, GROUP, GROUP, PER_TOOL)
        )
    assert full.digest == group.digest == again.digest
    assert full.text == group.text
    assert (full.hit, group.hit, again.hit) == (None, True, True)
    assert (full.cached_tokens, again.compile_ms) == (0, 0)
    assert group.compile_ms > 0
    assert alone.prompt_tokens == full.prompt_tokens
    assert alone.digest is None


def test_experiment_goes_on_where_it_stopped(tokenizer: Any, tmp_path: Path) -> None:
    asked = conditions("llama", tokenizer)
    examples = [bfcl.Example(f"q{n}", "seen", "a", f"Question {n}?", "tool_paint", {}) for n in range(2)]
    benchmark = bfcl.Benchmark({"a": tuple(TOOLS)}, tuple(examples))
    points = Journal(tmp_path / nope.POINTS, nope.KEYS)
    few = nope.Grid(starts=("alone",), ratios=(0.0, 0.5, 1.0))
    settings = {"model": "m", "dtype": "float32", "weights": "w", "tools": 3, "max_new_tokens": 8}
    settings |= {"data": "d", "seed": 0}
    machine = {"torch": "t", "threads": 1, "rotation_differences": [0.0, 0.0]}
    points.begin(settings, machine)
    assert few.left(examples, points) == 8
    first = list(nope.measure(asked, benchmark, examples[:1], points, tools=3, grid=few))
    assert [(row["strategy"], row["ratio"]) for row in first] == [
        ("leading", 0.0),
        ("leading", 0.5),
        ("leading", 1.0),
        ("deviation", 0.5),
    ]
    again = Journal(tmp_path / nope.POINTS, nope.KEYS)
    again.begin(settings, machine)
    rest = list(nope.measure(asked, benchmark, examples, again, tools=3, grid=few))
    assert {row["id"] for row in rest} == {"q1"}
    files = report(tmp_path, again)
    text = (tmp_path / "report.md").read_text()
    assert "largest difference in any of 2 layers is 0" in text
    assert "| alone | deviation | 50% | 2 |" in text
    assert all(path.stat().st_size for path in files)
