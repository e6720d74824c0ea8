"""Mamba-2 (arXiv:2405.21060) in a layer, as Bamba and Granite 4 have it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from keepwarm.runtime.native.description import Description, LayerParts, NotCovered, StateSpace, alike
from keepwarm.runtime.native.families import llama


def describe(model: Any) -> Description:
    """Describe Bamba."""
    body = model.model
    layers = tuple(
        LayerParts(
            mixer(layer.mamba) if layer.block_type == "linear_attention" else llama.attention(layer.self_attn),
            llama.mlp(layer.feed_forward),
            before=llama.norm(layer.input_layernorm),
            before_mlp=llama.norm(layer.pre_ff_layernorm),
        )
        for layer in body.layers
    )
    dims = [layer.self_attn.head_dim for layer in body.layers if layer.block_type != "linear_attention"]
    return llama.described(model, layers, dim=alike(dims, "head widths"), norm=llama.norm(body.final_layernorm))


def mixer(module: Any) -> StateSpace:
    if module.activation != "silu":
        raise NotCovered("Mamba-2 with another activation")
    if tuple(module.time_step_limit) != (0.0, math.inf):
        raise NotCovered("Mamba-2 with bounds of its steps")
    keys = module.n_groups * module.ssm_state_size
    parts = [module.intermediate_size, keys, keys]  # x, B and C
    gate, *reads, steps = llama.split(module.in_proj, module.intermediate_size, *parts, module.num_heads)
    weight, bias = llama.short_convolution(module.conv1d, module.conv_kernel_size), module.conv1d.bias
    norm = llama.norm(module.norm)
    assert norm is not None
    return StateSpace(
        reads=(*reversed(reads), gate, steps),
        weight=_backwards(weight.split(parts)),
        bias=None if bias is None else _backwards(bias.detach().split(parts)),
        decay=-llama.exact(module, "A_log").float().exp(),
        step=llama.exact(module, "dt_bias"),
        skip=llama.exact(module, "D"),
        norm=norm,
        o=llama.linear(module.out_proj),
        key_heads=module.n_groups,
        key_dim=module.ssm_state_size,
    )


def _backwards(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return C, B and x under each other: queries, keys and values."""
    return torch.cat([*reversed(parts)])
