"""Granite: Llama with factors of embeddings, of each layer's results, and of logits. Some have experts, and some of
these have a shared one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from keepwarm.runtime.native.description import Description, Mlp, alike
from keepwarm.runtime.native.families import experts, llama


def describe(model: Any) -> Description:
    return _with_factors(model, llama.describe(model))


def describe_experts(model: Any) -> Description:
    layers = tuple(experts.layer(layer, _mlp(layer)) for layer in model.model.layers)
    return _with_factors(model, llama.described(model, layers))


def _with_factors(model: Any, found: Description) -> Description:
    return replace(
        found,
        embedded=model.model.embedding_multiplier,
        residual=alike([layer.residual_multiplier for layer in model.model.layers], "factors of layers' results"),
        logit=1 / model.config.logits_scaling,
    )


def _mlp(layer: Any) -> dict[str, Any]:
    found = experts.parts_of(layer.block_sparse_moe, layer.block_sparse_moe.router)
    if (shared := getattr(layer, "shared_mlp", None)) is not None:
        gate, up = llama.split(shared.input_linear)
        found["mlp"] = Mlp(up, llama.linear(shared.output_linear), llama.activation(shared.activation), gate)
    return found
