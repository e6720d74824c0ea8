"""Experts whose weights keep the blocks of their file (`blocks`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from keepwarm.runtime.native.blocks import BlockLinear, Blocks, Source


class OfExperts(Blocks, ABC):
    """The weights of all experts."""

    @property
    @abstractmethod
    def each(self) -> Sequence[Blocks]:
        """Each expert's weight, by its number."""

    @property
    def source(self) -> Source:
        raise TypeError("experts have a weight each")

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self), len(self.each[0]), self.columns

    @property
    def is_whole(self) -> bool:
        return all(each.is_whole for each in self.each)


@dataclass(frozen=True)
class Stacked(OfExperts):
    """`raw` is uint8 `[experts, out, bytes of a row]`, and whole rows of one expert lie one behind the other."""

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.raw.shape[:2], self.columns

    def of(self, expert: int) -> Blocks:
        return Blocks(self.raw[expert], self.kind, self.columns)

    @property
    def each(self) -> Sequence[Blocks]:
        return [self.of(expert) for expert in range(len(self.raw))]

    @property
    def is_whole(self) -> bool:
        return self.raw.dim() == 3 and super().is_whole


@dataclass(frozen=True)
class Several(OfExperts):
    """A weight of its own for each expert, `[out, in]`, all of one shape. `raw` is the first one's."""

    weights: tuple[Blocks, ...]

    @classmethod
    def of(cls, weights: Sequence[Blocks]) -> Several:
        return cls(weights[0].raw, weights[0].kind, weights[0].columns, tuple(weights))

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def each(self) -> Sequence[Blocks]:
        return self.weights

    @property
    def is_whole(self) -> bool:
        shapes = {(len(each), each.columns) for each in self.weights}
        return len(shapes) == 1 and super().is_whole


@dataclass(frozen=True)
class Stack:
    """One product of all experts. `bias`: float32 `[experts, out]`."""

    weight: OfExperts
    bias: torch.Tensor | None = None

    @property
    def module(self) -> BlockStack | LinearStack:
        """The product as a module. Raises ValueError for biases of weights that lie apart."""
        if isinstance(self.weight, Stacked):
            return BlockStack(self.weight, self.bias)
        if self.bias is not None:
            raise ValueError("biases of experts whose weights lie apart")
        return LinearStack(self.weight)


class BlockStack(nn.Module):
    """A product of all experts, in float32, from the file's own bytes."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: Stacked, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.kind, self.columns = weight.kind, weight.columns
        self.register_buffer("weight", weight.raw)
        self.register_buffer("bias", bias)

    @property
    def blocks(self) -> Stacked:
        return Stacked(self.weight, self.kind, self.columns)

    def product(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        made = self.blocks.of(expert).product(x)
        return made if self.bias is None else made + self.bias[expert]


class LinearStack(nn.ModuleList):
    """A product of all experts, each with a weight of its own."""

    bias = None

    def __init__(self, weight: OfExperts) -> None:
        super().__init__(each.linear(None) for each in weight.each)

    @property
    def blocks(self) -> Several:
        return Several.of([cast("BlockLinear", each).blocks for each in self])

    def product(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self[expert](x))


class BlockExperts(nn.Module):
    """A layer's experts, in place of a module of transformers, which gives the activation."""

    def __init__(self, gate: Stack, up: Stack, down: Stack, like: Any) -> None:
        super().__init__()
        self.gate, self.up, self.down = (each.module for each in (gate, up, down))
        self.act_fn: Callable[[torch.Tensor], torch.Tensor] | None = getattr(like, "act_fn", None)
        if self.act_fn is None:  # gpt-oss
            self.alpha, self.limit = float(like.alpha), float(like.limit)

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return the sums `[rows, hidden]` of the experts `chosen` `[rows, n]`, multiplied by `shares` `[rows, n]`."""
        made = torch.zeros_like(hidden, dtype=torch.float32)
        for expert in chosen.unique().tolist():
            rows, rank = torch.where(chosen == expert)
            x = hidden[rows].float()
            inner = self._gated(self.gate.product(expert, x), self.up.product(expert, x))
            made.index_add_(0, rows, self.down.product(expert, inner) * shares[rows, rank, None].float())
        return made.to(hidden.dtype)

    def _gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.act_fn is not None:
            return self.act_fn(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)
