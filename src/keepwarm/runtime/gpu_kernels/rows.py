"""Triton kernels that work on one row at a time: embeddings, norms, and sums. Activations between them are float32.

Triton's interpreter cuts bfloat16 off instead of rounding it. `ROUND` has it rounded by hand there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(x):
    """Round float32 to bfloat16, to nearest even."""
    bits = x.to(tl.uint32, bitcast=True).to(tl.int64)
    near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return near.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def embed(tokens, table, out, width, factor, BLOCK: tl.constexpr):
    """Write each token's row of `table`, times `factor`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    token = tl.load(tokens + row)
    value = tl.load(table + token * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, value * factor, mask=inside)


@triton.jit
def normed(value, inside, weight, bias, at, width, epsilon, CENTRED: tl.constexpr, BIASED: tl.constexpr):
    """Norm a row, of which the numbers beyond `width` are 0."""
    if CENTRED:
        value = tl.where(inside, value - tl.sum(value, axis=0) / width, 0.0)
    square = tl.sum(value * value, axis=0) / width
    value = value / tl.sqrt_rn(square + epsilon) * tl.load(weight + at, mask=inside, other=0.0)
    if BIASED:
        value = value + tl.load(bias + at, mask=inside, other=0.0)
    return value


@triton.jit
def norm(
    x,
    weight,
    bias,
    y,
    width,
    x_stride,
    y_stride,
    epsilon,
    CENTRED: tl.constexpr,
    BIASED: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the norm of each row of `x` to `y`, which may be `x`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0)
    value = normed(value, inside, weight, bias, at, width, epsilon, CENTRED, BIASED)
    if ROUND:
        value = rounded(value)
    tl.store(y + row * y_stride + at, value, mask=inside)


@triton.jit
def add(
    x,
    more,
    weight,
    bias,
    width,
    factor,
    epsilon,
    NORMED: tl.constexpr,
    CENTRED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add `more`, normed if there is a norm, times `factor`, to `x`. Both are float32."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(more + row * width + at, mask=inside, other=0.0)
    if NORMED:
        value = normed(value, inside, weight, bias, at, width, epsilon, CENTRED, BIASED)
    before = tl.load(x + row * width + at, mask=inside, other=0.0)
    tl.store(x + row * width + at, before + value * factor, mask=inside)
