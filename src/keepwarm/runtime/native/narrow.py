"""Modules over weights in bfloat16 that compute in float32, as modules do whose weights were widened to float32.

The kernels pack the same weights. After that these modules only serve to compare the kernels with. So the weights may
stay parts of a map of their file, and need no memory of their own.
"""

from __future__ import annotations

import torch
from torch import nn

_WIDENED = 1 << 20  # numbers of a weight that are floats at once; they stay in a processor's own cache


class NarrowLinear(nn.Module):
    """`nn.Linear`, in float32, over a weight in bfloat16 `[out, in]`."""

    weight: torch.Tensor
    bias: nn.Parameter | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`bias`: float32 `[out]`."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight)  # the model's dtype is that of its parameters
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = _product(x, self.weight)
        return made if self.bias is None else made + self.bias


class NarrowEmbedding(nn.Module):
    """`nn.Embedding`, in float32, over a table in bfloat16. Some models multiply embeddings by `scale`."""

    weight: torch.Tensor
    embed_scale: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
        super().__init__()
        self.embedding_dim, self.scale_dtype = weight.shape[1], torch.float32
        self.register_buffer("weight", weight)
        self.register_buffer("embed_scale", scale, persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made = nn.functional.embedding(ids, self.weight).float()
        return made if self.embed_scale is None else made * self.embed_scale


class TiedHead(nn.Module):
    """A head over the table of embeddings, which it has no part of."""

    bias: nn.Parameter | None = None

    def __init__(self, embedding: NarrowEmbedding) -> None:
        super().__init__()
        self.__dict__["embedding"] = embedding  # no submodule, so that the table counts once
        self.out_features, self.in_features = embedding.weight.shape

    @property
    def weight(self) -> torch.Tensor:
        table: torch.Tensor = self.__dict__["embedding"].weight
        return table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _product(x, self.weight)


def narrow_tensors(model: nn.Module) -> frozenset[str]:
    """Return the names of a model's weights that count as float32 and are kept in bfloat16."""
    kinds = NarrowLinear | NarrowEmbedding
    return frozenset(f"{name}.weight" for name, module in model.named_modules() if isinstance(module, kinds))


def widened(model: nn.Module) -> None:
    """Replace the linear layers of a copy of a model by torch's own, in float32, to time it as transformers runs it."""
    for name, module in [*model.named_modules()]:
        if isinstance(module, NarrowLinear | TiedHead):
            made = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            made.weight = nn.Parameter(module.weight.float(), requires_grad=False)
            made.register_parameter("bias", module.bias)
            model.set_submodule(name, made)


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the product with a weight in bfloat16 `[out, in]`, in float32. It is widened by parts."""
    rows = max(1, _WIDENED // weight.shape[1])
    return torch.cat([nn.functional.linear(x, part.float()) for part in weight.split(rows)], dim=-1)
