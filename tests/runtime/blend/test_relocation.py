"""Moving keys: against the reference, against the model itself, and in families with other rotations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.helpers.documents import DOCUMENTS, ask, make
from tests.helpers.models import VOCABULARY, tiny

from keepwarm.core.blocks import token_ids
from keepwarm.core.rope import Rotary
from keepwarm.errors import UnsupportedModel
from keepwarm.runtime.blend.rope import Relocator, Turn

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def odd(name: str, **settings: Any) -> Any:
    """A tiny model of a class with a rotation of its own."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SHAPE | settings)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_turning_equals_the_reference(dtype: torch.dtype, interleaved: bool) -> None:
    rotary = Rotary(24, tuple(10000.0 ** (-np.arange(0, 16, 2) / 16)), 1.2, interleaved)
    keys = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    kept = keys.clone()
    turned = Turn(rotary, -713, torch.device("cpu"))(keys)
    wanted = rotary.rerotate(keys.double().numpy(), -713)
    assert turned.dtype == dtype
    assert torch.equal(keys, kept)
    np.testing.assert_allclose(turned.double().numpy(), wanted, atol=1e-5 if dtype is torch.float32 else 0.02)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("GPTNeoX", {}),
        ("StableLm", {"num_key_value_heads": 2}),
        ("Glm", {"num_key_value_heads": 2, "head_dim": 16}),
        ("Cohere", {"num_key_value_heads": 2}),
        ("SmolLM3", {"num_key_value_heads": 2, "num_hidden_layers": 4}),
    ],
)
def test_other_rotations_end_to_end(name: str, settings: dict[str, Any], tokenizer: Any) -> None:
    """Partial, interleaved, and layers without positions: repairing everything gives the cold run's tokens."""
    with make(tokenizer, model=odd(name, **settings)) as engine:
        engine.warm(documents=DOCUMENTS)
        blended, cold = ask(engine, DOCUMENTS[::-1], repair="leading:1000"), ask(engine, DOCUMENTS[::-1], reuse="off")
        assert blended.repaired_tokens == blended.blended_tokens > 100
        assert blended.token_ids == cold.token_ids
        assert ask(engine, DOCUMENTS[::-1], repair="none").blended_tokens == blended.blended_tokens


def test_a_configuration_that_is_not_the_models_is_refused(tokenizer: Any) -> None:
    model = tiny("llama")
    with make(tokenizer, model=model, reuse="exact") as engine:
        Relocator(engine.pipeline.model.runner, engine.pipeline.model.geometry)
        model.config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
        with pytest.raises(UnsupportedModel, match="does not move as its configuration says"):
            Relocator(engine.pipeline.model.runner, engine.pipeline.model.geometry)


def test_one_text_that_rounding_changes_is_no_reason_to_refuse(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told = ["the values of layer 1 differ by 0.2", ""]
    with make(tokenizer, model=tiny("llama"), reuse="exact") as engine:
        monkeypatch.setattr(Relocator, "_unmoved", lambda self, runner, text: told[text])
        Relocator(engine.pipeline.model.runner, engine.pipeline.model.geometry)
        monkeypatch.setattr(Relocator, "_unmoved", lambda self, runner, text: f"{text} differs")
        with pytest.raises(UnsupportedModel, match="says: 0 differs at another position"):
            Relocator(engine.pipeline.model.runner, engine.pipeline.model.geometry)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotation_that_depends_on_length_is_refused(kind: str, tokenizer: Any) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 1024}
    with pytest.raises(UnsupportedModel, match="changes with the sequence's length"):
        make(tokenizer, model=tiny("llama", rope_parameters=rope))


def test_copying_kv_turns_keys_and_nothing_else(tokenizer: Any) -> None:
    with make(tokenizer) as engine:
        runner, relocator = engine.pipeline.model.runner, engine.pipeline.chunks.relocator
        tokens = token_ids(range(5, 45))
        source, target, wanted = (engine.pipeline.pool.acquire(None, 64) for _ in range(3))
        runner.extend(tokens, source.cache, 0)
        runner.extend(tokens[:8], target.cache, 0)
        relocator.copy(source, 20, target, 8, 20)
        runner.extend(np.concatenate([tokens[:8], tokens[20:]]), wanted.cache, 0)
        for layer, (copied, there, right) in enumerate(zip(target.layers, source.layers, wanted.layers, strict=True)):
            assert torch.equal(copied.values[0, :, 8:28], there.values[0, :, 20:40])
            if layer == 0:  # its keys know token and position alone
                torch.testing.assert_close(copied.keys[0, :, 8:28], right.keys[0, :, 8:28], atol=1e-5, rtol=1e-4)
        for arena in (source, target, wanted):
            arena.seek(0)
            engine.pipeline.pool.release(arena)
