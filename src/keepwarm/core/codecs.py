"""Quantized KV: int8, int4 and fp8, group by group. This is the reference, in numpy; `runtime.codecs` is the fast one.

Keys are quantized per channel over groups of `GROUP` tokens, values per token over groups of `GROUP` channels: keys
have a few channels with large values, values do not (KIVI, arXiv:2402.02750, section 3). Each group has a zero and a
scale in float16, `x ~ code * scale + zero` in float32. The product is exact (8 bits by 11), so every implementation
gives the same bits, fused or not. A remainder of at most `RESIDUAL` tokens at a sequence's end is kept as it is.

An encoded tensor is a list of groups of tokens. So slicing, trimming, concatenating and extending move whole codes with
their scales, and decode nothing: a token keeps its value bit for bit. Keys that are moved to another position (rotated)
must be decoded and encoded again: `relocated`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from keepwarm.core.geometry import ITEMSIZE
from keepwarm.errors import ConfigError

GROUP = 64  # tokens of keys, channels of values, that share a scale
RESIDUAL = 16  # tokens at the end that are kept in full precision; more make a short group of their own

CodecName = Literal["raw", "int8", "int4", "fp8"]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]

_BITS: dict[str, int] = {"int8": 8, "int4": 4, "fp8": 8}
CODING: Any = np.dtype([(name, "<i4") for name in ("bits", "is_float", "group", "quantized")])
_FP8_MAX = 448.0  # largest finite value of e4m3fn


@dataclass(frozen=True)
class Codec:
    """One way of quantizing. Blocks are encoded on their own, so key groups never cross a block's end."""

    name: CodecName
    group: int = GROUP
    residual: int = RESIDUAL

    @property
    def identity(self) -> str:
        """The codec's text in the model identity: KV with another codec is not interchangeable."""
        return self.name if self.name == "raw" else f"{self.name}:{self.group}:{self.residual}"

    @property
    def bits(self) -> int:
        return _BITS[self.name]

    def code_bytes(self, dim: int) -> int:
        """Bytes of one token's codes in one head."""
        return -(-dim * self.bits // 8)

    def groups(self, tokens: int) -> tuple[int, int]:
        """Return for a fresh tensor the number of quantized tokens, in groups of `group` and a last, shorter one, and
        the number of tokens kept as they are."""
        rest = tokens % self.group
        return (tokens - rest, rest) if rest <= self.residual else (tokens, 0)

    def coding(self, tokens: int) -> tuple[int, bool, int, int]:
        """How a fresh block of `tokens` tokens is encoded, for the compiled kernels: a record of `CODING`."""
        return self.bits, self.name == "fp8", self.group, self.groups(tokens)[0]

    def block_bytes(self, tokens: int, dim: int, itemsize: int, kv: int) -> int:
        """Bytes of one head's part of an encoded block: scales, then codes, then the kept tokens."""
        quantized, kept = self.groups(tokens)
        halves = 1 if self.name == "fp8" else 2  # fp8 has a scale and no zero
        scales = -(-quantized // self.group) * dim if kv == 0 else quantized * -(-dim // self.group)
        return 2 * halves * scales + quantized * self.code_bytes(dim) + kept * dim * itemsize


def codec(name: str) -> Codec:
    """Return a codec by name. Raises ConfigError."""
    if name not in ("raw", *_BITS):
        raise ConfigError(f"kv_codec must be one of raw, {', '.join(_BITS)}, got {name!r}")
    return Codec(name)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Group:
    """Consecutive tokens that are encoded alike.

    Quantized: `codes` `[heads, n, code_bytes]` uint8 with `scale` and `zero`, float16, `[heads, 1, dim]` for keys and
    `[heads, n, channel groups]` for values. Kept: `codes` are the raw bytes `[heads, n, dim * itemsize]`, no scales.
    """

    codes: Bytes
    scale: Halves | None = None
    zero: Halves | None = None

    @property
    def tokens(self) -> int:
        return int(self.codes.shape[1])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scale, self.zero) if part is not None)


@dataclass(frozen=True, eq=False)
class Encoded:
    """One layer's keys (`kv` 0) or values (1) of consecutive tokens: `[heads, tokens, dim]` of `dtype`, encoded."""

    codec: Codec
    kv: int
    heads: int
    dim: int
    dtype: str
    groups: tuple[Group, ...]

    @property
    def tokens(self) -> int:
        return sum(group.tokens for group in self.groups)

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    def slice(self, start: int, end: int) -> Encoded:
        """The tokens `[start, end)`, without decoding: groups that are cut keep their scales. Raises IndexError."""
        if not 0 <= start <= end <= self.tokens:
            raise IndexError(f"[{start}, {end}) is not within {self.tokens} tokens")
        taken, at = [], 0
        for group in self.groups:
            first, last = max(start - at, 0), min(end - at, group.tokens)
            if first < last:
                taken.append(_part(group, first, last, self.kv))
            at += group.tokens
        return replace(self, groups=tuple(taken))

    def trim(self, tokens: int) -> Encoded:
        """The first `tokens` tokens, without decoding. Raises IndexError."""
        return self.slice(0, tokens)

    def extend(self, raw: Bytes) -> Encoded:
        """Append tokens, raw bytes `[heads, n, dim * itemsize]`.

        Quantized tokens stay as they are. Tokens kept in full precision are encoded together with the new ones.
        """
        kept: list[Group] = []
        groups = list(self.groups)
        while groups and groups[-1].scale is None:
            kept.insert(0, groups.pop())
        tail = np.concatenate([*(group.codes for group in kept), raw], axis=1)
        return replace(self, groups=(*groups, *encode(tail, self.codec, self.kv, self.dim, self.dtype).groups))

    def decode(self) -> Bytes:
        """Raw bytes `[heads, tokens, dim * itemsize]`."""
        parts = [self._decoded(group) for group in self.groups]
        empty = np.empty((self.heads, 0, self.dim * itemsize(self.dtype)), np.uint8)
        return np.concatenate([empty, *parts], axis=1)

    def _decoded(self, group: Group) -> Bytes:
        if group.scale is None:
            return group.codes
        values = _codes(group.codes, self.codec, self.dim) * self._spread(group.scale)
        if group.zero is not None:
            values += self._spread(group.zero)
        return narrow(values, self.dtype)

    def _spread(self, numbers: Halves) -> Floats:
        """One number per element: keys have one per channel, values one per group of channels."""
        wide = numbers.astype(np.float32)
        return wide if self.kv == 0 else np.repeat(wide, self.codec.group, axis=2)[:, :, : self.dim]


def concatenate(parts: Sequence[Encoded]) -> Encoded:
    """Join tensors, without decoding. Raises ValueError when they are of different kinds."""
    first = parts[0]
    kinds = {(part.codec, part.kv, part.heads, part.dim, part.dtype) for part in parts}
    if len(kinds) > 1:
        raise ValueError(f"only tensors of one codec, kind, width and dtype can be joined, got {len(kinds)} kinds")
    return replace(first, groups=tuple(group for part in parts for group in part.groups))


def encode(raw: Bytes, how: Codec, kv: int, dim: int, dtype: str) -> Encoded:
    """Encode raw bytes `[heads, n, dim * itemsize]`. Raises ValueError for numbers that are not finite."""
    quantized, _ = (0, raw.shape[1]) if how.name == "raw" else how.groups(raw.shape[1])
    groups = []
    for start in range(0, quantized, how.group):
        part = widen(raw[:, start : min(start + how.group, quantized)], dtype)
        groups.append(_quantized(part, how, kv))
    if quantized < raw.shape[1]:
        groups.append(Group(np.ascontiguousarray(raw[:, quantized:])))
    return Encoded(how, kv, raw.shape[0], dim, dtype, tuple(groups))


def relocated(keys: Encoded, rotate: Callable[[Bytes], Bytes]) -> Encoded:
    """Move keys to another position: decode, rotate (raw bytes in and out) and encode each group on its own.

    Rotation mixes a channel with its partner, so per-channel scales are no longer valid.
    """
    moved = []
    for group in keys.groups:
        raw = rotate(replace(keys, groups=(group,)).decode())
        moved.append(
            Group(np.ascontiguousarray(raw))
            if group.scale is None
            else _quantized(widen(raw, keys.dtype), keys.codec, keys.kv)
        )
    return replace(keys, groups=tuple(moved))


def pack(encoded: Encoded) -> Bytes:
    """Return a fresh block as bytes `[heads, block_bytes]`: scales, zeros, codes, kept tokens.

    Raises ValueError for a tensor whose groups are not those of a fresh one: it could not be read back.
    """
    quantized = [group for group in encoded.groups if group.scale is not None]
    count = sum(group.tokens for group in quantized)
    fresh = encoded.codec.groups(encoded.tokens) == (count, encoded.tokens - count) and all(
        group.tokens == encoded.codec.group for group in quantized[:-1]
    )
    if not fresh or any(group.scale is not None for group in encoded.groups[len(quantized) :]):
        raise ValueError("only a freshly encoded block has a form of its own; decode and encode this one")
    scales = [group.scale for group in quantized if group.scale is not None]
    zeros = [group.zero for group in quantized if group.zero is not None]
    parts = [_rows(part) for part in (*scales, *zeros)] + [_rows(group.codes) for group in encoded.groups]
    return np.concatenate([np.empty((encoded.heads, 0), np.uint8), *parts], axis=1)


def unpack(packed: Bytes, how: Codec, kv: int, dim: int, dtype: str, tokens: int) -> Encoded:
    """Read what `pack` wrote for a block of `tokens` tokens. `packed` may be longer. Raises ValueError if shorter."""
    need = how.block_bytes(tokens, dim, itemsize(dtype), kv)
    if packed.shape[1] < need:
        raise ValueError(f"a block of {tokens} tokens has {need} bytes, got {packed.shape[1]}")
    heads, at = packed.shape[0], 0

    def take(rows: int, width: int) -> Bytes:
        nonlocal at
        at += rows * width
        return np.ascontiguousarray(packed[:, at - rows * width : at]).reshape(heads, rows, width)

    quantized, kept = how.groups(tokens)
    sizes = [min(how.group, quantized - start) for start in range(0, quantized, how.group)]
    across = dim if kv == 0 else -(-dim // how.group)
    rows = [1 if kv == 0 else size for size in sizes]
    scales: list[Halves] = [take(count, 2 * across).view(np.float16) for count in rows]
    zeros: list[Halves | None] = [None] * len(rows)
    if how.name != "fp8":
        zeros = [take(count, 2 * across).view(np.float16) for count in rows]
    groups = [
        Group(take(size, how.code_bytes(dim)), scale, zero)
        for size, scale, zero in zip(sizes, scales, zeros, strict=True)
    ]
    if kept:
        groups.append(Group(take(kept, dim * itemsize(dtype))))
    return Encoded(how, kv, heads, dim, dtype, tuple(groups))


# ---- numbers ----


def itemsize(dtype: str) -> int:
    """Bytes of one number."""
    return ITEMSIZE[dtype]


def widen(raw: Bytes, dtype: str) -> Floats:
    """Raw bytes `[..., width]` as float32 `[..., width / itemsize]`."""
    raw = np.ascontiguousarray(raw)
    if dtype == "bfloat16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view({"float32": "<f4", "float16": "<f2", "float64": "<f8"}[dtype]).astype(np.float32)


def narrow(values: Floats, dtype: str) -> Bytes:
    """The opposite of `widen`, rounded to nearest even."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").view(np.uint8)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values.astype({"float32": "<f4", "float16": "<f2", "float64": "<f8"}[dtype])).view(
            np.uint8
        )


def _quantized(values: Floats, how: Codec, kv: int) -> Group:
    """One group: `[heads, n, dim]` float32."""
    if not np.isfinite(values).all():
        raise ValueError("KV with numbers that are not finite cannot be quantized")
    blocks = [values] if kv == 0 else _split(values, how.group)
    axis = 1 if kv == 0 else 2
    if how.name == "fp8":
        scales = [_half(np.abs(block).max(axis, keepdims=True) / np.float32(_FP8_MAX)) for block in blocks]
        codes = [_to_fp8(_over(block, scale)) for block, scale in zip(blocks, scales, strict=True)]
        return Group(np.concatenate(codes, axis=2), np.concatenate(scales, axis=2))
    steps = np.float32(2**how.bits - 1)
    zeros = [_half(block.min(axis, keepdims=True)) for block in blocks]
    scales = [
        _half((block.max(axis, keepdims=True) - zero.astype(np.float32)) / steps)
        for block, zero in zip(blocks, zeros, strict=True)
    ]
    codes = [
        np.clip(np.rint(_over(block - zero.astype(np.float32), scale)), 0, steps).astype(np.uint8)
        for block, zero, scale in zip(blocks, zeros, scales, strict=True)
    ]
    whole = np.concatenate(codes, axis=2)
    packed = _nibbles(whole) if how.bits == 4 else whole
    return Group(packed, np.concatenate(scales, axis=2), np.concatenate(zeros, axis=2))


def _half(values: Floats) -> Halves:
    """Convert to float16, clipped to its finite range."""
    return np.clip(values, -65504.0, 65504.0).astype(np.float16)


def _over(values: Floats, scale: Halves) -> Floats:
    """Divide values by their scale; 0 where the scale is 0, since all values of the group are then equal."""
    wide = scale.astype(np.float32)
    return np.where(wide == 0, np.float32(0), values / np.where(wide == 0, np.float32(1), wide))


def _split(values: Floats, width: int) -> list[Floats]:
    return [values[:, :, start : start + width] for start in range(0, values.shape[2], width)]


def _nibbles(codes: Bytes) -> Bytes:
    """Two codes per byte: even channels in the low half."""
    if codes.shape[2] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[:, :, :1])], axis=2)
    packed: Bytes = codes[:, :, 0::2] | codes[:, :, 1::2] << np.uint8(4)
    return packed


def _codes(codes: Bytes, how: Codec, dim: int) -> Floats:
    """Codes as float32 `[heads, n, dim]`."""
    if how.name == "fp8":
        return fp8_values()[codes]
    if how.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=3).reshape(*codes.shape[:2], -1)[:, :, :dim]
    return codes.astype(np.float32)


@cache
def fp8_values() -> Floats:
    """Value of every e4m3fn code: sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7F and 0xFF are NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values = np.where(code & 128, -size, size)
    values[[0x7F, 0xFF]] = math.nan
    return values.astype(np.float32)


def _to_fp8(values: Floats) -> Bytes:
    """Round to the nearest e4m3fn, ties to even, clipped to the largest finite value."""
    steps = fp8_values()[:0x7F]
    size = np.minimum(np.abs(values), np.float32(_FP8_MAX))
    above = np.clip(np.searchsorted(steps, size), 1, 0x7E)
    below = above - 1
    middle = (steps[below] + steps[above]) / 2  # exact: both have few bits
    up = (size > middle) | ((size == middle) & (above % 2 == 0))
    return (np.where(up, above, below) | np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def _part(group: Group, first: int, last: int, kv: int) -> Group:
    codes = np.ascontiguousarray(group.codes[:, first:last])
    if kv == 0:
        return replace(group, codes=codes)
    scale, zero = (None if part is None else part[:, first:last] for part in (group.scale, group.zero))
    return Group(codes, scale, zero)


def _rows(part: npt.NDArray[np.uint8] | Halves) -> Bytes:
    """All of a head's bytes in one row."""
    flat: Bytes = np.ascontiguousarray(part).reshape(part.shape[0], -1).view(np.uint8)
    return flat


@dataclass(frozen=True)
class ReferenceCodec:
    """The reference as a `core.ports.BlockCodec`."""

    codec: Codec

    def encode(self, raw: Bytes, kv: int, dim: int, dtype: str) -> Bytes:
        """Encode one layer's keys or values of a block in the form of `pack`."""
        return pack(encode(raw, self.codec, kv, dim, dtype))

    def decode(self, packed: Bytes, kv: int, dim: int, dtype: str, tokens: int, target: Bytes) -> None:
        """Write the first tokens of a block of `tokens` into `target`."""
        np.copyto(target, unpack(packed, self.codec, kv, dim, dtype, tokens).decode()[:, : target.shape[1]])
