"""Cohere's Command R, R7B and A: attention and MLP read one layer norm, and neighbouring dims are rotated together."""

from __future__ import annotations

from typing import Any

from keepwarm.runtime.native.description import Description, LayerParts, NotCovered
from keepwarm.runtime.native.families import llama


def describe(model: Any) -> Description:
    if getattr(model.config, "use_qk_norm", False):
        raise NotCovered("norms of queries and keys that differ by head")
    windowed = hasattr(model.config, "layer_types")  # Cohere 2: only layers with a window rotate
    layers = tuple(
        LayerParts(
            llama.attention(layer.self_attn, table=None if windowed and layer.self_attn.sliding_window is None else 0),
            llama.mlp(layer.mlp),
            before=llama.norm(layer.input_layernorm),
            before_mlp=llama.norm(layer.input_layernorm),
        )
        for layer in model.model.layers
    )
    return llama.described(model, layers, parallel=True, centred=True, interleaved=True, logit=float(model.logit_scale))
