"""OLMo 2 and 3: they have norms after attention and MLP, and norms over all heads' queries and keys at once."""

from __future__ import annotations

from typing import Any

from keepwarm.runtime.native.description import Description, LayerParts
from keepwarm.runtime.native.families import llama


def describe(model: Any) -> Description:
    body = model.model
    tables, numbers = llama.tables_of(model)
    layers = tuple(
        LayerParts(
            llama.attention(layer.self_attn, table=number),
            llama.mlp(layer.mlp),
            after=llama.norm(layer.post_attention_layernorm),
            after_mlp=llama.norm(layer.post_feedforward_layernorm),
        )
        for layer, number in zip(body.layers, numbers, strict=True)
    )
    return llama.described(model, layers, tables=tables, wide_norms=True)
