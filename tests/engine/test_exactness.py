"""The test that matters: with the cache and without it, the same answer, to the bit where we say `exact`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helpers.models import FAMILIES, tiny
from tests.helpers.prompts import ids

from keepwarm import Engine

STEP = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


CASES = [(family, dtype) for family in FAMILIES for dtype in DTYPES]
USUAL = (("llama", "float32"), ("qwen3", "bfloat16"), ("gpt2", "float32"))  # the last one runs through transformers


@pytest.fixture(
    scope="module",
    params=[each if each in USUAL else pytest.param(each, marks=pytest.mark.slow) for each in CASES],
    ids=[f"{family}-{dtype}" for family, dtype in CASES],
)
def engine(
    request: pytest.FixtureRequest, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    family, dtype = request.param
    store = tmp_path_factory.mktemp("store")
    with Engine.from_pretrained((tiny(family, DTYPES[dtype]), tokenizer), store=store, step=STEP, min_step=4) as engine:
        yield engine


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prefix=st.integers(1, 4 * STEP + 2),
    suffix=st.sampled_from([1, 2, STEP - 1, STEP, STEP + 1, 2 * STEP + 3]),
    seed=st.integers(0, 3),
    tier=st.sampled_from(["device", "ram", "disk"]),
)
def test_warm_equals_cold_to_the_bit(engine: Engine, prefix: int, suffix: int, seed: int, tier: str) -> None:
    """Around every cut, from every tier: the digests of all logits of a greedy run are equal."""
    head = ids(prefix, seed)
    prompts = [head + ids(suffix, 100 + seed), head + ids(suffix, 200 + seed)]
    engine.generate(prompts[0], max_new_tokens=1)
    engine.flush()
    if tier != "device":
        engine.pipeline.pool.forget()
    if tier == "disk":
        engine.pipeline.archive.clear_ram()
    for prompt in prompts:
        warm = engine.generate(prompt, max_new_tokens=4, trace=True)
        cold = engine.generate(prompt, max_new_tokens=4, trace=True, reuse="off")
        assert warm.logits_digest == cold.logits_digest
        assert warm.token_ids == cold.token_ids
        assert warm.exactness == "exact"
        assert cold.cached_tokens == 0
    # all of the shared head was reused, or every whole step of it and never the last step; the last token never
    shared = min(prefix, len(prompt) - 1)
    assert warm.cached_tokens >= (shared if engine.pipeline.grid.inside else shared // STEP * STEP)
    assert warm.cached_tokens <= len(prompt) - 1


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.integers(1, 2 * STEP + 1), min_size=2, max_size=4), seed=st.integers(0, 3))
def test_declared_cuts_are_reused_to_the_bit(engine: Engine, tokenizer: Any, parts: list[int], seed: int) -> None:
    texts = [tokenizer.decode(ids(n, seed + i)) for i, n in enumerate(parts)]
    engine.warm(segments=texts[:-1])
    engine.flush()
    warm = engine.generate(segments=texts, max_new_tokens=3, trace=True)
    cold = engine.generate(segments=texts, max_new_tokens=3, trace=True, reuse="off")
    assert warm.logits_digest == cold.logits_digest


def test_prefix_reuse_is_right_and_labelled(engine: Engine) -> None:
    """Tokens cached under other cuts are reused with `prefix`, said so, and agree with a cold run up to rounding; where
    cuts shape no bits they are exact."""
    head = ids(3 * STEP + 5, 7)
    with_cut = [head[:10], head[10:]]
    text = [engine.pipeline.tokenizer.decode(part) for part in with_cut]
    whole = engine.generate(segments=[*text, " and more"], max_new_tokens=1)
    raw = engine.generate(prompt="".join(text) + " or less", max_new_tokens=2, reuse="prefix", trace=True)
    assert whole.exactness == "exact"
    cold = engine.generate(prompt="".join(text) + " or less", max_new_tokens=2, reuse="off", trace=True)
    if engine.pipeline.grid.inside:
        assert (raw.exactness, raw.logits_digest) == ("exact", cold.logits_digest)
        assert raw.cached_tokens > 3 * STEP
    elif raw.cached_tokens % STEP:  # more than an exact path of this prompt's own cuts
        assert raw.exactness == "prefix"
    if engine.pipeline.model.identity.dtype == "float32":
        assert raw.token_ids == cold.token_ids


@pytest.mark.parametrize(
    "family", [each if each in ("llama", "gpt2") else pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES]
)
def test_tokens_equal_transformers_greedy(family: str, tokenizer: Any) -> None:
    model = tiny(family)
    with Engine.from_pretrained((model, tokenizer), step=STEP, min_step=4) as engine:
        for seed, length in enumerate((1, 2, STEP, STEP + 1, 5 * STEP + 3)):
            prompt = ids(length, seed)
            with torch.inference_mode():
                theirs = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=2)[
                    0, length:
                ]
            for _ in range(2):  # cold, then warm
                ours = engine.generate(prompt, max_new_tokens=12)
                assert list(ours.token_ids) == theirs.tolist()


_OTHER_PROCESS = """
import json, sys
from keepwarm import Engine
from tests.helpers.prompts import ids
results = {}
for folder, dtype in json.loads(sys.argv[1]):
    with Engine.from_pretrained(folder, store=folder + "/store-" + dtype, dtype=dtype, step=16, min_step=4) as engine:
        r = engine.generate(ids(70, 1) + ids(9, 2), max_new_tokens=5, trace=True)
        results[folder + dtype] = [r.logits_digest, r.cached_by_tier, r.exactness]
print("RESULT" + json.dumps(results))
"""


@pytest.mark.slow
@pytest.mark.host_memory("its other process keeps KV on the processor")
def test_a_new_process_answers_from_disk_to_the_bit(saved: Callable[..., Path]) -> None:
    here = {}
    cases = []
    for family in FAMILIES:
        folder = str(saved(family))
        for dtype in DTYPES:
            cases.append((folder, dtype))
            store = f"{folder}/store-{dtype}"
            with Engine.from_pretrained(folder, store=store, dtype=dtype, step=STEP, min_step=4) as engine:
                r = engine.generate(ids(70, 1) + ids(9, 2), max_new_tokens=5, trace=True)
                here[folder + dtype] = r.logits_digest, 78 if engine.pipeline.grid.inside else 64
    done = subprocess.run(
        [sys.executable, "-c", _OTHER_PROCESS, json.dumps(cases)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    there = json.loads(done.stdout.partition("RESULT")[2])
    for key, (digest, cached) in here.items():
        assert there[key] == [digest, {"disk": cached}, "exact"]
