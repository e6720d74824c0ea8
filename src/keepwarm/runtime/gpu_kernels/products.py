"""Triton kernels that multiply rows with weights.

A program computes one tile of results. A single row is computed in a tile whose other rows are 0. A sum runs over the
whole inner dimension in order, in one accumulator, and all sizes of tiles that are used give the same bits (`tiles`).
So the bits of a row depend on that row and on the weights alone.

`BY_HAND` is for Triton's interpreter. There `tl.dot` is a product of NumPy's, whose rows may depend on each other, so
products are summed term by term.
"""

from __future__ import annotations

import triton
import triton.language as tl

from keepwarm.runtime.gpu_kernels.rows import rounded


@triton.jit
def capped(x, cap):
    """Bound `x` by `cap`, by tanh."""
    return cap * (1.0 - 2.0 / (tl.exp(2.0 * x / cap) + 1.0))


@triton.jit
def activated(x, KIND: tl.constexpr):
    """Apply an activation. The numbers are those of `native.description.ACTIVATIONS`."""
    if KIND == 0:
        y = x / (1.0 + tl.exp(-x))
    elif KIND == 1:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))
    elif KIND == 2:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 3:
        y = tl.maximum(x, 0.0)
    else:
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return y


@triton.jit(do_not_specialize=["rows"])
def product(
    x,
    weight,
    bias,
    y,
    rows,
    columns,
    depth,
    y_stride,
    factor,
    cap,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    LOGITS: tl.constexpr,
    ROUND: tl.constexpr,
    BY_HAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Write `x weight^T + bias` to `y`. Logits are multiplied by `factor`, bounded, and rounded as weights are."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = row < rows
    inside = column < columns
    row = row.to(tl.int64)
    column = column.to(tl.int64)
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        at = start + tl.arange(0, DEPTH)
        deep = at < depth
        a = tl.load(x + row[:, None] * depth + at[None, :], mask=there[:, None] & deep[None, :], other=0.0)
        b = tl.load(weight + column[None, :] * depth + at[:, None], mask=inside[None, :] & deep[:, None], other=0.0)
        if BY_HAND:
            acc += tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], axis=1)
        else:
            acc = tl.dot(a, b, acc, input_precision="ieee")
    if BIASED:
        acc = acc + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if LOGITS:
        acc = acc * factor
        if CAPPED:
            acc = capped(acc, cap)
        if ROUND:
            acc = rounded(acc).to(tl.float32)
        else:
            acc = acc.to(weight.dtype.element_ty).to(tl.float32)
    tl.store(y + row[:, None] * y_stride + column[None, :], acc, mask=there[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rows"])
def widen(
    x,
    up,
    gate,
    up_bias,
    gate_bias,
    y,
    rows,
    columns,
    depth,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    GATE_BIASED: tl.constexpr,
    ROUND: tl.constexpr,
    BY_HAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Write the first half of an MLP to `y`: `act(x gate^T) * (x up^T)`, or without a gate `act(x up^T)`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = row < rows
    inside = column < columns
    row = row.to(tl.int64)
    column = column.to(tl.int64)
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    gated = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        at = start + tl.arange(0, DEPTH)
        deep = at < depth
        a = tl.load(x + row[:, None] * depth + at[None, :], mask=there[:, None] & deep[None, :], other=0.0)
        where = column[None, :] * depth + at[:, None]
        valid = inside[None, :] & deep[:, None]
        b = tl.load(up + where, mask=valid, other=0.0)
        if BY_HAND:
            acc += tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], axis=1)
        else:
            acc = tl.dot(a, b, acc, input_precision="ieee")
        if GATED:
            c = tl.load(gate + where, mask=valid, other=0.0)
            if BY_HAND:
                gated += tl.sum(a.to(tl.float32)[:, :, None] * c.to(tl.float32)[None, :, :], axis=1)
            else:
                gated = tl.dot(a, c, gated, input_precision="ieee")
    if BIASED:
        acc = acc + tl.load(up_bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if GATE_BIASED:
            gated = gated + tl.load(gate_bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        acc = activated(gated, KIND) * acc
    else:
        acc = activated(acc, KIND)
    if ROUND:
        acc = rounded(acc)
    tl.store(y + row[:, None] * columns + column[None, :], acc, mask=there[:, None] & inside[None, :])
