"""StarCoder 2: it has layer norms, biases everywhere, and an MLP without a gate."""

from __future__ import annotations

from typing import Any

from keepwarm.runtime.native.description import Description, LayerParts, Mlp
from keepwarm.runtime.native.families import llama


def describe(model: Any) -> Description:
    layers = tuple(
        LayerParts(
            llama.attention(layer.self_attn),
            Mlp(llama.linear(layer.mlp.c_fc), llama.linear(layer.mlp.c_proj), llama.activation(layer.mlp.act)),
            before=llama.norm(layer.input_layernorm),
            before_mlp=llama.norm(layer.post_attention_layernorm),
        )
        for layer in model.model.layers
    )
    return llama.described(model, layers, centred=True)
