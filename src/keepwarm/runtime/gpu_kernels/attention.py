"""Triton kernels of attention over pages.

Positions are attended to in parts of 256, counted from position 0. A program computes one part for some rows that read
the same pages, page after page in order of position; a part's running softmax starts anew. Another kernel merges the
parts of a row in order of position. So the bits of a row depend on its position and on what it attends to, and not on
which rows are computed together.

Memory is told by address, in the form of `native.places`. Each region has five numbers: the address of its first key,
and the distances in bytes from keys to values, from layer to layer, and from head to head of keys and of values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from keepwarm.runtime.gpu_kernels.products import capped
from keepwarm.runtime.gpu_kernels.rows import rounded

PART = tl.constexpr(256)  # positions: shorter ones decode sooner, and leave more results to merge
UNIT = tl.constexpr(64)
PAGE = tl.constexpr(8)
REGION = tl.constexpr(5)  # numbers of a region
JOB = tl.constexpr(5)  # numbers of a job
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_of(regions, region, layer, kv):
    """Return the address of a region's first row of keys (0) or values (1) in a layer, and the distance of heads."""
    base = regions + region * REGION
    address = tl.load(base) + layer * tl.load(base + 2) + kv * tl.load(base + 1)
    return address, tl.load(base + 3 + kv)


@triton.jit(do_not_specialize=["layer"])
def place(
    qkv,
    queries,
    positions,
    cosine,
    sine,
    q_norm,
    k_norm,
    slots,
    regions,
    layer,
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROTATED: tl.constexpr,
    NORMED: tl.constexpr,
    CENTRED: tl.constexpr,
    ROUND: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Norm and rotate one head of a row. Write a query to `queries`, and a key or a value to the row's slot."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, DIM)
    HALF: tl.constexpr = ROTARY // 2
    if INTERLEAVED:
        partner = at ^ 1
        pair = at // 2
        is_first = at % 2 == 0
    else:
        partner = tl.where(at < HALF, at + HALF, at - HALF)
        pair = tl.where(at < HALF, at, at - HALF)
        is_first = at < HALF
    turns = at < ROTARY
    partner = tl.where(turns, partner, at)
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    value = tl.load(source + at)
    other = tl.load(source + partner)
    plain = value
    if NORMED:
        if CENTRED:
            mean = tl.sum(value, axis=0) / DIM
            value = value - mean
            other = other - mean
        root = tl.sqrt_rn(tl.sum(value * value, axis=0) / DIM + epsilon)
        is_query = head < HEADS
        value = value / root * tl.where(is_query, tl.load(q_norm + at), tl.load(k_norm + at))
        other = other / root * tl.where(is_query, tl.load(q_norm + partner), tl.load(k_norm + partner))
    if ROTATED:
        angle = tl.load(positions + row) * HALF + pair
        c = tl.load(cosine + angle, mask=turns, other=1.0)
        s = tl.load(sine + angle, mask=turns, other=0.0)
        turned = value * c + tl.where(is_first, -other, other) * s
        value = tl.where(turns, turned, value)
    value = tl.where(head < HEADS + KV_HEADS, value, plain)
    if ROUND:
        value = rounded(value)
    if head < HEADS:
        tl.store(queries + (row * HEADS + head) * DIM + at, value)
    else:
        slot = tl.load(slots + row)
        kv = (head - HEADS) // KV_HEADS
        first, distance = first_of(regions, slot >> 32, layer, kv)
        address = first + ((head - HEADS) % KV_HEADS) * distance + (slot & 0xFFFFFFFF) * (DIM * SIZE)
        tl.store(address.to(queries.dtype) + at, value)


@triton.jit
def started(regions, slot, layer, kv, kv_head, BYTES: tl.constexpr):
    """Return the addresses of the rows of a head at slots, `BYTES` each."""
    first, distance = first_of(regions, slot >> 32, layer, kv)
    return first + kv_head * distance + (slot & 0xFFFFFFFF) * BYTES


@triton.jit
def attend_unit(
    q,
    position,
    there,
    key,
    valid,
    k_address,
    v_address,
    top,
    total,
    acc,
    window,
    scale,
    cap,
    DIM: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    ROUND: tl.constexpr,
    BY_HAND: tl.constexpr,
):
    """Go on with a running softmax over some keys, whose rows are at these addresses."""
    dims = tl.arange(0, DIM)
    k = tl.load(tl.multiple_of(k_address, 16)[None, :] + dims[:, None], mask=valid[None, :], other=0.0)
    if BY_HAND:
        score = tl.sum(q.to(tl.float32)[:, :, None] * k.to(tl.float32)[None, :, :], axis=1)
    else:
        score = tl.dot(q, k, input_precision="ieee")
    score = score * scale
    if CAPPED:
        score = capped(score, cap)
    seen = there[:, None] & (key[None, :] <= position[:, None])
    if WINDOWED:
        seen = seen & (key[None, :] > position[:, None] - window)
    score = tl.where(seen, score * LOG2E, float("-inf"))
    # Blocks that a row does not attend to leave its numbers as they are: others in its tile may need them.
    highest = tl.max(score, axis=1)
    live = highest > float("-inf")
    new = tl.maximum(top, highest)
    base = tl.where(new > float("-inf"), new, 0.0)
    weight = tl.exp2(score - base[:, None])
    keep = tl.exp2(top - base)
    total = tl.where(live, total * keep + tl.sum(weight, axis=1), total)
    v = tl.load(tl.multiple_of(v_address, 16)[:, None] + dims[None, :], mask=valid[:, None], other=0.0)
    if ROUND:
        narrow = rounded(weight)
    else:
        narrow = weight.to(q.dtype)
    if BY_HAND:
        more = tl.sum(narrow.to(tl.float32)[:, :, None] * v.to(tl.float32)[None, :, :], axis=1)
    else:
        more = tl.dot(narrow, v, input_precision="ieee")
    acc = tl.where(live[:, None], acc * keep[:, None] + more, acc)
    return tl.where(live, new, top), total, acc


@triton.jit(do_not_specialize=["layer", "window"])
def attend(
    queries,
    positions,
    members,
    jobs,
    pages,
    regions,
    cells,
    tops,
    totals,
    sums,
    layer,
    window,
    scale,
    cap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    ROUND: tl.constexpr,
    BY_HAND: tl.constexpr,
    LANES: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Compute one part for the rows of a job and the query heads of one key head.

    A job is the place of its rows in `members`, their number, the part, where in `pages` their page table begins, and
    the slot of the part's first position if the others follow it, otherwise -1.
    The part's maximum, total and weighted sum of a row go to the row's cell for it: `cells[row] + part`.
    """
    job = jobs + tl.program_id(0).to(tl.int64) * JOB
    kv_head = tl.program_id(1)
    lane = tl.arange(0, LANES)
    dims = tl.arange(0, DIM)
    member = lane // GROUP
    there = member < tl.load(job + 1)
    row = tl.load(members + tl.load(job) + member, mask=there, other=0)
    position = tl.load(positions + row, mask=there, other=-1)
    head = kv_head * GROUP + lane % GROUP
    part = tl.load(job + 2)
    table = pages + tl.load(job + 3)
    begin = part * PART
    latest = tl.max(position, axis=0)
    end = tl.minimum(begin + PART, latest + 1)
    lowest = tl.min(tl.where(there, position, latest), axis=0) - window + 1
    if WINDOWED:
        begin = tl.maximum(begin, lowest // UNIT * UNIT)
    q = tl.load(queries + ((row * HEADS + head) * DIM)[:, None] + dims[None, :], mask=there[:, None], other=0.0)
    top = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    acc = tl.zeros((LANES, DIM), tl.float32)
    BYTES: tl.constexpr = DIM * SIZE
    flat = tl.load(job + 4)
    if flat >= 0:
        k_first = started(regions, flat, layer, 0, kv_head, BYTES)
        v_first = started(regions, flat, layer, 1, kv_head, BYTES)
        for start in range(begin, end, UNIT):
            key = start + tl.arange(0, UNIT)
            valid = key < end
            if WINDOWED:
                valid = valid & (key >= lowest)
            offset = (key - part * PART) * BYTES
            k_address = (k_first + offset).to(queries.dtype)
            v_address = (v_first + offset).to(queries.dtype)
            top, total, acc = attend_unit(
                q, position, there, key, valid, k_address, v_address, top, total, acc, window, scale, cap,
                DIM, WINDOWED, CAPPED, ROUND, BY_HAND,
            )  # fmt: skip
    else:
        for start in range(begin, end, UNIT):
            key = start + tl.arange(0, UNIT)
            valid = key < end
            if WINDOWED:
                valid = valid & (key >= lowest)
            slot = tl.load(table + key // PAGE, mask=valid, other=0) + key % PAGE
            k_address = started(regions, slot, layer, 0, kv_head, BYTES).to(queries.dtype)
            v_address = started(regions, slot, layer, 1, kv_head, BYTES).to(queries.dtype)
            top, total, acc = attend_unit(
                q, position, there, key, valid, k_address, v_address, top, total, acc, window, scale, cap,
                DIM, WINDOWED, CAPPED, ROUND, BY_HAND,
            )  # fmt: skip
    cell = (tl.load(cells + row, mask=there, other=0) + part) * HEADS + head
    there = there & (position >= part * PART)  # the others have no cell of this part
    tl.store(tops + cell, top, mask=there)
    tl.store(totals + cell, total, mask=there)
    tl.store(sums + (cell * DIM)[:, None] + dims[None, :], acc, mask=there[:, None])


@triton.jit(do_not_specialize=["window"])
def merge(
    tops,
    totals,
    sums,
    sinks,
    chosen,
    positions,
    cells,
    out,
    window,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Merge the parts of one head of a row, and write its result. `chosen` are the rows. A sink has no value."""
    row = tl.load(chosen + tl.program_id(0).to(tl.int64))
    head = tl.program_id(1)
    dims = tl.arange(0, DIM)
    position = tl.load(positions + row)
    cell = tl.load(cells + row) * HEADS + head
    begin = position * 0
    if WINDOWED:
        begin = tl.maximum(position - window + 1, begin) // PART
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, DIM), tl.float32)
    one = tl.zeros((1,), tl.int64)
    for part in range(begin, position // PART + 1):
        at = cell + part * HEADS + one
        high = tl.load(tops + at)
        new = tl.maximum(top, high)
        base = tl.where(new > float("-inf"), new, 0.0)
        keep = tl.exp2(top - base)
        share = tl.exp2(high - base)
        total = total * keep + tl.load(totals + at) * share
        acc = acc * keep[:, None] + tl.load(sums + (at * DIM)[:, None] + dims[None, :]) * share[:, None]
        top = new
    if SINKS:
        total = total + tl.exp2(tl.load(sinks + head + one).to(tl.float32) * LOG2E - top)
    result = acc / total[:, None]
    if ROUND:
        result = rounded(result)
    to = (row * HEADS + head + one) * DIM
    tl.store(out + to[:, None] + dims[None, :], result)


@triton.jit(do_not_specialize=["layer"])
def move(
    moves, regions, like, layer, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr
):
    """Copy the keys or values of one head, in `layer` or a later one, from one place to another. `like` is a pointer to
    numbers of their type."""
    record = moves + tl.program_id(0).to(tl.int64) * 3
    kv = tl.program_id(1) // KV_HEADS
    head = tl.program_id(1) % KV_HEADS
    number = layer + tl.program_id(2)
    source = tl.load(record)
    target = tl.load(record + 1)
    count = tl.load(record + 2)
    here, apart = first_of(regions, source >> 32, number, kv)
    there, distance = first_of(regions, target >> 32, number, kv)
    here = here + head * apart + (source & 0xFFFFFFFF) * (DIM * SIZE)
    there = there + head * distance + (target & 0xFFFFFFFF) * (DIM * SIZE)
    dims = tl.arange(0, DIM)
    for start in range(0, count, ROWS):
        at = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (at < count)[:, None]
        offset = (at * DIM)[:, None] + dims[None, :]
        data = tl.load(here.to(like.dtype) + offset, mask=inside, other=0.0)
        tl.store(there.to(like.dtype) + offset, data, mask=inside)
