"""LoRA adapters beside recurrent states: exact at any token, from snapshots, the store and in a batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.adapters import EVERY, adapter
from tests.helpers.batches import same
from tests.helpers.gguf_files import write
from tests.helpers.hybrids import hybrid
from tests.helpers.lean import compiled
from tests.helpers.lean_families import lean_family
from tests.helpers.models import VOCABULARY

from keepwarm import Batcher, Engine

pytestmark = [
    pytest.mark.slow,  # their kernels are compiled first
    pytest.mark.skipif(compiled is None, reason="no C++ compiler: steps run through transformers"),
    pytest.mark.host_memory("adapters run on the lean decoder"),
]

PROMPT = [3 + i * 7919 % 40000 for i in range(150)]
NET = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
MODULES = {
    "qwen3.5": (*NET, *EVERY),
    "lfm2": ("in_proj", "out_proj", "q_proj", "w2"),
    "granite4": ("in_proj", "out_proj", "q_proj", "output_linear"),
}
NAMES = (None, "all", "some")


def made(family: str, dtype: torch.dtype) -> Any:
    return hybrid(dtype=dtype) if family == "qwen3.5" else lean_family(family, dtype, vocab_size=VOCABULARY)


@pytest.fixture(scope="module", params=[(f, d) for f in MODULES for d in ("float32", "bfloat16")], ids=str)
def model(request: pytest.FixtureRequest) -> tuple[str, Any]:
    family, dtype = request.param
    return family, made(family, getattr(torch, dtype))


@pytest.fixture(scope="module")
def folders(model: tuple[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, (family, loaded) = tmp_path_factory.mktemp("adapters"), model
    every = MODULES[family]
    return {
        "all": adapter(folder / "all", loaded, every, size=0.1),
        "some": adapter(folder / "some", loaded, every[:2], rank=7, size=0.07, seed=3),
    }


@pytest.fixture(scope="module")
def cold(model: tuple[str, Any], tokenizer: Any, folders: dict[str, Path]) -> Iterator[Engine]:
    with Engine.from_pretrained((model[1], tokenizer), adapters=folders, reuse="off") as engine:
        yield engine


def asked(engine: Engine, name: str | None, prompt: list[int] = PROMPT, **more: Any) -> Any:
    return engine.generate(prompt, adapter=name, max_new_tokens=6, trace=True, **more)


def test_cold_warm_restarted_and_batched_answers_are_equal_to_the_bit(
    model: tuple[str, Any], tokenizer: Any, folders: dict[str, Path], cold: Engine, tmp_path: Path
) -> None:
    alone = {name: asked(cold, name) for name in NAMES}
    assert len({found.logits_digest for found in alone.values()}) == len(NAMES)
    loaded = model[1], tokenizer
    with Engine.from_pretrained(loaded, adapters=folders, store=tmp_path) as engine:
        for name in NAMES:
            first = asked(engine, name)
            assert first.cached_tokens == 0
            same(first, alone[name])
        engine.flush()
        for name in NAMES:
            found = asked(engine, name)
            assert (found.cached_tokens, found.exactness) == (len(PROMPT) - 1, "exact")
            same(found, alone[name])
        longer = [*PROMPT, *alone["all"].token_ids, 7, 9]
        found = asked(engine, "all", longer)
        assert found.cached_tokens >= len(PROMPT) - 1
        same(found, asked(cold, "all", longer))
        with Batcher(engine) as batcher:
            parts = [(name, PROMPT[: 100 + 9 * i]) for i, name in enumerate((*NAMES, *NAMES))]
            tickets = [batcher.submit(prompt, adapter=name, max_new_tokens=6, trace=True) for name, prompt in parts]
            for ticket, (name, prompt) in zip(tickets, parts, strict=True):
                same(ticket.result(60), asked(cold, name, prompt))
    with Engine.from_pretrained(loaded, adapters={"other": folders["all"]}, store=tmp_path) as engine:
        found = asked(engine, "other")
        assert found.cached_tokens > 0
        assert found.exactness == "exact"
        same(found, alone["all"])


@pytest.mark.parametrize("architecture", ["qwen35", "lfm2"])
def test_beside_gguf_files(architecture: str, tmp_path: Path) -> None:
    """Qwen3.5's have heads in another order than the model. Loading compares with transformers."""
    file = write(tmp_path / "tiny.gguf", architecture=architecture)
    with Engine.from_pretrained(file, dtype="float32") as engine:
        loaded = engine.pipeline.model.model
        targets = (*NET, "q_proj", "up_proj") if architecture == "qwen35" else MODULES["lfm2"]
        engine.adapters.load("one", adapter(tmp_path / "one", loaded, targets, size=0.1))
        prompt = [3 + i * 7 % 200 for i in range(80)]
        first, base = asked(engine, "one", prompt), asked(engine, None, prompt)
        engine.flush()
        again = asked(engine, "one", prompt)
        assert (again.cached_tokens, again.exactness) == (79, "exact")
        same(again, first)
        assert first.logits_digest != base.logits_digest
