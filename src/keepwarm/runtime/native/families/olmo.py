"""OLMo 2 and 3: norms behind attention and MLP, and of all heads' queries and keys at once."""

from __future__ import annotations

from typing import Any

from keepwarm.runtime.native.description import Description, LayerParts
from keepwarm.runtime.native.families import llama


def describe(model: Any) -> Description:
    body = model.model
    if hasattr(body.rotary_emb, "layer_types"):  # OLMo 3
        tables, numbers = llama.tables_by_type(body.rotary_emb, model.config.layer_types)
    else:
        tables, numbers = (llama.table(body.rotary_emb),), [0] * len(body.layers)
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
