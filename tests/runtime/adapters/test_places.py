"""Which module a layer's weight is of, wherever weights lie in memory."""

from __future__ import annotations

import torch
from tests.helpers.models import tiny

from keepwarm.runtime.native.families import described
from keepwarm.runtime.native.low_rank import Places


def test_modules_that_lie_behind_one_another_are_told_apart() -> None:
    """As in a file that is mapped into memory. `down` begins where `up` ends, and its rows are longer."""
    model = tiny("llama", hidden_size=64, intermediate_size=256)
    mlp = model.model.layers[0].mlp
    held = torch.zeros(2, 64 * 256)
    mlp.up_proj.weight = torch.nn.Parameter(held[0].view(256, 64), requires_grad=False)
    mlp.down_proj.weight = torch.nn.Parameter(held[1].view(64, 256), requires_grad=False)
    found = Places(model, described(model)).layers[0]
    assert found["up"][0].module == "model.layers.0.mlp.up_proj"
    assert found["last"][0].module == "model.layers.0.mlp.down_proj"
