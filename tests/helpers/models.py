"""Tiny random-weight models of the real classes."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 49152  # the tokenizer's


_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _SHAPE),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _SHAPE),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _SHAPE),
    "mistral": ("MistralConfig", "MistralForCausalLM", _SHAPE | {"sliding_window": None}),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 2048,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}


def tiny(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A random-weight model of a real class; the same seed gives the same weights."""
    config_class, model_class, settings = FAMILIES[family]
    return made(config_class, model_class, settings | changes, dtype, seed)


def made(
    config_class: str, model_class: str, settings: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0
) -> Any:
    """A random-weight model of any class of transformers."""
    config = getattr(transformers, config_class)(**settings)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = getattr(transformers, model_class)(config)
        for parameter in model.parameters():  # larger than the usual start, so that logits differ and attention matters
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    finally:
        torch.random.set_rng_state(state)
    return model.to(dtype).eval()
