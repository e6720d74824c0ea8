"""The parts of a model's layers that the lean decoder's kernels know. `families` reads them from loaded modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from keepwarm.runtime.native.blocks import Blocks

ACTIVATIONS = {  # names in transformers, in the order of `Activation` in model.h
    "silu": 0,
    "swish": 0,
    "gelu_pytorch_tanh": 1,
    "gelu_new": 1,
    "gelu": 2,
    "relu": 3,
    "relu2": 4,
}

Table = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # positions [n] -> cosines, sines [n, dims / 2]


class NotCovered(Exception):
    """The kernels lack something that a model needs. The message names it."""


@dataclass(frozen=True)
class Norm:
    """A normed row is multiplied by `weight`, then `bias` is added: float32 `[width]`."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Linear:
    """A product with `weight`, `[out, in]`, and a bias `[out]`."""

    weight: torch.Tensor | Blocks
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Attention:
    """`q_norm` and `k_norm` are one head's, or all heads' where `Description.wide_norms` says so. `table` is the rotary
    embedding's number in `Description.tables`; None: the layer does not rotate."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    table: int | None = 0


@dataclass(frozen=True)
class Mlp:
    """`down(act(gate(x)) * up(x))`, or without a gate `down(act(up(x)))`."""

    up: Linear
    down: Linear
    gate: Linear | None = None


@dataclass(frozen=True)
class LayerParts:
    """One layer. `before` and `before_mlp` norm what attention and the MLP read, `after` and `after_mlp` what they
    give. A norm that is None is not there."""

    attention: Attention
    mlp: Mlp
    before: Norm | None = None
    after: Norm | None = None
    before_mlp: Norm | None = None
    after_mlp: Norm | None = None

    @property
    def products(self) -> tuple[Linear, ...]:
        a, m = self.attention, self.mlp
        return (a.q, a.k, a.v, a.o, m.up, m.down, *([m.gate] if m.gate else []))


@dataclass(frozen=True)
class Description:
    """A model. All layers are of one shape.

    `scaling` is what scores are multiplied by; `rotary` the dims of a head that are rotated, halves or, `interleaved`,
    neighbours together; `centred` norms subtract the mean (layer norm). `parallel`: attention and MLP read the same
    state. `embedded`, `residual` and `logit` are the factors of embeddings, of each layer's two results, and of logits.
    `score_cap` and `logit_cap` bound scores and logits by tanh; 0 does not.
    """

    layers: tuple[LayerParts, ...]
    heads: int
    kv_heads: int
    dim: int
    activation: str
    epsilon: float
    scaling: float
    embedding: torch.Tensor | Blocks  # [vocab, hidden]
    head: torch.Tensor | Blocks  # [vocab, hidden]
    norm: Norm
    tables: tuple[Table, ...]
    rotary: int
    interleaved: bool = False
    centred: bool = False
    wide_norms: bool = False
    parallel: bool = False
    embedded: float = 1.0
    residual: float = 1.0
    logit: float = 1.0
    score_cap: float = 0.0
    logit_cap: float = 0.0

    @property
    def facts(self) -> list[object]:
        """Everything that the model's code adds to weights and tables."""
        return [
            self.activation,
            self.epsilon,
            self.scaling,
            self.rotary,
            self.interleaved,
            self.centred,
            self.wide_norms,
            self.parallel,
            self.embedded,
            self.residual,
            self.logit,
            self.score_cap,
            self.logit_cap,
            [layer.attention.table for layer in self.layers],
        ]
