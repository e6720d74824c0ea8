"""gpt-oss: it has experts with biases and bounds, sinks, and a window in every second layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from keepwarm.runtime.native.block_experts import BlockExperts
from keepwarm.runtime.native.description import Description, Experts, Linear, Mlp, Table, alike
from keepwarm.runtime.native.families import experts, llama


def describe(model: Any) -> Description:
    layers = []
    for layer in model.model.layers:
        attention = replace(llama.attention(layer.self_attn), sinks=llama.exact(layer.self_attn, "sinks"))
        layers.append(experts.layer(layer, {"mlp": None, "experts": _experts(layer.mlp)}, attention))
    every = [layer.mlp.experts for layer in model.model.layers]
    return llama.described(
        model,
        tuple(layers),
        tables=(_table(model.model.rotary_emb),),
        alpha=alike([each.alpha for each in every], "activations"),
        limit=alike([each.limit for each in every], "activations"),
    )


def _experts(module: Any) -> Experts:
    if isinstance(module.experts, BlockExperts):
        mlp = experts.in_blocks(module.experts, "clamped")
        return Experts(experts.routing(module.router), mlp, module.router.top_k)
    every = module.experts  # its weights are [experts, in, out], with gates and ups in turn
    gates, ups = experts.interleaved(every.gate_up_proj.detach())
    gate_bias, up_bias = experts.interleaved(every.gate_up_proj_bias.detach())
    down = Linear(every.down_proj.detach().transpose(1, 2), every.down_proj_bias.detach())
    mlp = Mlp(Linear(ups.transpose(1, 2), up_bias), down, "clamped", Linear(gates.transpose(1, 2), gate_bias))
    return Experts(experts.routing(module.router), mlp, module.router.top_k)


def _table(module: Any) -> Table:
    llama.table(module)  # it raises NotCovered for some kinds
    return partial(_rotary, module)


def _rotary(module: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cosine, sine = (each[0] for each in module(torch.empty(1, dtype=torch.float32), positions[None]))
    return cosine, sine  # this module's table has half a head's dims already
