"""The form of a model's prompt cache in mlx-lm: which arrays have a row per token, and which states are kept whole.

A prompt cache is a list with one object per layer, some of which hold several others. Here it is flattened to leaves.
The keys and values of a `KVCache`, plain or quantized, belong to tokens and can be cut anywhere. A window that rotates,
or a recurrent state, can only be kept as it is after the last token.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from keepwarm.core.geometry import KVGeometry, LayerGeometry
from keepwarm.errors import UnsupportedModel

BYTES = "float8_e4m3fn"  # a dtype of one byte: rows are moved unchanged, whatever they mean to MLX
_CUT = (KVCache, QuantizedKVCache)
_WHOLE = (RotatingKVCache, ArraysCache, ChunkedKVCache)
Caches = list[Any]


class Unsuitable(Exception):
    """A prompt cache that is not stored, with the reason."""


@dataclass(frozen=True)
class Plane:
    """One array with a row per token: `[1, heads, tokens, width]`, of MLX's type `dtype`."""

    heads: int
    width: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of one head's row."""
        return self.width * int(getattr(mx, self.dtype).size)


@dataclass(frozen=True)
class Leaf:
    """One cache of a layer: the name of its class, the numbers that it was made with, and its planes, keys and values
    in turn. A leaf without planes is kept whole."""

    kind: str
    settings: tuple[int, ...] = ()
    planes: tuple[Plane, ...] = ()

    @property
    def layers(self) -> list[tuple[Plane, ...]]:
        """The planes, by the store's layers: keys with values, or one alone where the two do not go together."""
        found: list[tuple[Plane, ...]] = []
        for pair in zip(self.planes[::2], self.planes[1::2], strict=True):
            there = tuple(plane for plane in pair if plane.nbytes)
            alike = len({plane.heads for plane in there}) == 1
            found += [there] if alike else [(plane,) for plane in there]
        return found


@dataclass(frozen=True)
class Form:
    """All facts of a prompt cache except its bytes."""

    leaves: tuple[Leaf, ...]

    @property
    def has_tail(self) -> bool:
        """Whether a part of it cannot be cut."""
        return any(not leaf.planes for leaf in self.leaves)

    @cached_property
    def geometry(self) -> KVGeometry:
        """The store's view: rows of bytes. If a layer has one plane only, its rows are split into two halves."""
        return KVGeometry(tuple(_geometry(layer) for leaf in self.leaves for layer in leaf.layers), BYTES)

    @property
    def dtype(self) -> str:
        """The types of keys and values, as one text."""
        return "/".join(dict.fromkeys(plane.dtype for leaf in self.leaves for plane in leaf.planes)) or "state"

    def describe(self) -> list[Any]:
        """A JSON-ready form, part of the KV's identity."""
        return [[each.kind, each.settings, [[p.heads, p.width, p.dtype] for p in each.planes]] for each in self.leaves]


def _geometry(layer: Sequence[Plane]) -> LayerGeometry:
    if len(layer) == 2:
        return LayerGeometry(layer[0].heads, layer[0].nbytes, layer[1].nbytes)
    (alone,) = layer
    return LayerGeometry(alone.heads, alone.nbytes - alone.nbytes // 2, alone.nbytes // 2)


def leaves_of(caches: Caches) -> Caches:
    """Return the caches that hold the state, in order. Raises Unsuitable for a class that is not known."""
    found: Caches = []
    for cache in caches:
        if type(cache) is CacheList:
            found += leaves_of([*cache.caches])
        elif type(cache) in (*_CUT, *_WHOLE):
            found.append(cache)
        else:
            raise Unsuitable(f"a layer keeps its state in {type(cache).__name__}, which is not known")
    return found


def arrays_of(leaf: Any) -> list[Any]:
    """Return the arrays with a row per token, keys and values in turn; none if the leaf is kept whole."""
    if type(leaf) is KVCache:
        return [leaf.keys, leaf.values]
    if type(leaf) is QuantizedKVCache:
        return [array for pair in zip(leaf.keys, leaf.values, strict=True) for array in pair]
    return []


def form_of(caches: Caches) -> Form:
    """Return the form of a prompt cache that holds one sequence. Raises Unsuitable."""
    return Form(tuple(_leaf(each) for each in leaves_of(caches)))


def _leaf(cache: Any) -> Leaf:
    if cache.empty():
        raise Unsuitable("a layer keeps nothing of a sequence")
    arrays = arrays_of(cache)
    if any(array.ndim != 4 or array.shape[0] != 1 for array in arrays):
        raise Unsuitable("it holds several sequences")
    planes = tuple(Plane(array.shape[1], array.shape[3], str(array.dtype).rpartition(".")[2]) for array in arrays)
    settings = (cache.group_size, cache.bits) if type(cache) is QuantizedKVCache else ()
    return Leaf(type(cache).__name__, settings, planes)


@dataclass(frozen=True)
class Quantization:
    """How mlx-lm quantizes the keys and values of a request: `--kv-bits` and what belongs to it."""

    bits: int
    group_size: int = 64
    start: int = 5000


@dataclass(frozen=True)
class Maker:
    """Makes one model's empty prompt caches, plain or quantized, with the form that they will have."""

    model: weakref.ref[Any]  # mlx-lm frees a model before it loads the next one
    form: Form
    quantization: Quantization | None = None

    def make(self) -> Caches:
        """Return an empty prompt cache."""
        caches: Caches = make_prompt_cache(self.model())
        return caches if self.quantization is None else _quantized(caches, self.quantization)


def makers_of(model: Any, quantization: Quantization | None) -> list[Maker]:
    """Return the forms in which mlx-lm may hold a prompt of this model. One token is computed to see them.

    Raises UnsupportedModel when its state cannot be stored.
    """
    caches: Caches = make_prompt_cache(model)
    try:
        leaves_of(caches)
        _compute_one(model, caches)
        plain = Maker(weakref.ref(model), form_of(caches))
    except Unsuitable as reason:
        raise UnsupportedModel(f"the state of this model's prompts is not stored: {reason}") from None
    if quantization is None:
        return [plain]
    try:
        return [plain, Maker(plain.model, form_of(_quantized(caches, quantization)), quantization)]
    except (ValueError, NotImplementedError):  # mlx-lm cannot make caches of this form either
        return [plain]


def _compute_one(model: Any, caches: Caches) -> None:
    try:
        mx.eval(model(mx.array([[0]]), cache=caches))
    except Exception as error:  # a model's own code may raise anything, and a request must not fail by it
        raise Unsuitable(f"one token cannot be computed to see its form ({error})") from None


def _quantized(caches: Caches, how: Quantization) -> Caches:
    """Return what mlx-lm makes of a prompt cache once it quantizes."""
    return [
        cache.to_quantized(group_size=how.group_size, bits=how.bits) if hasattr(cache, "to_quantized") else cache
        for cache in caches
    ]


def position_of(caches: Caches, tokens: int) -> int:
    """Return after how many tokens a prompt cache stands, of `tokens` that it was handed over with. Raises Unsuitable.

    A recurrent state alone does not tell; mlx-lm hands it over with the tokens that were computed.
    """
    leaves = leaves_of(caches)
    told = {int(leaf.offset) for leaf in leaves if hasattr(leaf, "offset")}
    if len(told) > 1:
        raise Unsuitable("its layers stand at different positions")
    at = told.pop() if told else tokens
    if at > tokens and all(type(leaf) in _CUT for leaf in leaves):
        at = tokens
    if not 0 < at <= tokens:
        raise Unsuitable("it does not end with the tokens that it was handed over with")
    return at
