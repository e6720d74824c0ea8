"""Random trees of prompts for models with recurrent state on the compiled kernels: every answer is exact to the bit,
and a prompt that is asked again is computed from its last token on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helpers.lean import compiled
from tests.helpers.lean_families import lean_family
from tests.helpers.models import VOCABULARY
from tests.helpers.prompts import ids

from keepwarm import Batcher, Engine
from keepwarm.core.snapshots import snapshot_id

pytestmark = [
    pytest.mark.skipif(compiled is None, reason="no C++ compiler: steps run through transformers"),
    pytest.mark.host_memory("the compiled kernels keep the state in the host's memory"),
]

LONGEST = 150


def text(count: int, seed: int) -> list[int]:
    """Token ids that the models have and that are no special ones of the tokenizer."""
    return [20 + token for token in ids(count, seed, 100)]


STEM = text(LONGEST, 1)


@pytest.fixture(scope="module", params=["lfm2", "qwen3.5"])
def model(request: pytest.FixtureRequest) -> Any:
    return lean_family(request.param, torch.float32, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def bare(model: Any, tokenizer: Any) -> Any:
    with Engine.from_pretrained((model, tokenizer), store=None) as engine:
        yield engine


def digest(engine: Engine, prompt: list[int]) -> str:
    return str(engine.generate(prompt, max_new_tokens=2, trace=True, reuse="off").logits_digest)


LEAVES = st.lists(st.tuples(st.integers(0, LONGEST), st.integers(1, 40), st.integers(2, 4)), min_size=2, max_size=6)
AGAIN = st.lists(st.sampled_from(["ask", "forget", "drop", "restart", "batch"]), min_size=1, max_size=4)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(leaves=LEAVES, steps=AGAIN, budget=st.sampled_from([1e-9, 1.0, 100.0]))
def test_a_tree_of_prompts_is_exact_wherever_it_parts(
    leaves: list[tuple[int, int, int]],
    steps: list[str],
    budget: float,
    model: Any,
    tokenizer: Any,
    bare: Engine,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Prompts part from each other at any token. Their KV and states come from the device, RAM or disk."""
    prompts = [[*STEM[:at], *text(count, seed)] for at, count, seed in leaves]
    cold = [digest(bare, prompt) for prompt in prompts]
    wanted: dict[str, Any] = {"store": tmp_path_factory.mktemp("tree"), "settle_after": None, "snapshot_budget": budget}
    engine = Engine.from_pretrained((model, tokenizer), **wanted)
    try:
        for step in ["ask", *steps]:
            if step == "restart":
                engine.close()
                engine = Engine.from_pretrained((model, tokenizer), **wanted)
            if step == "forget":
                engine.pipeline.pool.forget()
            if step == "drop":
                engine.flush()
                engine.pipeline.pool.forget()
                engine.pipeline.archive.clear_ram()
            if step == "batch":
                with Batcher(engine, max_prefill_tokens=50) as batch:
                    tickets = [batch.submit(prompt, max_new_tokens=2, trace=True) for prompt in prompts]
                    assert [ticket.result(60).logits_digest for ticket in tickets] == cold
                continue
            for prompt, expected in zip(prompts, cold, strict=True):
                found = engine.generate(prompt, max_new_tokens=2, trace=True)
                assert (found.logits_digest, found.exactness) == (expected, "exact")
        if budget > 1 and (last := len(prompts[-1]) - 1) != 1:  # a snapshot at position 1 saves nothing
            assert engine.generate(prompts[-1], max_new_tokens=2).cached_tokens == last
    finally:
        engine.close()


@pytest.mark.parametrize("tier", ["device", "ram", "disk", "batch"])
def test_a_longer_prompt_goes_on_inside_a_page(
    model: Any, tokenizer: Any, bare: Engine, tmp_path: Any, tier: str
) -> None:
    """What parts from a stored prompt is computed from there on, once a request has shown where that is."""
    longer = [*STEM[:77], *text(30, 7)]
    with Engine.from_pretrained((model, tokenizer), store=tmp_path, settle_after=None) as engine:
        engine.warm(STEM[:77])
        engine.flush()
        if tier == "ram":
            engine.pipeline.pool.forget()
        if tier == "disk":
            engine.pipeline.pool.forget()
            engine.pipeline.archive.clear_ram()
        if tier == "batch":
            with Batcher(engine) as batch:
                found = [batch.submit(longer, max_new_tokens=2, trace=True).result(60) for _ in range(2)]
        else:
            found = [engine.generate(longer, max_new_tokens=2, trace=True) for _ in range(2)]
    assert [each.cached_tokens for each in found] == [77, len(longer) - 1]
    assert [each.logits_digest for each in found] == [digest(bare, longer)] * 2


def test_a_damaged_snapshot_inside_a_page_is_a_miss(model: Any, tokenizer: Any, bare: Engine, tmp_path: Any) -> None:
    wanted: dict[str, Any] = {"store": tmp_path, "settle_after": None, "max_ram": 0}
    with Engine.from_pretrained((model, tokenizer), **wanted) as engine:
        linked = engine.pipeline.linked(engine.pipeline.prompts.compiled(STEM, {}))
        engine.generate(STEM, max_new_tokens=2)
        engine.flush()
        name = snapshot_id(linked.blocks.up_to(len(STEM) - 1).exact)
        (ref,) = engine.pipeline.archive.find([name]).values()
    file = next((tmp_path / "runs").glob(f"{ref.run_id}*"))
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    with Engine.from_pretrained((model, tokenizer), **wanted) as engine:
        found = engine.generate(STEM, max_new_tokens=2, trace=True)
        assert engine.stats().corrupt == 1
        assert (found.logits_digest, found.exactness) == (digest(bare, STEM), "exact")
        assert found.cached_tokens < len(STEM) - 1


def test_a_set_of_tools_is_reused_to_its_last_token(model: Any, tokenizer: Any, tmp_path: Any) -> None:
    """The end of what is warmed lies inside a page, and what follows it there is computed."""
    system = {"role": "system", "content": "The harbour opens at six. " * 9}
    with Engine.from_pretrained((model, tokenizer), store=tmp_path, settle_after=None, snapshot_budget=0.01) as engine:
        report = engine.warm(messages=[system])
        found = engine.generate(messages=[system, {"role": "user", "content": "Which pier?"}], max_new_tokens=2)
        assert found.cached_tokens == report.tokens
        assert report.tokens % 32
