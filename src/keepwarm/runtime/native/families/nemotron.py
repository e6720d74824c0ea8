"""Nemotron and Minitron: layer norms that add one to their weight, and MLPs without a gate."""

from __future__ import annotations

from typing import Any

from keepwarm.runtime.native.description import Description
from keepwarm.runtime.native.families import llama


def describe(model: Any) -> Description:
    norm = llama.norm(model.model.norm, 1)
    return llama.described(model, llama.layers_of(model, more=1), norm=norm, centred=True)


def describe_jais(model: Any) -> Description:
    """Describe Jais 2, whose layer norms are torch's."""
    return llama.described(model, llama.layers_of(model), centred=True)
