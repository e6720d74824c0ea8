"""Fast, bit-identical versions of the codecs in `core.codecs`: torch encodes, a compiled kernel decodes.

Without a compiler, and for dtypes that the kernel cannot write, torch decodes as well.
"""

from __future__ import annotations

import ctypes
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keepwarm.core.codecs import CODING, Bytes, Codec, Group, itemsize, unpack
from keepwarm.runtime.native.build import compiled

_SOURCE = Path(__file__).parent / "native" / "codecs.cpp"
_KERNEL_DTYPES = {"bfloat16", "float32"}
_FP8_MAX = 448.0
_HALF_MAX = 65504.0


class TorchCodec:
    """One codec. Implements `core.ports.BlockCodec`. Threads may share it."""

    def __init__(self, codec: Codec, *, native: bool = True) -> None:
        self.codec = codec
        self._native = native

    def encode(self, raw: Bytes, kv: int, dim: int, dtype: str) -> Bytes:
        """Return what `core.codecs.pack(encode(raw, ...))` returns. Raises ValueError for numbers that are not
        finite."""
        how, heads = self.codec, raw.shape[0]
        quantized, _ = how.groups(raw.shape[1])
        values = _tensor(np.ascontiguousarray(raw), dtype).float()[:, :quantized]
        if not torch.isfinite(values).all():
            raise ValueError("KV with numbers that are not finite cannot be quantized")
        full = quantized - quantized % how.group
        scales, zeros, codes = [], [], []
        # Keys: whole groups of tokens at once, then the shorter one. Values: groups of channels, then the narrower one.
        if kv == 0:
            spans = [(values[:, :full].unflatten(1, (-1, how.group)), 2)] if full else []
            spans += [(values[:, full:].unsqueeze(1), 2)] if full < quantized else []
        else:
            wide = dim - dim % how.group
            spans = [(values[:, :, :wide].unflatten(2, (-1, how.group)), 3)] if wide else []
            spans += [(values[:, :, wide:].unsqueeze(2), 3)] if wide < dim else []
        for part, axis in spans:
            scale, zero, code = self._quantized(part, axis)
            scales.append(scale.squeeze(axis))
            zeros.append(zero.squeeze(axis))
            codes.append(code.flatten(1, 2) if kv == 0 else code.flatten(2))
        join = 1 if kv == 0 else 2
        joined = torch.cat(codes, join) if codes else values.to(torch.uint8)
        if how.bits == 4:
            joined = torch.nn.functional.pad(joined, (0, dim % 2))
            joined = joined[:, :, 0::2] | joined[:, :, 1::2] << 4
        parts = [_rows(torch.cat(numbers, join).half()) for numbers in (scales, zeros) if numbers]
        if how.name == "fp8" and parts:
            parts.pop()
        parts += [_rows(joined), raw[:, quantized:].reshape(heads, -1)]
        return np.concatenate(parts, axis=1)

    def _quantized(self, part: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return scale, zero (rounded to float16, as float32) and codes of groups along an axis."""
        if self.codec.name == "fp8":
            scale = _half(part.abs().amax(axis, keepdim=True) / _FP8_MAX)
            code = _over(part, scale).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
            return scale, torch.zeros_like(scale), code
        steps = 2**self.codec.bits - 1
        zero = _half(part.amin(axis, keepdim=True))
        scale = _half((part.amax(axis, keepdim=True) - zero) / steps)
        return scale, zero, _over(part - zero, scale).round().clamp(0, steps).to(torch.uint8)

    def decode(self, packed: Bytes, kv: int, dim: int, dtype: str, tokens: int, target: Bytes) -> None:
        """Write the first tokens of a block of `tokens` into `target`, `[heads, m, dim * itemsize]`."""
        how = self.codec
        width = dim * itemsize(dtype)
        if packed.shape[1] < how.block_bytes(tokens, dim, itemsize(dtype), kv):
            raise ValueError(f"a block of {tokens} tokens is longer than {packed.shape[1]} bytes")
        dense = target.strides[1:] == (width, 1) and packed.strides[1] == 1
        if self._kernel is not None and dtype in _KERNEL_DTYPES and dense and target.shape[1]:
            coding = np.array(how.coding(tokens), CODING)
            if not self._kernel(
                packed.ctypes.data,
                packed.strides[0],
                target.ctypes.data,
                target.strides[0],
                target.shape[0],
                dim,
                itemsize(dtype),
                kv,
                coding.ctypes.data,
                target.shape[1],
            ):
                return
        at = 0
        for group in unpack(packed, how, kv, dim, dtype, tokens).groups:
            end = min(at + group.tokens, target.shape[1])
            if at < end:
                raw = group.codes if group.scale is None else self._values(group, kv, dim, dtype)
                np.copyto(target[:, at:end], raw[:, : end - at])
            at += group.tokens

    def _values(self, group: Group, kv: int, dim: int, dtype: str) -> Bytes:
        given = torch.from_numpy(group.codes)
        if self.codec.name == "fp8":
            values = given.view(torch.float8_e4m3fn).float()
        else:
            if self.codec.bits == 4:
                given = torch.stack([given & 15, given >> 4], dim=3).flatten(2)[:, :, :dim]
            values = given.float()
        values = values * self._spread(group.scale, kv, dim)
        if group.zero is not None:
            values = values + self._spread(group.zero, kv, dim)
        raw: Bytes = values.to(getattr(torch, dtype)).contiguous().view(torch.uint8).numpy()
        return raw

    def _spread(self, numbers: Any, kv: int, dim: int) -> torch.Tensor:
        wide = torch.from_numpy(numbers).float()
        return wide if kv == 0 else wide.repeat_interleave(self.codec.group, dim=2)[:, :, :dim]

    @cached_property
    def _kernel(self) -> Any:
        kernels = compiled(_SOURCE) if self._native else None
        if kernels is None:
            return None
        long, address = ctypes.c_int64, ctypes.c_void_p
        found = kernels.library.keepwarm_decode
        found.argtypes = [address, long, address, long, long, long, ctypes.c_int, ctypes.c_int, address, long]
        return found


def _tensor(raw: Bytes, dtype: str) -> torch.Tensor:
    return torch.from_numpy(raw).view(getattr(torch, dtype))


def _half(values: torch.Tensor) -> torch.Tensor:
    """Return values rounded to float16, clamped to its finite range, as float32."""
    return values.clamp(-_HALF_MAX, _HALF_MAX).half().float()


def _over(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Divide values by their scale. Return 0 where the scale is 0: all values of the group are then equal."""
    return torch.where(scale == 0, 0.0, values / torch.where(scale == 0, 1.0, scale))


def _rows(part: torch.Tensor) -> Bytes:
    """Return each head's bytes in one row."""
    raw: Bytes = part.contiguous().flatten(1).view(torch.uint8).numpy()
    return raw
