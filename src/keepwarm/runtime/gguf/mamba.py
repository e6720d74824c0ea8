"""Files with Mamba-2: what transformers calls their numbers, and how it has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS

from keepwarm.runtime.gguf.delta_nets import Processed


class Processor:
    """Changes the values of a file's tensors to those of transformers. Attention is as in files of Llama."""

    def __init__(self, config: dict[str, Any]) -> None:
        llama: Any = TENSOR_PROCESSORS["llama"]
        self._llama = llama(config=config)

    def process(self, weights: npt.NDArray[Any], name: str) -> Any:
        own = name.removesuffix(".weight").rpartition(".")[2]
        if own == "ssm_a":
            if not (weights < 0).all():
                raise ValueError(f"{name} has values that are not below zero: states would grow without end")
            return Processed(np.log(-weights.reshape(-1)))
        if own in ("ssm_d", "ssm_norm"):
            return Processed(weights.reshape(-1))
        if own == "ssm_conv1d":
            return Processed(weights[:, None])
        return self._llama.process(weights=weights, name=name)
