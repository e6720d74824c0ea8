"""OLMoE and FlexOlmo: they have norms over all heads' queries and keys at once. FlexOlmo's other norms stand after
attention and MLP."""

from __future__ import annotations

from typing import Any

from keepwarm.runtime.native.description import Description, LayerParts, NotCovered
from keepwarm.runtime.native.families import experts, llama


def describe(model: Any) -> Description:
    if model.config.clip_qkv is not None:
        raise NotCovered("clipped queries, keys and values")
    layers = tuple(experts.layer(layer, experts.parts_of(layer.mlp)) for layer in model.model.layers)
    return llama.described(model, layers, wide_norms=True)


def describe_flex(model: Any) -> Description:
    layers = tuple(
        LayerParts(
            llama.attention(layer.self_attn),
            after=llama.norm(layer.post_attention_layernorm),
            after_mlp=llama.norm(layer.post_feedforward_layernorm),
            **experts.parts_of(layer.mlp),
        )
        for layer in model.model.layers
    )
    return llama.described(model, layers, wide_norms=True)
