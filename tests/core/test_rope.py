"""Rotary parameters and re-rotation, against themselves and against the rotary modules of real classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.core.rope import Rotary, rotaries
from keepwarm.errors import UnsupportedModel

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "large base": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 2048},
    "yarn, given factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.3,
        "truncate": False,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn, two scales": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
}
SHAPE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "vocab_size": 32,
    "max_position_embeddings": 8192,
}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    dim=st.sampled_from([2, 8, 16, 64]),
    beside=st.sampled_from([0, 4, 16]),
    interleaved=st.booleans(),
    factor=st.floats(0.5, 2.0),
    position=st.integers(0, 10_000),
    delta=st.integers(-10_000, 10_000),
    seed=st.integers(0, 9),
)
def test_moving_is_rotating_further(
    dim: int, beside: int, interleaved: bool, factor: float, position: int, delta: int, seed: int
) -> None:
    rotary = Rotary(dim + beside, tuple(10000.0 ** (-np.arange(0, dim, 2) / dim)), factor, interleaved)
    keys = np.random.default_rng(seed).normal(size=(2, 3, dim + beside))
    positions = position + np.arange(3)
    moved = rotary.rerotate(rotary.rotate(keys, positions), delta)
    np.testing.assert_allclose(moved, rotary.rotate(keys, positions + delta), atol=1e-8)
    np.testing.assert_array_equal(moved[..., dim:], keys[..., dim:])
    np.testing.assert_allclose(rotary.rerotate(rotary.rerotate(keys, delta), -delta), keys, atol=1e-8)
    # attention sees distances only, whatever both have been moved by
    q, k = rotary.rotate(keys, positions), rotary.rotate(keys[::-1], positions[::-1])
    scores = np.einsum("hqd,hkd->hqk", q, k)
    there = np.einsum("hqd,hkd->hqk", rotary.rerotate(q, delta), rotary.rerotate(k, delta))
    np.testing.assert_allclose(there, scores, atol=1e-7)


def test_float32_keys_stay_float32() -> None:
    rotary = rotaries({"model_type": "llama", **SHAPE, "rope_parameters": SCALINGS["default"]})[0]
    assert rotary is not None
    assert rotary.rerotate(np.ones((1, 1, 16), np.float32), 7).dtype == np.float32


def _module_rotates(module: Any, apply: Any, keys: torch.Tensor, positions: torch.Tensor, *kind: str) -> torch.Tensor:
    cosine, sine = module(keys, positions[None], *kind)
    _, rotated = apply(keys, keys, cosine, sine)
    return rotated


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_equals_the_module_of_the_class(family: str, scaling: str) -> None:
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}[family]
    config = getattr(transformers, f"{name}Config")(**SHAPE, head_dim=16, rope_parameters=dict(SCALINGS[scaling]))
    _equals(config, family, f"{name}RotaryEmbedding")


@pytest.mark.parametrize(
    ("family", "name", "extra"),
    [
        ("gpt_neox", "GPTNeoX", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}}),
        ("phi", "Phi", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
        ("stablelm", "StableLm", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}}),
        ("glm", "Glm", {"head_dim": 16, "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
        ("cohere", "Cohere", {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}),
        ("helium", "Helium", {"head_dim": 16, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}),
    ],
)
def test_partial_and_interleaved_classes(family: str, name: str, extra: dict[str, Any]) -> None:
    shape = {key: value for key, value in SHAPE.items() if family != "gpt_neox" or key != "num_key_value_heads"}
    _equals(getattr(transformers, f"{name}Config")(**shape, **extra), family, f"{name}RotaryEmbedding")


def _equals(config: Any, family: str, module_name: str) -> None:
    code = getattr(__import__(f"transformers.models.{family}.modeling_{family}").models, family)
    code = getattr(code, f"modeling_{family}")
    rotary = rotaries(config.to_dict())[-1]
    assert rotary is not None
    assert len(rotaries(config.to_dict())) == SHAPE["num_hidden_layers"]
    module = getattr(code, module_name)(config)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 5, rotary.head_dim, generator=generator)
    positions = torch.tensor([0, 1, 17, 300, 1999])
    partly = rotary.dim < rotary.head_dim and family != "glm"  # other classes hand over the rotated part alone
    taken = keys[..., : rotary.dim] if partly else keys
    theirs = _module_rotates(module, code.apply_rotary_pos_emb, taken, positions)
    ours = rotary.rotate(keys[0].double().numpy(), positions.numpy())
    np.testing.assert_allclose(ours[..., : theirs.shape[-1]], theirs[0].numpy(), atol=2e-3)
    moved = rotary.rerotate(ours, 41)[..., : theirs.shape[-1]]
    further = _module_rotates(module, code.apply_rotary_pos_emb, taken, positions + 41)
    np.testing.assert_allclose(moved, further[0].numpy(), atol=2e-3)


def test_layers_have_their_own_parameters() -> None:
    gemma = transformers.Gemma3TextConfig(**SHAPE, head_dim=16)
    gemma.layer_types = ["sliding_attention", "full_attention"]
    local, full = rotaries(gemma.to_dict())
    assert local is not None
    assert full is not None
    assert full.frequencies[-1] < local.frequencies[-1]
    without = rotaries(transformers.SmolLM3Config(**SHAPE | {"num_hidden_layers": 4}, pad_token_id=0).to_dict())
    assert [rotary is None for rotary in without] == [False, False, False, True]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2}, "no rotary positions"),
        ({"model_type": "bloom", "alibi": True}, "bias by distance"),
        ({"model_type": "a", **SHAPE, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "length"),
        ({"model_type": "a", **SHAPE, "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "length"),
        ({"model_type": "a", **SHAPE, "rope_parameters": {"rope_type": "new", "rope_theta": 1e4}}, "not one of"),
        (
            {"model_type": "a", **SHAPE, "rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
            "multimodal",
        ),
        ({"model_type": "a", **SHAPE, "rope_parameters": {"rope_type": "default"}}, "rope_theta"),
    ],
)
def test_what_cannot_be_moved_is_refused(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named) as error:
        rotaries(config)
    assert "'exact' and 'prefix' work" in str(error.value)
