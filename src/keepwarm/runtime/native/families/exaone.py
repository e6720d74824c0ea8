"""Exaone 4: it has norms after attention and MLP, and of queries and keys. If some layers have a window, only these
rotate."""

from __future__ import annotations

from typing import Any

from keepwarm.runtime.native.description import Description, LayerParts
from keepwarm.runtime.native.families import llama


def describe(model: Any) -> Description:
    windowed = model.config.sliding_window is not None
    layers = tuple(
        LayerParts(
            llama.attention(layer.self_attn, table=0 if layer.self_attn.is_sliding or not windowed else None),
            llama.mlp(layer.mlp),
            after=llama.norm(layer.post_attention_layernorm),
            after_mlp=llama.norm(layer.post_feedforward_layernorm),
        )
        for layer in model.model.layers
    )
    return llama.described(model, layers)
