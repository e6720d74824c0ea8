"""GLM and GLM 4: the MLP's gate and up are fused, and neighbouring dims are rotated together, in a part of each head.
GLM 4 has norms after attention and MLP, too."""

from __future__ import annotations

from typing import Any

from keepwarm.runtime.native.description import Description, LayerParts
from keepwarm.runtime.native.families import llama


def describe(model: Any) -> Description:
    layers = tuple(
        LayerParts(
            llama.attention(layer.self_attn),
            llama.fused_mlp(layer.mlp),
            before=llama.norm(layer.input_layernorm),
            after=llama.norm(getattr(layer, "post_self_attn_layernorm", None)),
            before_mlp=llama.norm(layer.post_attention_layernorm),
            after_mlp=llama.norm(getattr(layer, "post_mlp_layernorm", None)),
        )
        for layer in model.model.layers
    )
    # The module's table repeats its first half; the model uses only that, for neighbours.
    return llama.described(model, layers, tables=(llama.table(model.model.rotary_emb),), interleaved=True)
