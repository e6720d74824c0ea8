"""Phi 3 and 4: Llama with fused products. Some rotate only a part of a head's dims."""

from __future__ import annotations

from typing import Any

from keepwarm.runtime.native.description import Attention, Description, LayerParts
from keepwarm.runtime.native.families import llama


def describe(model: Any) -> Description:
    config = model.config
    counts = (config.num_attention_heads, *2 * (config.num_key_value_heads,))
    layers = []
    for layer in model.model.layers:
        attention = layer.self_attn
        q, k, v = llama.split(attention.qkv_proj, *(count * attention.head_dim for count in counts))
        parts = LayerParts(
            Attention(q, k, v, llama.linear(attention.o_proj), attention.scaling),
            llama.fused_mlp(layer.mlp),
            before=llama.norm(layer.input_layernorm),
            before_mlp=llama.norm(layer.post_attention_layernorm),
        )
        layers.append(parts)
    return llama.described(model, tuple(layers))
