"""Rotary position embedding: parameters from a configuration, and the reference for rotating and re-rotating keys.

A key at position p is `f * R(p) k`: its pairs of dimensions are rotated by `p * frequency`, times the attention factor
f of some variants (Su et al., RoFormer, arXiv 2104.09864; Peng et al., YaRN, arXiv 2309.00071). Since
`R(p + d) = R(d) R(p)`, rotating a cached key once more moves it by d positions, without the factor, which it already
has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from keepwarm.core.kinds import text_config
from keepwarm.errors import UnsupportedModel

_Float = TypeVar("_Float", np.float32, np.float64)
_INTERLEAVED = frozenset(  # families that pair neighbouring dimensions; the others pair dimension i with i + dim / 2
    {"codegen", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "gptj", "helium", "llama4_text"}
)
_FULL_WITHOUT = frozenset({"cohere2", "cohere2_moe"})  # families whose full layers have no positions
_ABSOLUTE = "its keys cannot be moved, so reuse='chunks' is refused; 'exact' and 'prefix' work"


@dataclass(frozen=True)
class Rotary:
    """How one layer's keys, `head_dim` wide, are rotated: the first `2 * len(frequencies)` dimensions, in pairs."""

    head_dim: int
    frequencies: tuple[float, ...]  # radians per position of each pair
    attention_factor: float = 1.0  # by which rotated keys (and queries) are multiplied, once
    interleaved: bool = False  # pairs are (0, 1), (2, 3) ...; else (0, n), (1, n + 1) ...

    @property
    def dim(self) -> int:
        """Dimensions that are rotated; the others stay unchanged (partial rotary)."""
        return 2 * len(self.frequencies)

    def rotate(self, keys: npt.NDArray[_Float], positions: npt.NDArray[np.integer]) -> npt.NDArray[_Float]:
        """Rotate keys `[..., n, head_dim]`, as the projection returns them, to `positions` `[n]`."""
        return self._turned(keys, positions, self.attention_factor)

    def rerotate(self, keys: npt.NDArray[_Float], delta: int) -> npt.NDArray[_Float]:
        """Move rotated keys `[..., n, head_dim]` by `delta` positions. Equals `rotate` to `p + delta`."""
        return self._turned(keys, np.asarray([delta]), 1.0)

    def _turned(
        self, keys: npt.NDArray[_Float], positions: npt.NDArray[np.integer], factor: float
    ) -> npt.NDArray[_Float]:
        angles = positions.astype(np.float64)[:, None] * np.asarray(self.frequencies)  # [n, pairs]
        cosine, sine = np.cos(angles) * factor, np.sin(angles) * factor
        first, second = self.pairs
        a, b = keys[..., first], keys[..., second]
        turned = keys.copy()
        turned[..., first] = a * cosine - b * sine
        turned[..., second] = b * cosine + a * sine
        return turned

    @property
    def pairs(self) -> tuple[slice, slice]:
        """Dimensions of the first and of the second members of all pairs."""
        half = self.dim // 2
        if self.interleaved:
            return slice(0, self.dim, 2), slice(1, self.dim, 2)
        return slice(0, half), slice(half, self.dim)


def rotaries(config: Mapping[str, Any]) -> tuple[Rotary | None, ...]:
    """Return each layer's rotary embedding, from a Hugging Face `config.json`; None for a layer without positions.

    Supports default, linear, llama3 and yarn scaling, partial and interleaved rotation, parameters per kind of layer.
    Raises UnsupportedModel for models without rotary positions, for scaling whose keys depend on the sequence's length
    (dynamic, longrope), for multimodal rotation, and for unknown kinds.
    """
    config = text_config(config)
    name = config.get("model_type", "this model")
    if config.get("alibi") or config.get("position_embedding_type") == "alibi":
        raise UnsupportedModel(f"{name} adds a bias by distance and has no rotary positions: {_ABSOLUTE}")
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    old = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
    if "rotary_emb_base" in config:  # GPT-NeoX
        old = {"rope_theta": config["rotary_emb_base"], "partial_rotary_factor": config.get("rotary_pct", 1.0), **old}
    if config.get("rotary_dim") and name in ("gptj", "codegen"):  # no rope_theta of their own
        old = {"rope_theta": 10000.0, **old}
    if not given and not old:
        raise UnsupportedModel(f"{name} has no rotary positions: {_ABSOLUTE}")
    count = config.get("num_hidden_layers") or config.get("n_layer") or 0
    kinds: Sequence[str] = config.get("layer_types") or ["full_attention"] * count
    nested = {key: value for key, value in given.items() if isinstance(value, Mapping)}
    by_kind = {
        kind: _rotary(config, {**old, **(nested.get(kind) or (given if not nested else {}))}) for kind in {*kinds}
    }
    with_rope = config.get("no_rope_layers") or [1] * len(kinds)  # the name is inverted: 1 is a layer with rotation
    return tuple(
        by_kind[kind] if with_rope[layer] and not (name in _FULL_WITHOUT and kind == "full_attention") else None
        for layer, kind in enumerate(kinds)
    )


def _rotary(config: Mapping[str, Any], rope: Mapping[str, Any]) -> Rotary:
    name = config.get("model_type", "this model")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("mrope_section") or kind == "mrope":
        raise UnsupportedModel(f"{name} rotates by several coordinates per token (multimodal rotary): {_ABSOLUTE}")
    if kind in ("dynamic", "longrope", "su"):
        raise UnsupportedModel(f"{name}'s rotary embedding ({kind}) changes with the sequence's length: {_ABSOLUTE}")
    if kind not in _SCALINGS:
        raise UnsupportedModel(f"{name}'s rotary embedding ({kind}) is not one of {', '.join(_SCALINGS)}: {_ABSOLUTE}")
    heads = config.get("num_attention_heads") or config.get("n_head") or 1
    head_dim = config.get("head_dim") or (config.get("hidden_size") or config.get("n_embd") or 0) // heads
    share = rope.get("partial_rotary_factor")
    dim = int(head_dim * share) if share is not None else config.get("rotary_dim") or head_dim
    if not dim or "rope_theta" not in rope:
        raise UnsupportedModel(f"{name}'s configuration has no rope_theta or no head width: {_ABSOLUTE}")
    base = float(rope["rope_theta"])
    frequencies, factor = _SCALINGS[kind](base ** (-np.arange(0, dim, 2) / dim), base, dim, rope, config)
    return Rotary(head_dim, tuple(frequencies.tolist()), factor, name in _INTERLEAVED)


_Scaled = tuple[npt.NDArray[np.float64], float]


def _default(plain: npt.NDArray[np.float64], *_: Any) -> _Scaled:
    return plain, 1.0


def _linear(plain: npt.NDArray[np.float64], base: float, dim: int, rope: Mapping[str, Any], _: Any) -> _Scaled:
    return plain / rope["factor"], 1.0


def _llama3(plain: npt.NDArray[np.float64], base: float, dim: int, rope: Mapping[str, Any], _: Any) -> _Scaled:
    """Llama 3.1: long wavelengths are stretched, short ones are kept, those between are interpolated."""
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)  # in the original context
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return plain * (kept + (1 - kept) / rope["factor"]), 1.0


def _yarn(
    plain: npt.NDArray[np.float64], base: float, dim: int, rope: Mapping[str, Any], config: Mapping[str, Any]
) -> _Scaled:
    """YaRN, equations 17 to 23: a ramp over dimensions between stretched and unchanged; keys grow by a factor."""
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    factor = rope.get("factor") or config["max_position_embeddings"] / original

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    return plain * (1 - ramp + ramp / factor), _yarn_attention(rope, factor)


def _yarn_attention(rope: Mapping[str, Any], factor: float) -> float:
    def grown(scale: float, by: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * by * math.log(scale) + 1.0

    given = rope.get("attention_factor")
    if given is not None:
        return float(given)
    both = rope.get("mscale"), rope.get("mscale_all_dim")
    return grown(factor, both[0]) / grown(factor, both[1]) if both[0] and both[1] else grown(factor)


_SCALINGS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
