"""Ministral 3: Llama whose queries grow with their position, as Llama 4's do."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from keepwarm.runtime.native.description import Description
from keepwarm.runtime.native.families import llama


def describe(model: Any) -> Description:
    rope = model.config.rope_parameters
    growth, length = rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"]
    return replace(llama.describe(model), factors=partial(_factors, float(growth), int(length)))


def _factors(growth: float, length: int, positions: torch.Tensor) -> torch.Tensor:
    """Return one for the first `length` positions, and more by the logarithm of how many such lengths came before."""
    return 1 + growth * torch.log(1 + torch.div(positions, length, rounding_mode="floor").float())
