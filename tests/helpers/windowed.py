"""Tiny random-weight models of real classes whose layers attend to a window, or a chunk, of the last positions."""

from __future__ import annotations

from typing import Any

import torch
from tests.helpers.models import FAMILIES, VOCABULARY, made

WINDOW = 24
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_PLAIN = {name: value for name, value in _SHAPE.items() if name != "head_dim"}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_CHUNKED = {
    "attention_chunk_size": WINDOW,
    "sliding_window": None,
    "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    "no_rope_layers": [1, 0, 1],
    "intermediate_size_mlp": 96,
    "moe_layers": [],
}

WINDOWED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", "MistralForCausalLM", FAMILIES["mistral"][2] | {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _SHAPE),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _SHAPE),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", _SHAPE | _EXPERTS),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", _PLAIN),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", _PLAIN),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", _PLAIN),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM", _SHAPE | _EXPERTS | _CHUNKED),
}


def windowed(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Mistral slides in every layer, the others in some."""
    return made(*WINDOWED[family], dtype)
