"""Phi 3 and 4: Llama with fused products, some with a rotary embedding of part of a head's dims."""

from __future__ import annotations

from typing import Any

from keepwarm.runtime.native.description import Attention, Description, LayerParts
from keepwarm.runtime.native.families import llama


def describe(model: Any) -> Description:
    config, dim = model.config, model.model.layers[0].self_attn.head_dim
    sizes = [count * dim for count in (config.num_attention_heads, *2 * (config.num_key_value_heads,))]
    layers = []
    for layer in model.model.layers:
        q, k, v = llama.split(layer.self_attn.qkv_proj, *sizes)
        parts = LayerParts(
            Attention(q, k, v, llama.linear(layer.self_attn.o_proj)),
            llama.fused_mlp(layer.mlp, config.intermediate_size),
            before=llama.norm(layer.input_layernorm),
            before_mlp=llama.norm(layer.post_attention_layernorm),
        )
        layers.append(parts)
    return llama.described(model, tuple(layers))
