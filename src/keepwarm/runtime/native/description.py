"""Describes a model's layers in the terms of the lean decoder's kernels. `families` reads this from loaded modules."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from keepwarm.runtime.native.blocks import Blocks

# The numbers are those of `Activation` in model.h. Only gpt-oss has the last one.
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "relu_squared": 4, "clamped": 5}

T = TypeVar("T")
Table = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # positions [n] -> cosines, sines [n, dims / 2]
Factors = Callable[[torch.Tensor], torch.Tensor]  # positions [n] -> factors [n]


class NotCovered(Exception):
    """The kernels lack something that a model needs. The message names it."""


def alike(values: Collection[T], what: str) -> T:
    """Return the value that all share. Raises NotCovered if they differ: the kernels use one value for all layers."""
    found = sorted(set(values), key=str)
    if len(found) != 1:
        raise NotCovered(f"{what} that differ within the model ({', '.join(map(str, found[:3]))})")
    return found[0]


@dataclass(frozen=True)
class Norm:
    """A norm. The normed row is multiplied by `weight`, then `bias` is added; both are float32 `[width]`. `epsilon` is
    added to the mean square."""

    weight: torch.Tensor
    epsilon: float
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Order:
    """Which outputs and inputs of a module a product has, where that is not told by where its weight lies."""

    weight: torch.Tensor | Blocks  # the module's own
    outputs: torch.Tensor | None = None  # the product's outputs by their numbers in the module; None: all, in order
    inputs: torch.Tensor | None = None  # the same of its inputs


@dataclass(frozen=True)
class Linear:
    """A product with `weight`, `[out, in]`, and a bias `[out]`. `order` is set if these are not consecutive rows of a
    module's weight, in order."""

    weight: torch.Tensor | Blocks
    bias: torch.Tensor | None = None
    order: Order | None = None


@dataclass(frozen=True)
class Attention:
    """The attention of one layer. Scores are multiplied by `scaling`. `q_norm` and `k_norm` norm each head, or all
    heads at once with `Description.wide_norms`. `table` is the number of the rotary embedding in `Description.tables`;
    with None the layer does not rotate. `sinks` are scores, `[heads]`, of a position that has no value. `shape` has the
    layer's heads of keys and the width of a head, where these are not the model's. A layer with a number in `shares`
    reads keys and values of that layer, whose `k` and `v` it names."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    scaling: float
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    table: int | None = 0
    sinks: torch.Tensor | None = None
    gate: Linear | None = None  # results are multiplied by its sigmoid, `[heads * dim, hidden]`
    shape: tuple[int, int] | None = None
    shares: int | None = None
    v_norm: Norm | None = None  # of each head

    @property
    def reads(self) -> tuple[Linear, ...]:
        """The first products, one under the other."""
        return (self.q, self.k, self.v) if self.shares is None else (self.q,)

    @property
    def products(self) -> tuple[Linear, ...]:
        return (*self.reads, self.o, *([self.gate] if self.gate else []))


@dataclass(frozen=True)
class Convolution:
    """A short convolution of one layer, in place of attention. `read` gives a gate of the input, a gate of the result,
    and a value, `[3 * hidden, hidden]`. The input of a channel is its gate times its value. `weight`, `[hidden,
    kernel]`, weighs the last inputs of each, the oldest first. `bias` is `[hidden]`. `o` takes the gated results."""

    read: Linear
    weight: torch.Tensor
    o: Linear
    bias: torch.Tensor | None = None

    @property
    def reads(self) -> tuple[Linear, ...]:
        return (self.read,)

    @property
    def products(self) -> tuple[Linear, ...]:
        return self.read, self.o

    @property
    def state(self) -> int:
        """How many numbers it keeps of a sequence: the inputs that the next row reads, too."""
        channels, kernel = self.weight.shape
        return int(channels * (kernel - 1))


@dataclass(frozen=True, kw_only=True)
class _Matrices:
    """A layer whose heads keep a matrix each of a sequence, in place of attention. `reads` give queries and keys of
    `key_heads` heads, values of `heads` heads, a gate of the results, and rates of each head. A short convolution,
    `weight`, `[channels, kernel]`, runs over queries, keys and values, and then SiLU. A head's matrix is multiplied by
    `exp(decay * softplus(rate + step))` in every row. `o` takes the results."""

    reads: tuple[Linear, ...]
    weight: torch.Tensor
    decay: torch.Tensor  # [heads], float32
    step: torch.Tensor  # [heads]
    norm: Norm
    o: Linear
    key_heads: int
    key_dim: int
    bias: torch.Tensor | None = None

    @property
    def products(self) -> tuple[Linear, ...]:
        return (*self.reads, self.o)

    @property
    def heads(self) -> int:
        return len(self.decay)

    @property
    def dim(self) -> int:
        return self.o.weight.shape[-1] // self.heads

    @property
    def state(self) -> int:
        """How many numbers it keeps of a sequence."""
        channels, kernel = self.weight.shape
        return int(channels * (kernel - 1)) + self.heads * self.key_dim * self.dim


@dataclass(frozen=True, kw_only=True)
class DeltaNet(_Matrices):
    """A gated delta net (arXiv:2412.06464). Heads have two rates each: of their steps, and of their decay. Results are
    normed by head, `norm` is `[dim]`, and then gated by SiLU. Heads of values that share a head of keys lie side by
    side, or `key_heads` apart if `tiled`."""

    tiled: bool = False


@dataclass(frozen=True, kw_only=True)
class StateSpace(_Matrices):
    """Mamba-2 (arXiv:2405.21060), whose C, B and x are called queries, keys and values here. A head's rate gives its
    decay and its step. Values times `skip`, `[heads]`, are added to the results. These are gated by SiLU and then
    normed, heads that share a head of keys together; `norm` is `[heads * dim]`."""

    skip: torch.Tensor


Recurrent = Convolution | DeltaNet | StateSpace
Mixer = Attention | Recurrent


@dataclass(frozen=True)
class Mlp:
    """An MLP. It computes `down(act(gate(x)) * up(x))`, or without a gate `down(act(up(x)))`."""

    up: Linear
    down: Linear
    activation: str  # a key of ACTIVATIONS, or the name of what the kernels lack
    gate: Linear | None = None


@dataclass(frozen=True)
class Sigmoid:
    """How a router makes shares of scores if not by softmax: by their sigmoid. `correction`, `[experts]`, float32, is
    added to the sigmoids for the choice alone. The shares are divided by their sum and `least`, unless that is None,
    and then multiplied by `factor`."""

    correction: torch.Tensor | None
    least: float | None
    factor: float


class ExpertNorms(NamedTuple):
    """Norms of experts beside an MLP (Gemma 4): of the row for the router and for the experts, of the experts' results,
    and of the MLP's. What is added to the row has the layer's `after_mlp`."""

    scored: Norm
    before: Norm
    after: Norm
    after_own: Norm


@dataclass(frozen=True)
class Experts:
    """Gated MLPs. Each row uses the `chosen` ones with the highest scores; of equal scores, the first.

    Weights of `all` are `[experts, out, in]`, biases `[experts, out]`. `router` gives the scores, `[experts]`. Each
    result is multiplied by its share and added. The shares are a softmax over the chosen scores, or over all scores
    with `over_all`, or made by `sigmoid`. The layer's own MLP is multiplied by a factor: the sigmoid of the product of
    `gate`, `[1, hidden]`, and the row. Without a gate it is added as it is. Shares are multiplied by `scale`,
    `[experts]`. With `norms`, experts and the layer's own MLP have norms of their own.
    """

    router: Linear
    all: Mlp
    chosen: int
    over_all: bool = False
    gate: torch.Tensor | None = None
    sigmoid: Sigmoid | None = None
    scale: torch.Tensor | None = None
    norms: ExpertNorms | None = None


@dataclass(frozen=True)
class PerLayer:
    """What a layer adds to a row from a vector that the row's token has for it: `after(up(act(gate(x)) * vector))`."""

    gate: Linear
    up: Linear
    after: Norm


@dataclass(frozen=True)
class PerLayerEmbeddings:
    """A token's vectors for the layers (Gemma 4). `table`, `[vocab, layers * width]`, times `looked_up` has a part.
    The other is `projection` of the token's embedding, times `projected`, normed layer by layer. Both are added, and
    multiplied by `summed`."""

    table: torch.Tensor | Blocks
    projection: Linear
    norm: Norm
    looked_up: float
    projected: float
    summed: float

    @property
    def width(self) -> int:
        return len(self.norm.weight)


@dataclass(frozen=True)
class LayerParts:
    """One layer. `mixer` is its first part: attention, or one with a state. `before` and `before_mlp`
    norm the inputs of that part and of the MLP; `after` and `after_mlp` norm their results. The model lacks a norm that
    is None. With `experts`, every row uses `mlp`, too, unless it is None. Behind all parts a row is multiplied by
    `factor`."""

    mixer: Mixer
    mlp: Mlp | None
    experts: Experts | None = None
    before: Norm | None = None
    after: Norm | None = None
    before_mlp: Norm | None = None
    after_mlp: Norm | None = None
    per_layer: PerLayer | None = None
    factor: float = 1.0

    @property
    def attention(self) -> Attention | None:
        return self.mixer if isinstance(self.mixer, Attention) else None

    @property
    def recurrent(self) -> Recurrent | None:
        return None if isinstance(self.mixer, Attention) else self.mixer

    @property
    def own_norms(self) -> tuple[Norm | None, ...]:
        """The norms around the layer's two parts."""
        return self.before, self.after, self.before_mlp, self.after_mlp

    @property
    def norms(self) -> tuple[Norm | None, ...]:
        """The layer's own norms, then those of queries, keys and values."""
        attention = self.attention
        return (*self.own_norms, *((attention.q_norm, attention.k_norm, attention.v_norm) if attention else ()))

    @property
    def products(self) -> tuple[Linear, ...]:
        """All weights that rows are multiplied with, those of experts included."""
        e, more = self.experts, self.per_layer
        mlps = [each for each in (self.mlp, e and e.all) if each]
        ours = [each for mlp in mlps for each in (mlp.up, mlp.down, mlp.gate) if each]
        return (*self.mixer.products, *ours, *([e.router] if e else []), *([more.gate, more.up] if more else []))


@dataclass(frozen=True)
class Description:
    """A model. All layers have one shape, but some may have experts, or attention of another shape.

    `windows` has each layer's window as the model's code masks it; with None a row attends to all positions.
    `rotary` is how many dims of a head are rotated; `rotaries` tells it for each of `tables`, where they differ. A dim
    is paired with one of the other half, or with its neighbour if `interleaved`. A row's queries are multiplied by what
    `factors` has for its position. `centred` norms subtract the mean (layer norm). With `parallel`, attention and MLP
    read the same state. `embedded`, `residual` and `logit` are the factors of embeddings, of each layer's two results,
    and of logits. tanh bounds scores and logits by `score_cap` and `logit_cap`, unless they are 0. `alpha` and `limit`
    belong to the activation "clamped": `(min(max(up, -limit), limit) + 1) gate sigmoid(alpha gate)`, with a gate of at
    most `limit`.
    """

    layers: tuple[LayerParts, ...]
    heads: int
    kv_heads: int
    dim: int
    embedding: torch.Tensor | Blocks  # [vocab, hidden]
    head: torch.Tensor | Blocks  # [vocab, hidden]
    norm: Norm
    tables: tuple[Table, ...]
    rotary: int
    factors: Factors | None = None
    interleaved: bool = False
    centred: bool = False
    wide_norms: bool = False
    parallel: bool = False
    embedded: float = 1.0
    residual: float = 1.0
    logit: float = 1.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    alpha: float = 0.0
    limit: float = 0.0
    windows: tuple[int | None, ...] = ()
    rotaries: tuple[int, ...] = ()
    per_layer: PerLayerEmbeddings | None = None

    @property
    def keeping(self) -> list[int]:
        """The layers that keep keys and values, by number: those with attention, but for those that share others'."""
        return [at for at, layer in enumerate(self.layers) if layer.attention and layer.attention.shares is None]

    @property
    def attended(self) -> list[int | None]:
        """The windows of the layers that keep keys and values."""
        return [self.windows[at] for at in self.keeping]

    def shape(self, attention: Attention) -> tuple[int, int]:
        """Return the heads of keys of one of its layers, and the width of a head."""
        return attention.shape or (self.kv_heads, self.dim)

    @property
    def rotated(self) -> tuple[int, ...]:
        """How many dims of a head each table rotates."""
        return self.rotaries or (self.rotary,) * len(self.tables)

    @property
    def attentions(self) -> list[Attention]:
        return [layer.attention for layer in self.layers if layer.attention is not None]

    @property
    def recurrent(self) -> list[Recurrent]:
        return [layer.recurrent for layer in self.layers if layer.recurrent is not None]

    @property
    def mlps(self) -> list[Mlp]:
        """The MLPs that every row uses."""
        return [layer.mlp for layer in self.layers if layer.mlp is not None]

    @property
    def experts(self) -> list[Experts]:
        return [layer.experts for layer in self.layers if layer.experts is not None]

    @property
    def activation(self) -> str:
        """A key of ACTIVATIONS, or the name of what the kernels lack. Raises NotCovered if layers differ."""
        every = [*self.mlps, *(experts.all for experts in self.experts)]
        return alike([mlp.activation for mlp in every], "activations")

    @property
    def epsilon(self) -> float:
        """The number that every norm adds to the mean square. Raises NotCovered if norms differ."""
        norms = [norm for layer in self.layers for norm in layer.norms]
        norms += [each.norm for each in self.recurrent if not isinstance(each, Convolution)]
        norms += [norm for experts in self.experts for norm in experts.norms or ()]
        norms += [layer.per_layer.after for layer in self.layers if layer.per_layer]
        norms += [self.per_layer.norm] if self.per_layer else []
        return alike([norm.epsilon for norm in [*norms, self.norm] if norm], "epsilons of norms")

    @property
    def scaling(self) -> float:
        """The factor of scores. Raises NotCovered if layers differ."""
        return alike([attention.scaling for attention in self.attentions], "factors of scores")
