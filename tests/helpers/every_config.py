"""Small configurations of every causal language model of the installed transformers."""

from __future__ import annotations

from typing import Any

from tests.helpers.every_exception import EXCEPTIONS, NOT_RUN, PARTS
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
CLASSES: dict[str, str] = {  # the class of each model type
    name: found if isinstance(found, str) else found[0] for name, found in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
}
VOCABULARY = 128
LAYERS = 4
WINDOW = 16  # tokens that a windowed layer sees

# Numbers by the field's name. A configuration gets those of its fields that are not None by default.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size", "embedding_dim", "lru_width"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "dff", "dim_ff", "d_inner", "ffn_hidden_size"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "feed_forward_size", "dense_intermediate_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size_mlp", "shared_experts_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("swa_num_attention_heads",), 4),
    "index_n_heads": 16,  # with few heads many scores of an index are zero, and which of them are chosen is chance
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "d_head", "dim_head", "kv_channels", "swa_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("attention_head_size", "rotary_dim", "v_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "gated_norm_rank", "hidden_size_per_layer_input", "laurel_rank"), 8),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "audio_vocab_size"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"), 512),
    **dict.fromkeys(("context_length", "max_target_positions"), 512),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size", "sliding_window_size"), WINDOW),
    **dict.fromkeys(("attention_window_size", "index_topk"), WINDOW),
    **dict.fromkeys(("local_attention",), 2 * WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("q_lora_rank",), 24),
    **dict.fromkeys(("hc_lowrank", "router_hidden_size", "d_rel", "adapter_rank"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "time_step_rank", "mamba_dt_rank"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "block_size"), 16),
    "mamba_d_ssm": 128,
    **dict.fromkeys(("linear_num_key_heads", "mamba_n_groups", "n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    "rel_extent": 32,
    "attention_hidden_size": 64,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "altup_num_inputs": 2,
    "type_vocab_size": 2,
}
_AT_MOST: dict[str, int] = {  # numbers that are left alone where they are smaller
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "num_expert_group", "n_shared_experts", "hc_mult", "hc_count"), 2),
    "topk_group": 1,
}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def configuration(model_type: str, **changes: Any) -> Any:
    """A small configuration of a model type, as a decoder. `changes` are of its text part.

    Raises KeyError for a type that is not in MODEL_TYPES, ValueError for one that cannot be built.
    """
    if model_type in NOT_RUN:
        raise ValueError(NOT_RUN[model_type])
    config_class: Any = CONFIG_MAPPING[model_type]
    special = EXCEPTIONS.get(model_type, {})
    language = {name: value for name, value in special.items() if name != "outside"}
    default = config_class()
    text_name = _text_name(default)
    settings: dict[str, Any] = _shrunk(default) if text_name is None else {}
    for name in default.sub_configs:
        part = getattr(default, name, None)
        special_part = PARTS.get(getattr(part, "model_type", ""))
        if name == text_name or not isinstance(part, PreTrainedConfig) or (text_name is None and special_part is None):
            continue
        settings[name] = _shrunk(part) | (special_part or {}) | {"model_type": part.model_type}
    if text_name is None:
        return config_class(**(settings | language | changes))
    text = getattr(default, text_name)
    settings[text_name] = _shrunk(text) | language | changes | {"model_type": text.model_type}
    return config_class(**(settings | special.get("outside", {})))


def _text_name(config: Any) -> str | None:
    """Name of the part that is the language model; None where it is the whole."""
    text = config.get_text_config(decoder=True)
    if text is config:
        return None
    return next((name for name in config.sub_configs if getattr(config, name, None) is text), None)


def _shrunk(default: Any) -> dict[str, Any]:
    """Settings that make a configuration of this kind small."""
    names = set(type(default).__dataclass_fields__)
    settings: dict[str, Any] = {}
    for name in names:
        value = _value(default, name)
        if name in _SIZES and value is not None:
            settings[name] = _SIZES[name]
        elif name in _AT_MOST and isinstance(value, int):
            settings[name] = min(value, _AT_MOST[name])
        elif name in _IDS:
            settings[name] = _IDS[name]
        elif name in ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types") and value:
            settings[name] = _every_kind(value)
    if "kv_lora_rank" in settings:  # latent attention has a key for each head
        settings["num_key_value_heads"] = 4
    if "is_decoder" in names:
        settings["is_decoder"] = True
    if getattr(default, "is_encoder_decoder", False):
        settings |= {"is_decoder": True, "is_encoder_decoder": False}
    return settings


def _value(config: Any, name: str) -> Any:
    """A field's value; that of the first layers for one that differs by layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # it differs
        return vars(config).get(name)


def _every_kind(kinds: list[str]) -> list[str]:
    """As many kinds as there are layers: all that occur, the default's last kind last."""
    seen = list(dict.fromkeys(kinds))
    seen = [kind for kind in seen if kind != kinds[-1]] + [kinds[-1]]
    return [seen[(i + len(seen) - LAYERS % len(seen)) % len(seen)] for i in range(LAYERS)]
