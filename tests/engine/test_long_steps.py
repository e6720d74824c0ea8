"""Long steps run in pieces: the same answers and the same stored KV as at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.every_model import make
from tests.helpers.lean import compiled
from tests.helpers.lean_families import lean_family
from tests.helpers.models import tiny
from tests.helpers.prompts import ids

from keepwarm import Engine
from keepwarm.runtime.native.decoder import LeanDecoder

ROWS = 40


def some_ids(count: int, seed: int) -> list[int]:
    """Token ids that the small vocabularies have."""
    return [20 + token for token in ids(count, seed, 100)]


PROMPT = some_ids(150, 1)
MODELS = {
    "llama": lambda: tiny("llama"),
    "gemma3": lambda: lean_family("gemma3"),
    "qwen3_5": lambda: make("qwen3_5_text"),
}

pytestmark = [
    pytest.mark.skipif(compiled is None, reason="no C++ compiler: steps run through transformers"),
    pytest.mark.host_memory("the lean decoder attends to the host's memory"),
]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


def steps_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of rows of each step."""
    lean = engine.pipeline.model.runner.lean
    assert isinstance(lean, LeanDecoder)
    seen: list[int] = []
    step = lean.step
    monkeypatch.setattr(
        lean, "step", lambda tokens, *args, **kw: seen.append(len(tokens[0])) or step(tokens, *args, **kw)
    )
    return seen


def in_pieces(engine: Engine) -> Engine:
    lean = engine.pipeline.model.runner.lean
    assert lean is not None
    lean.rows_at_once = ROWS
    return engine


def test_pieces_change_no_bit(model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine stores what it computes in pieces; another one, which computes at once, answers from it."""
    with Engine.from_pretrained((model, tokenizer), store=tmp_path) as engine:
        rows = steps_of(engine, monkeypatch)
        whole = engine.generate(PROMPT, max_new_tokens=4, trace=True, reuse="off")
        assert rows[0] == len(PROMPT)
        rows.clear()
        pieces = in_pieces(engine).generate(PROMPT, max_new_tokens=4, trace=True)
        assert rows[:4] == [38, 38, 37, 37]
    with Engine.from_pretrained((model, tokenizer), store=tmp_path) as engine:
        again = engine.generate(PROMPT, max_new_tokens=4, trace=True)
    assert again.cached_tokens >= 128
    assert pieces.token_ids == again.token_ids == whole.token_ids
    assert pieces.logits_digest == again.logits_digest == whole.logits_digest


def test_reuse_of_pieces_and_in_pieces_changes_no_bit(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Prompts that part inside a piece or go on behind the last one, from RAM and from disk."""
    for seed, first in ((2, [PROMPT]), (3, [])):  # the second engine finds all on disk
        new = some_ids(130, seed)
        prompts = [[*PROMPT[:70], *new], [*PROMPT, *new], [*PROMPT[:149], *new, *PROMPT]]
        with Engine.from_pretrained((model, tokenizer), store=tmp_path) as engine:
            for each in first:
                in_pieces(engine).generate(each, max_new_tokens=1)
            found = [in_pieces(engine).generate(each, max_new_tokens=3, trace=True) for each in prompts]
            assert all(each.cached_tokens for each in found)
        with Engine.from_pretrained((model, tokenizer), max_disk=0) as engine:
            cold = [engine.generate(each, max_new_tokens=3, trace=True, reuse="off") for each in prompts]
        assert [each.logits_digest for each in found] == [each.logits_digest for each in cold]


def test_a_step_has_more_rows_where_each_uses_some_of_the_experts(tokenizer: Any) -> None:
    with Engine.from_pretrained((lean_family("qwen3-moe"), tokenizer)) as engine:
        lean = engine.pipeline.model.runner.lean
        assert isinstance(lean, LeanDecoder)
        experts = engine.pipeline.model.model.config
        assert lean.rows_at_once == 640 * experts.num_experts // experts.num_experts_per_tok
