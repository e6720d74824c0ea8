"""Mixtral, the Qwen models with experts, and GLM 4 with experts. Some layers of these have no experts, and Qwen 2 and
GLM 4 have a shared one."""

from __future__ import annotations

from typing import Any

from keepwarm.runtime.native.description import Description
from keepwarm.runtime.native.families import experts, llama


def describe(model: Any) -> Description:
    return llama.described(
        model, tuple(experts.layer(layer, experts.parts_of(layer.mlp)) for layer in model.model.layers)
    )
