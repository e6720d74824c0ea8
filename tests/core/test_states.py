"""Layers of published hybrids, and what their recurrent state weighs, against figures that were worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from keepwarm.core.geometry import LayerGeometry, geometry_of
from keepwarm.core.kinds import layer_kinds
from keepwarm.core.states import DESCRIPTION, layer_state, snapshot_size, stateful_layers

QWEN3_NEXT: dict[str, Any] = {  # as its config.json has it
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "torch_dtype": "bfloat16",
}
NEMOTRON_H: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hybrid_override_pattern": "M-M*E",
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 32,
    "n_groups": 2,
    "conv_kernel": 4,
    "expand": 2,
}


def test_gated_delta_nets() -> None:
    """Three layers of four have a convolution over 8,192 channels, and 32 matrices of 128 by 128 in float32."""
    found = snapshot_size(QWEN3_NEXT)
    assert found is not None
    assert found.layers == stateful_layers(QWEN3_NEXT) == 36
    assert found.nbytes == 36 * (8192 * 4 * 2 + 32 * 128 * 128 * 4 + DESCRIPTION)
    assert found.tokens(geometry_of(QWEN3_NEXT).bytes_per_token) == pytest.approx(3168, abs=20)


def test_kimis_layers_are_listed_from_one() -> None:
    given = {"full_attn_layers": [4], "num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4}
    config = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "linear_attn_config": given}
    assert [kind for kind, _ in layer_kinds(config)] == ["stateful"] * 3 + ["full"]
    state = layer_state(config)
    assert state is not None
    assert (state.conv, state.scan) == (3 * 16 * 4, 2 * 8 * 8)


def test_mamba_2() -> None:
    state = layer_state(NEMOTRON_H)
    assert state is not None
    assert (state.conv, state.scan, state.family) == ((128 + 2 * 2 * 32) * 4, 8 * 16 * 32, "Mamba-2")
    assert [kind for kind, _ in layer_kinds(NEMOTRON_H)] == ["stateful", "none", "stateful", "full", "none"]
    assert geometry_of(NEMOTRON_H, "bfloat16").layers == (LayerGeometry(2, 16, 16),)


def test_mamba_1_has_no_kv() -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "conv_kernel": 4, "expand": 2}
    assert geometry_of(config, "bfloat16").bytes_per_token == 0
    found = snapshot_size(config, "bfloat16")
    assert found is not None
    assert found.nbytes == 2 * (128 * 4 * 2 + 128 * 16 * 4 + DESCRIPTION)
    assert found.tokens(0) is None


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({"attn_layer_indices": [1], "mamba_d_state": 16}, ["stateful", "full", "stateful"]),
        ({"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16}, ["stateful", "full", "stateful"]),
        ({"full_attn_idxs": [2], "conv_L_cache": 3}, ["stateful", "stateful", "full"]),
        ({"model_type": "falcon_h1"}, ["hybrid"] * 3),
        ({"index_head_dim": 128, "kv_lora_rank": 512}, ["indexed"] * 3),
        ({"layer_types": ["moe", "hybrid_sliding", "hybrid"], "sliding_window": 8}, ["none", "hybrid", "hybrid"]),
    ],
    ids=["bamba", "jamba", "lfm2", "falcon-h1", "deepseek-v3.2", "listed"],
)
def test_which_layers_are_which(config: dict[str, Any], kinds: list[str]) -> None:
    config = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64} | config
    assert [kind for kind, _ in layer_kinds(config)] == kinds


def test_index_keys_are_counted() -> None:
    config = {
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "hidden_size": 7168,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
    }
    assert geometry_of(config, "bfloat16").bytes_per_token == 61 * (512 + 64 + 128) * 2


def test_what_is_not_known_is_not_guessed() -> None:
    config = {"num_hidden_layers": 2, "layer_types": ["a_kind_of_the_future", "full_attention"], "hidden_size": 64}
    assert stateful_layers(config) == 1
    assert snapshot_size(config | {"num_attention_heads": 4}) is None
