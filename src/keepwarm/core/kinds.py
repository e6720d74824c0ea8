"""What each layer of a model keeps of a sequence, according to its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keepwarm.errors import UnsupportedModel

STATE_KINDS = ("stateful", "hybrid")  # kinds of layers with a recurrent state
_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "indexed_attention": "indexed",
    "hybrid": "hybrid",
    "moe": "none",
    "mlp": "none",
}
_OWN_CACHES = ("minimax", "rwkv", "xlnet", "xlstm")  # models with their own cache class: all of it is state
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # of Nemotron-H's pattern
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "num_transformer_layers", "n_layers")
_DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")  # of a decoder that was part of an encoder-decoder

# Families whose config.json may not say which layers are full: every n-th is, the others slide.
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "exaone4": 4}

Kinds = list[tuple[str, int | None]]


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a (possibly multimodal) configuration that describes the decoder."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def layer_kinds(config: Mapping[str, Any]) -> Kinds:
    """Return the kind of each layer: "full", "sliding" with its window, "indexed" with index keys beside keys and
    values, "stateful" with a recurrent state instead of them, "hybrid" with both (and a window, or None), "none" for a
    layer that keeps nothing.

    Raises UnsupportedModel when the configuration lists another number of layers than it declares.
    """
    config = text_config(config)
    window = config.get("sliding_window")
    if config.get("use_sliding_window") is False:
        window = None
    if isinstance(apart := config.get("cross_attention_layers"), list):  # Mllama's, which see only pictures
        return [("none" if i in apart else "full", None) for i in range(layer_count(config))]
    names = _listed(config)
    if names is None:
        return _unlisted(config, window)
    declares = any(config.get(name) is not None for name in _LAYERS)
    if declares and len(names) != (count := layer_count(config)):
        raise UnsupportedModel(f"the configuration declares {count} layers but lists the kind of {len(names)}")
    return [_kind(name, window or config.get("attention_chunk_size")) for name in names]


def _kind(name: str, window: int | None) -> tuple[str, int | None]:
    if name in ("sliding_attention", "chunked_attention"):
        return "sliding", window
    if name == "hybrid_sliding":
        return "hybrid", window
    return _KINDS.get(name, "stateful"), None


def _unlisted(config: Mapping[str, Any], window: int | None) -> Kinds:
    """The kinds for a configuration that does not list them: all layers are attention, and some may slide."""
    count = layer_count(config)
    if not window:
        return [("full", None)] * count
    if config.get("use_sliding_window") and config.get("max_window_layers") is not None:
        first = config["max_window_layers"]
        return [("full", None) if i < first else ("sliding", window) for i in range(count)]
    every = config.get("sliding_window_pattern") or _FULL_EVERY.get(str(config.get("model_type")))
    if isinstance(every, str):  # "LLLG": three sliding layers, one full
        every = len(every)
    return [("full", None) if every and (i + 1) % every == 0 else ("sliding", window) for i in range(count)]


def _listed(config: Mapping[str, Any]) -> list[str] | None:
    """Return the kind of each layer, in transformers' words, if the configuration lists them or has a rule for them.
    Published files have one or the other."""
    if config.get("model_type") in _OWN_CACHES:
        return ["linear_attention"] * layer_count(config)
    if kinds := config.get("layer_types") or config.get("layers_block_type"):
        return list(kinds)
    if pattern := config.get("hybrid_override_pattern"):  # Nemotron-H
        return [_LETTERS.get(letter, letter) for letter in pattern]
    full = _full_layers(config)
    if full is not None:
        other = "conv" if config.get("conv_L_cache") else "linear_attention"
        return ["full_attention" if i in full else other for i in range(layer_count(config))]
    if config.get("model_type") == "falcon_h1":
        return ["hybrid"] * layer_count(config)
    if config.get("index_head_dim") and config.get("kv_lora_rank"):  # DeepSeek V3.2, GLM 5
        return ["indexed_attention"] * layer_count(config)
    if config.get("state_size") and not config.get("num_attention_heads"):  # Mamba
        return ["linear_attention"] * layer_count(config)
    return None


def _full_layers(config: Mapping[str, Any]) -> set[int] | None:
    """Return which layers of a hybrid are attention; None if the configuration has no rule for that."""
    if isinstance(config.get("linear_attn_config"), Mapping):  # Kimi, which counts from 1
        return {number - 1 for number in config["linear_attn_config"].get("full_attn_layers") or ()}
    if config.get("mamba_d_state") and "attn_layer_indices" in config:  # Bamba
        return set(config["attn_layer_indices"] or ())
    if isinstance(config.get("full_attn_idxs"), list):  # LFM2
        return set(config["full_attn_idxs"])
    count = layer_count(config)
    if config.get("mamba_d_state") and (period := config.get("attn_layer_period")):  # Jamba
        offset = config.get("attn_layer_offset") or 0
        return {i for i in range(count) if i % period == offset}
    every = config.get("full_attention_interval") or config.get("layer_group_size")  # Qwen3-Next; Bailing
    if every is None and config.get("linear_num_value_heads"):
        every = 4
    return {i for i in range(count) if (i + 1) % every == 0} if isinstance(every, int) and every else None


def layer_count(config: Mapping[str, Any]) -> int:
    """How many layers the configuration declares."""
    count = int(first(config, *_LAYERS, *_DECODER_LAYERS))
    twice = config.get("model_type") == "longcat_flash" and config.get("num_hidden_layers") is None
    return 2 * count if twice else count  # each layer of LongCat has two attentions


def first(config: Mapping[str, Any], *names: str) -> Any:
    """Return the first of these fields that is present. Raises UnsupportedModel."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise UnsupportedModel(
        f"the configuration has none of {', '.join(names)}: is this the config.json of a decoder-only language model?"
    )
