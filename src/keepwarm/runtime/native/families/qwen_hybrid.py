"""Qwen3-Next and Qwen3.5: gated delta nets in most layers, and attention with gated results in the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from keepwarm.runtime.native.blocks import BlockLinear, Blocks
from keepwarm.runtime.native.description import (
    Attention,
    DeltaNet,
    Description,
    LayerParts,
    Linear,
    Norm,
    NotCovered,
    Order,
    alike,
)
from keepwarm.runtime.native.families import experts, llama

_MORE = 1.0  # norms add one to their weights; the delta net's own does not


def describe(model: Any) -> Description:
    layers = tuple(
        LayerParts(
            _delta_net(layer.linear_attn) if layer.block_type == "linear_attention" else _attention(layer.self_attn),
            before=llama.norm(layer.input_layernorm, _MORE),
            before_mlp=llama.norm(layer.post_attention_layernorm, _MORE),
            **experts.parts_of(layer.mlp),
        )
        for layer in model.model.layers
    )
    dims = [layer.self_attn.head_dim for layer in model.model.layers if layer.block_type == "full_attention"]
    norm = llama.norm(model.model.norm, _MORE)
    return llama.described(model, layers, dim=alike(dims, "head widths"), norm=norm)


def _attention(module: Any) -> Attention:
    """Return attention whose first weight has, head by head, the query and then the gate."""
    if module.q_proj.out_features != 2 * module.o_proj.in_features:
        raise NotCovered("attention without gates")
    q, gate = (_part(module.q_proj, [module.head_dim] * 2, at) for at in range(2))
    k, v, o = map(llama.linear, (module.k_proj, module.v_proj, module.o_proj))
    q_norm, k_norm = llama.norm(module.q_norm, _MORE), llama.norm(module.k_norm, _MORE)
    return Attention(q, k, v, o, module.scaling, q_norm, k_norm, gate=gate)


def _part(module: Any, sizes: Sequence[int], at: int) -> Linear:
    """Return one of the parts that a product has for each head, `sizes` outputs each."""
    weight, bias = llama.weight(module), module.bias
    rows = torch.arange(len(weight)).unflatten(0, (-1, sum(sizes))).split([*sizes], dim=1)[at].reshape(-1)
    some = weight.of_rows(rows) if isinstance(weight, Blocks) else weight[rows]
    return Linear(some, None if bias is None else bias.detach()[rows], Order(weight, rows))


def _delta_net(module: Any) -> DeltaNet:
    conv = module.conv1d
    if module.activation != "silu":
        raise NotCovered("a delta net with another activation")
    if getattr(module.norm, "activation", "silu") != "silu":
        raise NotCovered("a delta net with another gate")
    weight, decay, step = (
        llama.short_convolution(conv, module.conv_kernel_size),
        llama.exact(module, "A_log"),
        llama.exact(module, "dt_bias"),
    )
    bias = None if conv.bias is None else conv.bias.detach()
    tiled = isinstance(module.out_proj, BlockLinear) and module.out_proj.inputs is not None
    if tiled:  # products have the heads of values in the file's order; what lies between follows them
        channels, heads = (each.outputs.argsort() for each in (module.in_proj_qkv, module.in_proj_a))
        weight, decay, step = weight[channels], decay[heads], step[heads]
        bias = None if bias is None else bias[channels]
    return DeltaNet(
        reads=_reads(module),
        weight=weight,
        bias=bias,
        decay=-decay.float().exp(),
        step=step,
        norm=_plain_norm(module.norm),
        o=llama.linear(module.out_proj),
        key_heads=module.num_k_heads,
        key_dim=module.head_k_dim,
        tiled=tiled,
    )


def _plain_norm(module: Any) -> Norm:
    found = llama.norm(module)
    assert found is not None
    return found


def _reads(module: Any) -> tuple[Linear, ...]:
    """Return the first products in the kernels' order. Qwen3-Next has them by head of keys."""
    if hasattr(module, "in_proj_qkv"):
        return tuple(map(llama.linear, (module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a)))
    each = module.num_v_heads // module.num_k_heads
    sizes = [module.head_k_dim] * 2 + [each * module.head_v_dim] * 2
    return (
        *(_part(module.in_proj_qkvz, sizes, at) for at in range(4)),
        *(_part(module.in_proj_ba, [each] * 2, at) for at in range(2)),
    )
