"""Granite: Llama with factors of embeddings, of each layer's results, and of logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from keepwarm.runtime.native.description import Description
from keepwarm.runtime.native.families import llama


def describe(model: Any) -> Description:
    config = model.config
    return replace(
        llama.describe(model),
        embedded=config.embedding_multiplier,
        residual=config.residual_multiplier,
        logit=1 / config.logits_scaling,
    )
