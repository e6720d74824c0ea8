"""LFM2: short convolutions in most layers, and attention in the others. LFM2-MoE has experts in all but
the first few."""

from __future__ import annotations

from typing import Any

from torch import nn

from keepwarm.runtime.native.description import Attention, Convolution, Description, LayerParts, Mlp, NotCovered, alike
from keepwarm.runtime.native.families import experts, llama

_SHAPE = ("padding", "stride", "dilation", "kernel_size")


def describe(model: Any) -> Description:
    layers = tuple(
        LayerParts(
            _attention(layer.self_attn) if layer.is_attention_layer else _convolution(layer.conv),
            before=llama.norm(layer.operator_norm),
            before_mlp=llama.norm(layer.ffn_norm),
            **_mlp(layer.feed_forward),
        )
        for layer in model.model.layers
    )
    dims = [layer.self_attn.head_dim for layer in model.model.layers if layer.is_attention_layer]
    norm = llama.norm(model.model.embedding_norm)
    rotary = model.model.pos_emb if hasattr(model.model, "pos_emb") else model.model.rotary_emb
    return llama.described(model, layers, dim=alike(dims, "head widths"), norm=norm, tables=(llama.table(rotary),))


def _attention(module: Any) -> Attention:
    q, k, v, o = map(llama.linear, (module.q_proj, module.k_proj, module.v_proj, module.out_proj))
    return Attention(q, k, v, o, module.scaling, llama.norm(module.q_layernorm), llama.norm(module.k_layernorm))


def _convolution(module: Any) -> Convolution:
    weight, bias = llama.exact(module.conv), module.conv.bias
    kernel = module.conv_kernel_size
    usual = nn.Conv1d(1, 1, kernel, padding=kernel - 1)
    if any(getattr(module.conv, name) != getattr(usual, name) for name in _SHAPE):
        raise NotCovered("a convolution of another shape")
    read, o = llama.linear(module.in_proj), llama.linear(module.out_proj)
    return Convolution(read, weight.flatten(1), o, None if bias is None else bias.detach())


def _mlp(module: Any) -> dict[str, Any]:
    if hasattr(module, "experts"):
        return experts.parts_of(module)
    return {"mlp": Mlp(llama.linear(module.w3), llama.linear(module.w2), "silu", llama.linear(module.w1))}
