"""A tiny random-weight model of every causal language model of the installed transformers."""

from __future__ import annotations

from typing import Any

import torch
from tests.helpers.every_config import configuration
from transformers import AutoModelForCausalLM


def make(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """A model of a type in float32 on the CPU, the same for the same seed. `changes` are of its text configuration.

    Raises ValueError, which says why, for a type of which no model can be built.
    """
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        config = configuration(model_type, **changes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _spread(model)
    finally:
        torch.random.set_rng_state(state)
    return model.eval()


def _spread(model: Any) -> None:
    """Weights larger than the usual start, so that context matters; states that last for tens of tokens."""
    tied = set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if id(parameter) in tied or not parameter.is_floating_point():
                continue
            tied.add(id(parameter))
            last = name.rsplit(".", 1)[-1].lower()
            if last == "a_log":  # a state keeps most of itself at each step
                parameter.uniform_(-3.0, -0.5)
            elif last in ("dt_bias", "time_step_bias"):
                parameter.uniform_(-2.0, 0.0)
            elif parameter.dim() > 1:
                parameter.normal_(std=0.2)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
