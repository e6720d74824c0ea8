"""Granite: Llama with factors of embeddings, of each layer's results, and of logits; some have experts, and some of
these a shared one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from keepwarm.runtime.native.description import Description, Mlp
from keepwarm.runtime.native.families import experts, llama


def describe(model: Any) -> Description:
    return _with_factors(model, llama.describe(model))


def describe_experts(model: Any) -> Description:
    layers = tuple(experts.layer(layer, _mlp(layer)) for layer in model.model.layers)
    return _with_factors(model, llama.described(model, layers))


def _with_factors(model: Any, found: Description) -> Description:
    config = model.config
    return replace(
        found,
        embedded=config.embedding_multiplier,
        residual=config.residual_multiplier,
        logit=1 / config.logits_scaling,
    )


def _mlp(layer: Any) -> dict[str, Any]:
    found = experts.parts_of(layer.block_sparse_moe, layer.block_sparse_moe.router)
    if (shared := getattr(layer, "shared_mlp", None)) is not None:
        gate, up = llama.split(shared.input_linear, shared.hidden_size, shared.hidden_size)
        found["mlp"] = Mlp(up, llama.linear(shared.output_linear), gate)
    return found
