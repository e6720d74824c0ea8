"""Nemotron and Minitron: layer norms that add one to their weight, and MLPs without a gate."""

from __future__ import annotations

from typing import Any

from keepwarm.runtime.native.description import Description, LayerParts
from keepwarm.runtime.native.families import llama


def describe(model: Any) -> Description:
    layers = tuple(
        LayerParts(
            llama.attention(layer.self_attn),
            llama.mlp(layer.mlp),
            before=llama.norm(layer.input_layernorm, 1),
            before_mlp=llama.norm(layer.post_attention_layernorm, 1),
        )
        for layer in model.model.layers
    )
    return llama.described(model, layers, norm=llama.norm(model.model.norm, 1), centred=True)


def describe_jais(model: Any) -> Description:
    """Describe Jais 2, whose layer norms are torch's."""
    return llama.described(model, llama.describe(model).layers, centred=True)
