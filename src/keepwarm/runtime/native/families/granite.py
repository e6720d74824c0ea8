"""Granite: Llama with factors of embeddings, of each layer's results, and of logits. Some have experts, and some of
these have a shared one. Granite 4 has Mamba-2 in most layers, or none, and some models rotate in no layer. Others have
windows and sinks in some layers, and a rotary embedding for each of several bases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from keepwarm.runtime.native.description import Attention, Description, Mlp, Table, alike
from keepwarm.runtime.native.families import experts, llama, mamba


def describe(model: Any) -> Description:
    return _with_factors(model, llama.describe(model))


def describe_experts(model: Any) -> Description:
    layers = tuple(experts.layer(layer, _mlp(layer)) for layer in model.model.layers)
    return _with_factors(model, llama.described(model, layers))


def describe_clova(model: Any) -> Description:
    """Describe HyperCLOVA X, which multiplies logits by its factor, and may norm the results of attention and MLP."""
    layers = tuple(
        replace(parts, after=llama.norm_if_any(layer.post_norm1), after_mlp=llama.norm_if_any(layer.post_norm2))
        for parts, layer in zip(llama.layers_of(model), model.model.layers, strict=True)
    )
    found = _with_factors(model, llama.described(model, layers))
    return replace(found, logit=float(model.config.logits_scaling))


def describe_hybrid(model: Any) -> Description:
    """Describe Granite 4."""
    body = model.model
    table = None if body.rotary_emb is None else 0
    layers = tuple(
        experts.layer(
            layer, _mlp(layer), mamba.mixer(layer.mamba) if layer.self_attn is None else _attention(layer, table)
        )
        for layer in body.layers
    )
    dims = [layer.self_attn.head_dim for layer in body.layers if layer.self_attn is not None]
    tables = () if body.rotary_emb is None else (llama.table(body.rotary_emb),)
    return _with_factors(model, llama.described(model, layers, dim=alike(dims, "head widths"), tables=tables))


def describe_windows(model: Any) -> Description:
    """Describe Granite with windows in some layers."""
    tables, numbers = _tables(model)
    layers = tuple(
        experts.layer(layer, _mlp(layer), _attention(layer, number))
        for layer, number in zip(model.model.layers, numbers, strict=True)
    )
    return _with_factors(model, llama.described(model, layers, tables=tables))


def _tables(model: Any) -> tuple[tuple[Table, ...], Sequence[int | None]]:
    """Return the rotary embeddings, one for each base, and each layer's number; None if it does not rotate."""
    every = list(model.model.rotary_embs)
    bases = [each.config.rope_parameters["rope_theta"] for each in every]
    numbers = [bases.index(base) if base else None for base in model.config.layer_rope_theta]
    return tuple(map(llama.table, every)), numbers


def _attention(layer: Any, table: int | None) -> Attention:
    sinks = getattr(layer.self_attn, "sinks", None)
    return replace(llama.attention(layer.self_attn, table=table), sinks=None if sinks is None else sinks.detach())


def _with_factors(model: Any, found: Description) -> Description:
    return replace(
        found,
        embedded=model.model.embedding_multiplier,
        residual=alike([layer.residual_multiplier for layer in model.model.layers], "factors of layers' results"),
        logit=1 / model.config.logits_scaling,
    )


def _mlp(layer: Any) -> dict[str, Any]:
    """Return a layer's experts, and the MLP beside them or in their place."""
    found: dict[str, Any] = {"mlp": llama.mlp(layer.mlp) if hasattr(layer, "mlp") else None}
    if getattr(layer, "block_sparse_moe", None) is not None:
        found = experts.parts_of(layer.block_sparse_moe, layer.block_sparse_moe.router)
    if (shared := getattr(layer, "shared_mlp", None)) is not None:
        gate, up = llama.split(shared.input_linear)
        found["mlp"] = Mlp(up, llama.linear(shared.output_linear), llama.activation(shared.activation), gate)
    return found
