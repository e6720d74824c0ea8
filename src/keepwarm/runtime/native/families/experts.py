"""Describes experts and their router. transformers keeps them alike in most families."""

from __future__ import annotations

from typing import Any

import torch

from keepwarm.runtime.native.block_experts import BlockExperts
from keepwarm.runtime.native.description import Experts, LayerParts, Linear, Mlp, NotCovered, Sigmoid
from keepwarm.runtime.native.families import llama

_NOT_SOFTMAX = ("e_score_correction_bias", "expert_bias", "routed_scaling_factor")  # what other routers have


def parts_of(module: Any, router: Any = None) -> dict[str, Any]:
    """Return a layer's `mlp` and `experts`, from a module that is an MLP or has experts. `router` defaults to the
    module's `gate`."""
    if not hasattr(module, "experts"):
        return {"mlp": llama.mlp(module)}
    router = module.gate if router is None else router
    own, gate = getattr(module, "shared_expert", None), getattr(module, "shared_expert_gate", None)
    own = getattr(module, "shared_experts", own)
    if gate is not None and gate.bias is not None:
        raise NotCovered("a bias of a shared expert's gate")
    by_sigmoid = sigmoid(module, router)
    found = Experts(
        router=routing(router),
        all=gated(module.experts),
        chosen=router.top_k,
        over_all=by_sigmoid is None and not getattr(router, "norm_topk_prob", True),
        gate=None if gate is None else llama.exact(gate),
        sigmoid=by_sigmoid,
    )
    return {"mlp": None if own is None else llama.mlp(own), "experts": found}


def routing(router: Any) -> Linear:
    bias = getattr(router, "bias", None)
    return Linear(llama.exact(router), None if bias is None else bias.detach())


def sigmoid(module: Any, router: Any) -> Sigmoid | None:
    """Return how a module's router makes shares by sigmoids; None if it takes a softmax."""
    kind = type(router).__name__
    if kind == "Glm4MoeTopkRouter":
        groups, correction, least = router.num_group, router.e_score_correction_bias, 1e-20
    elif kind == "Lfm2MoeTopKRouter":
        groups, correction, least = 1, module.expert_bias if router.use_expert_bias else None, 1e-6
    elif any(hasattr(each, name) for each in (module, router) for name in _NOT_SOFTMAX):
        raise NotCovered(f"a router of the class {kind}")
    else:
        return None
    if groups != 1:
        raise NotCovered("experts that are chosen by groups")
    if correction is not None and correction.device != router.weight.device:
        raise NotCovered("a router's correction on another device")
    return Sigmoid(
        None if correction is None else correction.detach().float(),
        least if router.norm_topk_prob else None,
        float(router.routed_scaling_factor),
    )


def gated(module: Any) -> Mlp:
    """Return experts from a weight that has each one's gate and then its up, `[experts, 2 * inner, hidden]`; or in
    blocks."""
    if isinstance(module, BlockExperts):
        return in_blocks(module, llama.activation(module.act_fn))
    gates, ups = module.gate_up_proj.detach().chunk(2, dim=1)
    return Mlp(Linear(ups), Linear(module.down_proj.detach()), llama.activation(module.act_fn), Linear(gates))


def in_blocks(module: BlockExperts, activation: str) -> Mlp:
    gate, up, down = (Linear(each.blocks, each.bias) for each in (module.gate, module.up, module.down))
    return Mlp(up, down, activation, gate)


def layer(module: Any, mlp: dict[str, Any], attention: Any = None) -> LayerParts:
    """Return a layer with norms before attention and before the MLP or experts in `mlp`."""
    return LayerParts(
        attention or llama.attention(module.self_attn),
        before=llama.norm(module.input_layernorm),
        before_mlp=llama.norm(module.post_attention_layernorm),
        **mlp,
    )


def interleaved(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements at even and at odd places of the last dimension."""
    return weight[..., ::2], weight[..., 1::2]
