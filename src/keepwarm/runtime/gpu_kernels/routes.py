# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton kernels of experts. A router chooses some of them for each row.

A row and one of its experts are a pair. A row's pairs follow each other by rising number of the expert. For the
products, pairs are put in order by expert, so that a tile has rows of one expert. A tile's rows do not change each
other (see `products`), and a row's results are added in order of its pairs. So a row's bits do not depend on what
others choose.

The host does not know who chose what. It launches as many programs as the most tiles that so many rows can have, and
programs without a tile end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from keepwarm.runtime.gpu_kernels.products import activated
from keepwarm.runtime.gpu_kernels.rows import rounded

TILE = tl.constexpr(4)  # numbers of a tile: its expert, where its pairs begin and end, and one that fills 32 bytes


@triton.jit
def choose(scores, counts, experts, shares, count, CHOSEN: tl.constexpr, OVER_ALL: tl.constexpr, LANES: tl.constexpr):
    """Choose a row's experts: those with the highest of `count` scores, of equal ones the first. Write them and their
    shares to the row's pairs, and add them to `counts`. A share is of all experts or of the chosen ones."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    inside = lane < count
    score = tl.load(scores + row * count + lane, mask=inside, other=float("-inf"))
    key = tl.where(score == score, score, float("-inf"))  # whatever the scores are, so many experts are chosen
    taken = tl.zeros((LANES,), tl.int32)
    for _ in range(CHOSEN):
        free = inside & (taken == 0)
        best = tl.max(tl.where(free, key, float("-inf")), axis=0)
        first = tl.min(tl.where(free & (key == best), lane, LANES), axis=0)
        taken = tl.where(lane == first, 1, taken)
    chosen = taken == 1
    if OVER_ALL:
        counted = inside
    else:
        counted = chosen
    weight = tl.where(counted, tl.exp(score - tl.max(key, axis=0)), 0.0)
    pair = row * CHOSEN + tl.cumsum(taken, axis=0) - 1
    tl.store(experts + pair, lane, mask=chosen)
    tl.store(shares + pair, weight / tl.sum(weight, axis=0), mask=chosen)
    tl.atomic_add(counts + lane, taken, mask=chosen, sem="relaxed")  # whole numbers: any order gives the same


@triton.jit(do_not_specialize=["pairs"])
def group(experts, counts, order, tiles, pairs, ROWS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """Write the pairs of one expert to `order`, behind those of lower ones, and its tiles of at most `ROWS` pairs."""
    expert = tl.program_id(0)
    lane = tl.arange(0, LANES)
    lower = tl.load(counts + lane, mask=lane < expert, other=0)
    first = tl.sum(lower, axis=0)
    own = tl.load(counts + expert)
    end = first + own
    tile = tiles + tl.sum((lower + ROWS - 1) // ROWS, axis=0) * TILE
    for begin in range(first, end, ROWS):
        tl.store(tile, expert)
        tl.store(tile + 1, begin)
        tl.store(tile + 2, tl.minimum(begin + ROWS, end))
        tile += TILE
    at = first
    last = tl.where(own > 0, pairs, 0)
    for start in range(0, last, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        mine = (tl.load(experts + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + at + tl.cumsum(mine, axis=0) - 1, pair, mask=mine == 1)
        at += tl.sum(mine, axis=0)


@triton.jit
def summed(a, b, acc, BY_HAND: tl.constexpr):
    """Return `acc + a b`."""
    if BY_HAND:
        acc += tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], axis=1)
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def widen(
    x,
    up,
    gate,
    up_bias,
    gate_bias,
    y,
    order,
    tiles,
    columns,
    depth,
    apart,
    bias_apart,
    alpha,
    limit,
    CHOSEN: tl.constexpr,
    KIND: tl.constexpr,
    BIASED: tl.constexpr,
    ACROSS: tl.constexpr,
    ALONG: tl.constexpr,
    BIAS_ACROSS: tl.constexpr,
    ROUND: tl.constexpr,
    BY_HAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Write the first half of experts, `act(x gate^T) * (x up^T)`, to each pair's row of `y`.

    An expert's weights lie `apart` from the one's before. In a weight, columns lie `ACROSS` and a column's numbers
    `ALONG` from each other.
    """
    tile = tiles + tl.program_id(0) * TILE
    begin = tl.load(tile + 1)
    end = tl.load(tile + 2)
    if begin >= end:
        return
    expert = tl.load(tile)
    place = begin + tl.arange(0, ROWS)
    there = place < end
    pair = tl.load(order + place, mask=there, other=0)
    source = x + pair // CHOSEN * depth
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    ups = up + expert * apart
    gates = gate + expert * apart
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    gated = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        at = start + tl.arange(0, DEPTH)
        deep = at < depth
        a = tl.load(source[:, None] + at[None, :], mask=there[:, None] & deep[None, :], other=0.0)
        where = column[None, :] * ACROSS + at[:, None] * ALONG
        valid = inside[None, :] & deep[:, None]
        acc = summed(a, tl.load(ups + where, mask=valid, other=0.0), acc, BY_HAND)
        gated = summed(a, tl.load(gates + where, mask=valid, other=0.0), gated, BY_HAND)
    if BIASED:
        where = expert * bias_apart + column * BIAS_ACROSS
        acc = acc + tl.load(up_bias + where, mask=inside, other=0.0).to(tl.float32)[None, :]
        gated = gated + tl.load(gate_bias + where, mask=inside, other=0.0).to(tl.float32)[None, :]
    if KIND == 5:
        gated = tl.minimum(gated, limit)
        gated = gated / (1.0 + tl.exp(-alpha * gated))
        acc = gated * (tl.minimum(tl.maximum(acc, -limit), limit) + 1.0)
    else:
        acc = activated(gated, KIND) * acc
    if ROUND:
        acc = rounded(acc)
    tl.store(y + pair[:, None] * columns + column[None, :], acc, mask=there[:, None] & inside[None, :])


@triton.jit
def narrow(
    x,
    weight,
    bias,
    y,
    order,
    tiles,
    columns,
    depth,
    apart,
    bias_apart,
    BIASED: tl.constexpr,
    ACROSS: tl.constexpr,
    ALONG: tl.constexpr,
    BY_HAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Write the second half of experts, `x weight^T + bias`, for each pair. Both `x` and `y` have a row for it."""
    tile = tiles + tl.program_id(0) * TILE
    begin = tl.load(tile + 1)
    end = tl.load(tile + 2)
    if begin >= end:
        return
    expert = tl.load(tile)
    place = begin + tl.arange(0, ROWS)
    there = place < end
    pair = tl.load(order + place, mask=there, other=0)
    source = x + pair * depth
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    downs = weight + expert * apart
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        at = start + tl.arange(0, DEPTH)
        deep = at < depth
        a = tl.load(source[:, None] + at[None, :], mask=there[:, None] & deep[None, :], other=0.0)
        where = column[None, :] * ACROSS + at[:, None] * ALONG
        b = tl.load(downs + where, mask=inside[None, :] & deep[:, None], other=0.0)
        acc = summed(a, b, acc, BY_HAND)
    if BIASED:
        acc = acc + tl.load(bias + expert * bias_apart + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(y + pair[:, None] * columns + column[None, :], acc, mask=there[:, None] & inside[None, :])


@triton.jit
def collect(
    results,
    shares,
    own,
    gate,
    y,
    width,
    CHOSEN: tl.constexpr,
    OWN: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the sum of a row's results, each times its share, in order of its pairs. Last comes the row of the layer's
    own MLP, times the sigmoid of `gate`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    acc = tl.zeros((BLOCK,), tl.float32)
    for number in range(CHOSEN):
        pair = row * CHOSEN + number
        acc += tl.load(results + pair * width + at, mask=inside, other=0.0) * tl.load(shares + pair)
    if OWN:
        more = tl.load(own + row * width + at, mask=inside, other=0.0)
        if GATED:
            more = more / (1.0 + tl.exp(-tl.load(gate + row)))
        acc += more
    tl.store(y + row * width + at, acc, mask=inside)
