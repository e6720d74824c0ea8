"""Qwen3.5's files: they have the heads of values in another order than transformers, and other numbers for decays.

Heads of values that share a head of keys lie side by side in transformers. In a file they lie as many heads apart as
there are heads of keys. Matrices stay as the file has them (`BlockLinear`); floats get transformers' order.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel


class Processed(NamedTuple):
    """A tensor's values, as transformers' own classes for this return them."""

    weights: npt.NDArray[Any]


def _grouped(config: Any, width: int, first: int = 0) -> torch.Tensor:
    """Return where the file has the numbers of transformers' order: `first` ones alike, then those of the heads of
    values, `width` each."""
    keys, each = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    heads = torch.arange(keys * each * width).reshape(each, keys, width).transpose(0, 1).reshape(-1)
    return torch.cat([torch.arange(first), first + heads])


class Processor:
    """Changes the values of a file's tensors to those of transformers."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = SimpleNamespace(**config)

    def process(self, weights: npt.NDArray[Any], name: str) -> Processed:
        config, own = self._config, name.removesuffix(".weight").rpartition("blk.")[2].partition(".")[2]
        if name.endswith("norm.weight") and own != "ssm_norm":
            weights = weights - np.float32(1)
        elif own == "ssm_a":
            weights = np.log(-weights)[_grouped(config, 1).numpy()]
        elif own == "ssm_dt.bias":
            weights = weights[_grouped(config, 1).numpy()]
        elif own == "ssm_conv1d":
            order = _grouped(config, config.linear_value_head_dim, _channels_of_keys(config))
            weights = weights.reshape(len(order), -1)[order.numpy()][:, None]
        elif own == "ffn_gate_inp_shexp":
            weights = weights.reshape(1, -1)
        return Processed(weights)


def _channels_of_keys(config: Any) -> int:
    return int(2 * config.linear_key_head_dim * config.linear_num_key_heads)


def order_heads(model: PreTrainedModel) -> None:
    """Tell a model's products over heads of values in which order the file has them."""
    config, width = model.config, model.config.linear_value_head_dim
    for name, module in model.named_modules():
        if name.endswith(".linear_attn"):
            net: Any = module
            net.in_proj_qkv.outputs = _grouped(config, width, _channels_of_keys(config))
            net.in_proj_z.outputs = _grouped(config, width)
            net.in_proj_a.outputs, net.in_proj_b.outputs = _grouped(config, 1), _grouped(config, 1)
            net.out_proj.inputs = _grouped(config, width).argsort()
