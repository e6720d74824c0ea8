"""Gemma 1, 2 and 3, and VaultGemma: norms add one to their weight, and stand around attention and MLP, or before them.
Embeddings are scaled. Gemma 2 and VaultGemma cap scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from keepwarm.runtime.native.description import Description, LayerParts, alike
from keepwarm.runtime.native.families import llama


def describe_vault(model: Any) -> Description:
    """Describe VaultGemma, which is Gemma 2 without the norms after attention and MLP."""
    layers = llama.layers_of(model, more=1, before_mlp="pre_feedforward_layernorm")
    return _capped(model, _described(model, layers, logit_cap=model.config.final_logit_softcapping or 0.0))


def describe_second(model: Any) -> Description:
    return _capped(model, describe(model))


def _capped(model: Any, found: Description) -> Description:
    caps = [layer.self_attn.attn_logit_softcapping or 0.0 for layer in model.model.layers]
    return replace(found, score_cap=alike(caps, "bounds of scores"))


def describe(model: Any) -> Description:
    """Describe Gemma 3. Its attention module has a cap of scores, but its forward pass does not apply it."""
    body, config = model.model, model.config
    tables, numbers = llama.tables_of(model)
    layers = tuple(
        LayerParts(
            llama.attention(layer.self_attn, table=number, more=1),
            llama.mlp(layer.mlp),
            before=llama.norm(layer.input_layernorm, 1),
            after=llama.norm(layer.post_attention_layernorm, 1),
            before_mlp=llama.norm(layer.pre_feedforward_layernorm, 1),
            after_mlp=llama.norm(layer.post_feedforward_layernorm, 1),
        )
        for layer, number in zip(body.layers, numbers, strict=True)
    )
    return _described(model, layers, tables=tables, logit_cap=config.final_logit_softcapping or 0.0)


def describe_first(model: Any) -> Description:
    """Describe the first Gemma. It has norms only before attention and MLP."""
    return _described(model, llama.layers_of(model, more=1))


def _described(model: Any, layers: tuple[LayerParts, ...], **others: Any) -> Description:
    embeddings = model.model.embed_tokens
    return llama.described(
        model,
        layers,
        norm=llama.norm(model.model.norm, 1),
        embedded=float(embeddings.embed_scale.to(getattr(embeddings, "scale_dtype", embeddings.weight.dtype))),
        **others,
    )
