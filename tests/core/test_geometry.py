"""KV sizes of real configurations, and the shapes behind them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepwarm.core.geometry import KVGeometry, LayerGeometry, geometry_of, naive_bytes_per_token
from keepwarm.core.kinds import layer_kinds, text_config
from keepwarm.errors import UnsupportedModel

KIB = 1024


def decoder(layers: int = 2, heads: int = 4, hidden: int = 64, **more: Any) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden, **more}


def attention(*kinds: str) -> list[str]:
    return [f"{kind}_attention" for kind in kinds]


@pytest.mark.parametrize(
    ("config", "dtype", "per_token", "naive"),
    [
        pytest.param(decoder(32, 32, 4096), "float16", 512 * KIB, 512 * KIB, id="llama-2-7b"),
        pytest.param(
            decoder(36, 32, 4096, num_key_value_heads=8, head_dim=128), "bfloat16", 144 * KIB, 576 * KIB, id="qwen3-8b"
        ),
        pytest.param(
            decoder(64, 24, 5120, num_key_value_heads=4, head_dim=256), "bfloat16", 256 * KIB, 1280 * KIB, id="64x4x256"
        ),
        pytest.param(decoder(30, 9, 576, num_key_value_heads=3), "bfloat16", 23_040, 69_120, id="smollm2-135m"),
        pytest.param({"n_layer": 12, "n_head": 12, "n_embd": 768}, "float32", 72 * KIB, 72 * KIB, id="gpt2"),
        pytest.param(
            decoder(32, 71, 4544, multi_query=True, num_kv_heads=71, new_decoder_architecture=False),
            "bfloat16",
            8 * KIB,
            568 * KIB,
            id="falcon-7b",
        ),
        pytest.param(  # transformers repeats its 8 KV heads for all 128 query heads, then caches
            decoder(60, 128, 8192, multi_query=True, num_kv_heads=8, new_decoder_architecture=True),
            "bfloat16",
            1920 * KIB,
            1920 * KIB,
            id="falcon-40b",
        ),
        pytest.param(
            decoder(
                61,
                128,
                7168,
                num_key_value_heads=128,
                kv_lora_rank=512,
                qk_nope_head_dim=128,
                qk_rope_head_dim=64,
                v_head_dim=128,
            ),
            "bfloat16",
            61 * (512 + 64) * 2,
            2 * 61 * 7168 * 2,
            id="deepseek-v3",
        ),
        pytest.param(
            {"num_layers": 28, "num_attention_heads": 32, "hidden_size": 4096, "multi_query_group_num": 2},
            "float16",
            28 * KIB,
            448 * KIB,
            id="chatglm",
        ),
    ],
)
def test_bytes_per_token(config: dict[str, Any], dtype: str, per_token: int, naive: int) -> None:
    geometry = geometry_of(config, dtype)
    assert geometry.bytes_per_token == per_token
    assert geometry.bytes_for(1000) == 1000 * per_token
    assert naive_bytes_per_token(config, dtype) == naive


def test_latent_attention_keeps_one_compressed_head() -> None:
    config = decoder(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128)
    assert geometry_of(config, "bfloat16").layers == (LayerGeometry(1, 512, 64),) * 2
    del config["qk_rope_head_dim"]
    with pytest.raises(UnsupportedModel, match="qk_rope_head_dim"):
        geometry_of(config, "bfloat16")


def test_values_may_be_narrower_than_keys() -> None:
    geometry = geometry_of(decoder(head_dim=192, v_head_dim=128, num_key_value_heads=2), "bfloat16")
    assert geometry.layers == (LayerGeometry(2, 192, 128),) * 2
    assert (geometry.head_bytes(0, 0), geometry.head_bytes(0, 1)) == (384, 256)


def test_head_counts_per_layer() -> None:
    config = {
        "num_transformer_layers": 3,
        "num_query_heads": [12, 12, 16],
        "num_kv_heads": [3, 3, 4],
        "head_dim": 64,
        "model_dim": 1280,
    }
    geometry = geometry_of(config, "bfloat16")
    assert [layer.kv_heads for layer in geometry.layers] == [3, 3, 4]
    assert geometry.bytes_per_token == 10 * 128 * 2
    config["num_kv_heads"] = [3, 3]
    with pytest.raises(UnsupportedModel, match="3 layers but lists the heads of 2"):
        geometry_of(config, "bfloat16")


# --- windows ---


def test_gemma3_slides_in_five_layers_of_six() -> None:
    kinds = attention(*(["sliding"] * 5 + ["full"]) * 3)
    config = decoder(18, 4, 640, num_key_value_heads=1, head_dim=256, sliding_window=512, layer_types=kinds)
    geometry = geometry_of(config, "bfloat16")
    assert [layer.window for layer in geometry.layers] == ([512] * 5 + [None]) * 3
    assert geometry.bytes_per_token == 18 * KIB
    assert geometry.bytes_for(512) == 512 * 18 * KIB
    assert geometry.bytes_for(10_000) == (15 * 512 + 3 * 10_000) * KIB
    assert geometry.stored_bytes(10_000, 1024) == (15 * (9 * 511 + 511) + 3 * 10_000) * KIB
    assert geometry.stored_bytes(1300, 1024) == (15 * (511 + 276) + 3 * 1300) * KIB
    assert geometry.loaded_bytes(10_000) == (15 * 511 + 3 * 10_000) * KIB
    assert geometry.stored.bytes_per_token == geometry.bytes_per_token
    assert geometry.longest_part == 511
    assert KVGeometry.from_description(geometry.stored.describe()) == geometry.stored
    # The published files name the pattern, or nothing, in place of the list.
    del config["layer_types"]
    assert geometry_of(config | {"sliding_window_pattern": 6}, "bfloat16") == geometry
    assert geometry_of(config | {"model_type": "gemma3_text"}, "bfloat16") == geometry


def test_a_window_without_a_pattern_holds_in_every_layer() -> None:
    config = decoder(32, 32, 4096, num_key_value_heads=8, sliding_window=4096)
    geometry = geometry_of(config, "bfloat16")
    assert {layer.window for layer in geometry.layers} == {4096}
    assert geometry.bytes_for(8192) == geometry.bytes_for(4096) == 4096 * 128 * KIB


def test_qwen2_names_a_window_it_does_not_use() -> None:
    config = decoder(3, sliding_window=32_768, use_sliding_window=False, max_window_layers=1)
    assert layer_kinds(config) == [("full", None)] * 3
    assert layer_kinds(config | {"use_sliding_window": True}) == [("full", None)] + [("sliding", 32_768)] * 2
    assert layer_kinds(config | {"use_sliding_window": True, "sliding_window": None}) == [("full", None)] * 3


def test_exaone_writes_its_pattern_in_letters() -> None:
    kinds = layer_kinds(decoder(4, sliding_window=128, sliding_window_pattern="LLLG"))
    assert kinds == [("sliding", 128)] * 3 + [("full", None)]


def test_chunked_layers_are_windows_of_their_chunk() -> None:
    kinds = layer_kinds(decoder(2, layer_types=attention("chunked", "full"), attention_chunk_size=8192))
    assert kinds == [("sliding", 8192), ("full", None)]


# --- layers without KV of their own ---


def test_recurrent_layers_keep_no_kv() -> None:
    kinds = attention("linear", "linear", "linear", "full") * 16
    config = decoder(64, 24, 5120, num_key_value_heads=4, head_dim=256, layer_types=kinds)
    assert layer_kinds(config)[:4] == [("stateful", None)] * 3 + [("full", None)]
    assert geometry_of(config, "bfloat16").bytes_per_token == 64 * KIB


@pytest.mark.parametrize("kind", ["mamba", "linear_attention", "conv", "a_kind_of_the_future"])
def test_a_kind_that_is_not_plain_attention_counts_as_stateful(kind: str) -> None:
    assert layer_kinds(decoder(2, layers_block_type=[kind, "attention"])) == [("stateful", None), ("full", None)]


def test_layers_that_read_an_earlier_layers_kv_cost_nothing() -> None:
    config = decoder(4, layer_types=attention("sliding", "full", "sliding", "full"), sliding_window=8)
    assert len(geometry_of(config | {"num_kv_shared_layers": 2}, "bfloat16").layers) == 2


def test_gemma4s_full_layers_have_wider_heads() -> None:
    config = decoder(
        2, 8, 2304, num_key_value_heads=4, head_dim=256, sliding_window=512, layer_types=attention("sliding", "full")
    )
    named = {"global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
    expected = (LayerGeometry(4, 256, 256, 512), LayerGeometry(2, 512, 512))
    assert geometry_of(config | named, "bfloat16").layers == expected
    assert geometry_of(config | named | {"attention_k_eq_v": False}, "bfloat16").layers[1].kv_heads == 4
    for key in (1, "1"):
        listed = {"per_layer_config": {key: {"head_dim": 512, "num_key_value_heads": 2}}}
        assert geometry_of(config | listed, "bfloat16").layers == expected


# --- where the fields stand ---


def test_multimodal_configurations_nest_the_decoder() -> None:
    inner = decoder(4, num_key_value_heads=2, layer_types=attention(*["full"] * 4))
    config = {"torch_dtype": "float32", "vision_config": {"num_hidden_layers": 99}, "text_config": inner}
    assert text_config(config) is inner
    assert geometry_of(config) == KVGeometry.uniform(4, 2, 16, "float32")
    assert geometry_of(config | {"text_config": inner | {"dtype": "bfloat16"}}).dtype == "bfloat16"
    assert layer_kinds(config) == layer_kinds(inner)
    assert naive_bytes_per_token(config, "float16") == naive_bytes_per_token(inner, "float16")


def test_dtype_comes_from_the_argument_then_the_configuration() -> None:
    config = decoder(torch_dtype="torch.bfloat16")
    assert geometry_of(config).dtype == "bfloat16"
    assert geometry_of(config, "float32").bytes_per_token == 2 * geometry_of(config).bytes_per_token
    assert geometry_of(decoder()).dtype == "float16"


def test_errors_name_what_is_missing() -> None:
    with pytest.raises(UnsupportedModel, match="num_hidden_layers.*decoder-only"):
        geometry_of({"hidden_size": 3})
    with pytest.raises(UnsupportedModel, match="num_attention_heads"):
        geometry_of({"num_hidden_layers": 3, "hidden_size": 3})
    with pytest.raises(UnsupportedModel, match="hidden_size"):
        geometry_of({"num_hidden_layers": 3, "num_attention_heads": 3})
    with pytest.raises(UnsupportedModel, match="'int3'.*float32"):
        geometry_of(decoder(), "int3")
    with pytest.raises(UnsupportedModel, match="2 layers but lists the kind of 3"):
        geometry_of(decoder(2, layer_types=attention("full", "full", "full")))


LAYERS = st.builds(
    LayerGeometry, st.integers(1, 64), st.integers(1, 512), st.integers(1, 512), st.none() | st.integers(1, 4096)
)


@given(st.lists(LAYERS, max_size=6), st.sampled_from(["float32", "bfloat16", "float16"]), st.integers(0, 9000))
def test_description_round_trips_and_sizes_add_up(layers: list[LayerGeometry], dtype: str, tokens: int) -> None:
    geometry = KVGeometry(tuple(layers), dtype)
    assert KVGeometry.from_description(json.loads(json.dumps(geometry.describe()))) == geometry
    assert geometry.bytes_for(tokens) <= geometry.bytes_per_token * tokens
    assert geometry.bytes_per_token == sum(
        layer.kv_heads * (geometry.head_bytes(i, 0) + geometry.head_bytes(i, 1)) for i, layer in enumerate(layers)
    )
    if all(layer.window is None for layer in layers):
        assert geometry.bytes_for(tokens) == geometry.bytes_per_token * tokens
