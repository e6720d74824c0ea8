"""LFM2 and LFM3: short convolutions in most layers, and attention in the others. LFM2-MoE has experts in all but the
first few. LFM3 may norm results, and gate those of each head of attention; some of its layers have windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from keepwarm.runtime.native.blocks import Blocks
from keepwarm.runtime.native.description import (
    Attention,
    Convolution,
    Description,
    LayerParts,
    Linear,
    Mlp,
    NotCovered,
    Order,
    Table,
    alike,
)
from keepwarm.runtime.native.families import experts, llama


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


def describe_third(model: Any) -> Description:
    """Describe LFM3."""
    body = model.model
    tables, numbers = _tables(model)
    layers = tuple(
        LayerParts(
            _gated(layer.self_attn, number) if layer.is_attention_layer else _convolution(layer.conv),
            before=llama.norm(layer.operator_norm),
            after=llama.norm_if_any(layer.post_operator_norm),
            before_mlp=llama.norm(layer.ffn_norm),
            after_mlp=llama.norm_if_any(layer.post_ffn_norm),
            **_mlp(layer.feed_forward),
        )
        for layer, number in zip(body.layers, numbers, strict=True)
    )
    dims = [layer.self_attn.head_dim for layer in body.layers if layer.is_attention_layer]
    norm = llama.norm(body.embedding_norm)
    return llama.described(model, layers, dim=alike(dims, "head widths"), norm=norm, tables=tables)


def _tables(model: Any) -> tuple[tuple[Table, ...], list[int | None]]:
    """Return the rotary embeddings of LFM3, and each layer's number; None for a convolution."""
    module = model.model.rotary_emb
    kinds = list(module.layer_types)
    numbers = [kinds.index(kind) if kind in kinds else None for kind in model.config.layer_types]
    return tuple(llama.table(module, layer_type=kind) for kind in kinds), numbers


def _gated(module: Any, table: int | None) -> Attention:
    """Return attention of LFM3. A head's gate is that of each of its dims."""
    found = llama.attention(module, table=table)
    if module.g_proj is None:
        return found
    weight = llama.weight(module.g_proj)
    rows = torch.arange(len(weight)).repeat_interleave(module.head_dim)
    if isinstance(weight, Blocks):
        raise NotCovered("gates of heads with weights in blocks")
    return replace(found, gate=Linear(weight[rows], None, Order(weight, rows)))


def _attention(module: Any) -> Attention:
    q, k, v, o = map(llama.linear, (module.q_proj, module.k_proj, module.v_proj, module.out_proj))
    return Attention(q, k, v, o, module.scaling, llama.norm(module.q_layernorm), llama.norm(module.k_layernorm))


def _convolution(module: Any) -> Convolution:
    weight, bias = llama.short_convolution(module.conv, module.conv_kernel_size), module.conv.bias
    read, o = llama.linear(module.in_proj), llama.linear(module.out_proj)
    return Convolution(read, weight, o, None if bias is None else bias.detach())


def _mlp(module: Any) -> dict[str, Any]:
    if hasattr(module, "experts"):
        return experts.parts_of(module)
    return {"mlp": Mlp(llama.linear(module.w3), llama.linear(module.w2), "silu", llama.linear(module.w1))}
