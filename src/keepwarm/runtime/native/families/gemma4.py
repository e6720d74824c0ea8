"""Gemma 4: full layers have wider heads than those with a window, values are normed, and later layers
may read the keys and values of earlier ones. Each layer may add something from vectors that a token has for it, and its
result is multiplied by a number. Experts stand beside an MLP, with norms of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from keepwarm.runtime.native.description import (
    Attention,
    Description,
    ExpertNorms,
    Experts,
    LayerParts,
    Norm,
    PerLayer,
    PerLayerEmbeddings,
    alike,
)
from keepwarm.runtime.native.families import experts, llama


def describe(model: Any) -> Description:
    body, config = model.model, model.config
    tables, numbers = llama.tables_of(model)
    attentions: list[Attention] = []
    keeping: dict[str, int] = {}  # the last layer of each type that keeps keys and values
    for number, (layer, table) in enumerate(zip(body.layers, numbers, strict=True)):
        module, kind = layer.self_attn, config.layer_types[number]
        if module.is_kv_shared_layer:
            attentions.append(_sharing(module, table, attentions[keeping[kind]], keeping[kind]))
        else:
            attentions.append(_attention(module, table))
            keeping[kind] = number
    kv_heads, dim = _shape(body.layers[0].self_attn)
    return llama.described(
        model,
        tuple(map(_layer, body.layers, attentions)),
        kv_heads=kv_heads,
        dim=dim,
        tables=tables,
        rotaries=tuple(2 * make(torch.zeros(1, dtype=torch.long))[0].shape[-1] for make in tables),
        embedded=_scale(body.embed_tokens),
        logit_cap=config.final_logit_softcapping or 0.0,
        per_layer=_embeddings(body) if getattr(body, "hidden_size_per_layer_input", 0) else None,
    )


def _attention(module: Any, table: int) -> Attention:
    q, k, o = map(llama.linear, (module.q_proj, module.k_proj, module.o_proj))
    return Attention(
        q,
        k,
        k if module.v_proj is None else llama.linear(module.v_proj),
        o,
        module.scaling,
        llama.norm(module.q_norm),
        llama.norm(module.k_norm),
        table,
        shape=_shape(module),
        v_norm=Norm(torch.ones(module.head_dim, dtype=torch.float32), module.v_norm.eps),
    )


def _sharing(module: Any, table: int, source: Attention, number: int) -> Attention:
    """Return the parts of an attention module that reads the keys and values of `source`, in the layer `number`."""
    q, o = map(llama.linear, (module.q_proj, module.o_proj))
    own = {"q": q, "o": o, "scaling": module.scaling, "q_norm": llama.norm(module.q_norm), "table": table}
    return replace(source, **own, shape=_shape(module), shares=number)


def _shape(module: Any) -> tuple[int, int]:
    """Return a module's heads of keys, and the width of a head."""
    return module.config.num_attention_heads // module.num_key_value_groups, module.head_dim


def _layer(layer: Any, attention: Attention) -> LayerParts:
    per_layer = None
    if getattr(layer, "hidden_size_per_layer_input", 0):
        gate, up = llama.linear(layer.per_layer_input_gate), llama.linear(layer.per_layer_projection)
        after = llama.norm(layer.post_per_layer_input_norm)
        mlp, own = llama.activation(layer.mlp.act_fn), llama.activation(layer.act_fn)
        alike([mlp, own], "activations")
        per_layer = PerLayer(gate, up, after) if after else None
    has_experts = getattr(layer, "enable_moe_block", False)
    return LayerParts(
        attention,
        llama.mlp(layer.mlp),
        _experts(layer) if has_experts else None,
        before=llama.norm(layer.input_layernorm),
        after=llama.norm(layer.post_attention_layernorm),
        before_mlp=llama.norm(layer.pre_feedforward_layernorm),
        after_mlp=llama.norm(layer.post_feedforward_layernorm),
        per_layer=per_layer,
        factor=float(layer.layer_scalar),
    )


def _experts(layer: Any) -> Experts:
    """Return experts, whose router norms a row by itself, and multiplies it by numbers of its own and a factor."""
    router = layer.router
    norms = [
        Norm(llama.exact(router, "scale").float() * router.scalar_root_size, router.eps),
        llama.norm(layer.pre_feedforward_layernorm_2),
        llama.norm(layer.post_feedforward_layernorm_2),
        llama.norm(layer.post_feedforward_layernorm_1),
    ]
    return Experts(
        router=experts.routing(router.proj),
        all=experts.gated(layer.experts),
        chosen=layer.config.top_k_experts,
        scale=llama.exact(router, "per_expert_scale").float(),
        norms=ExpertNorms(*(each for each in norms if each is not None)),
    )


def _embeddings(body: Any) -> PerLayerEmbeddings:
    norm = llama.norm(body.per_layer_projection_norm)
    assert norm is not None
    return PerLayerEmbeddings(
        table=llama.weight(body.embed_tokens_per_layer),
        projection=llama.linear(body.per_layer_model_projection),
        norm=norm,
        looked_up=_scale(body.embed_tokens_per_layer),
        projected=float(body.per_layer_model_projection_scale),
        summed=float(body.per_layer_input_scale),
    )


def _scale(embeddings: Any) -> float:
    return float(embeddings.embed_scale.to(getattr(embeddings, "scale_dtype", embeddings.weight.dtype)))
