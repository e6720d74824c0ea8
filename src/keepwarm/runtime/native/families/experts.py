"""Describes experts and their router. transformers keeps them alike in most families."""

from __future__ import annotations

from typing import Any

import torch

from keepwarm.runtime.native.description import Experts, LayerParts, Linear, Mlp, NotCovered, Sigmoid
from keepwarm.runtime.native.families import llama


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
    by_sigmoid = sigmoid(router, getattr(module, "expert_bias", None))
    found = Experts(
        router=routing(router),
        all=gated(module.experts),
        chosen=router.top_k,
        over_all=by_sigmoid is None and not getattr(router, "norm_topk_prob", True),
        gate=None if gate is None else gate.weight.detach(),
        sigmoid=by_sigmoid,
    )
    return {"mlp": None if own is None else llama.mlp(own), "experts": found}


def routing(router: Any) -> Linear:
    bias = getattr(router, "bias", None)
    return Linear(router.weight.detach(), None if bias is None else bias.detach())


_SIGMOID = {"Glm4MoeTopkRouter": 1e-20, "Lfm2MoeTopKRouter": 1e-6}  # what they add to a sum of shares, by class


def sigmoid(router: Any, beside: torch.Tensor | None) -> Sigmoid | None:
    """Return how a router makes shares by sigmoids; None if it takes a softmax. `beside` is a correction that its
    module has."""
    least = _SIGMOID.get(type(router).__name__)
    if least is None:
        return None
    if getattr(router, "num_group", 1) != 1:
        raise NotCovered("experts that are chosen by groups")
    correction = getattr(router, "e_score_correction_bias", beside)
    return Sigmoid(
        None if correction is None else correction.detach().float(),
        least if router.norm_topk_prob else None,
        float(router.routed_scaling_factor),
    )


def gated(module: Any) -> Mlp:
    """Return experts from a weight that has each one's gate and then its up, `[experts, 2 * inner, hidden]`."""
    gates, ups = module.gate_up_proj.detach().chunk(2, dim=1)
    return Mlp(Linear(ups), Linear(module.down_proj.detach()), llama.activation(module.act_fn), Linear(gates))


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
