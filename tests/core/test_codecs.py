"""Codecs: slicing, extending, trimming and joining move codes and scales; errors stay within half a step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.values import raw

from keepwarm.core.codecs import (
    GROUP,
    Codec,
    codec,
    concatenate,
    encode,
    fp8_values,
    itemsize,
    narrow,
    pack,
    relocated,
    unpack,
    widen,
)
from keepwarm.errors import ConfigError

NAMES = ("raw", "int8", "int4", "fp8")
DTYPES = ("float32", "bfloat16", "float16")


cases = {
    "name": st.sampled_from(NAMES),
    "kv": st.integers(0, 1),
    "dim": st.sampled_from([1, 7, 16, 64, 80, 128]),
    "dtype": st.sampled_from(DTYPES),
    "tokens": st.integers(0, 200),
    "seed": st.integers(0, 9),
}


@settings(max_examples=150, deadline=None)
@given(**cases, cuts=st.lists(st.integers(0, 200), max_size=4))
def test_parts_of_an_encoding_are_the_encoding_of_parts_to_the_bit(
    name: str, kv: int, dim: int, dtype: str, tokens: int, seed: int, cuts: list[int]
) -> None:
    given_raw = raw(tokens, dim, dtype, seed=seed)
    whole = encode(given_raw, codec(name), kv, dim, dtype)
    decoded = whole.decode()
    assert decoded.shape == given_raw.shape
    points = sorted({0, tokens, *(min(cut, tokens) for cut in cuts)})
    parts = [whole.slice(a, b) for a, b in pairwise(points)]
    for part, (a, b) in zip(parts, pairwise(points), strict=True):
        assert np.array_equal(part.decode(), decoded[:, a:b])
    if parts:
        joined = concatenate(parts)
        assert joined.tokens == tokens
        assert np.array_equal(joined.decode(), decoded)
        assert np.array_equal(joined.trim(points[1]).decode(), decoded[:, : points[1]])


@settings(max_examples=100, deadline=None)
@given(**cases, more=st.lists(st.integers(1, 90), max_size=4))
def test_extending_never_changes_what_was_quantized(
    name: str, kv: int, dim: int, dtype: str, tokens: int, seed: int, more: list[int]
) -> None:
    data = raw(tokens + sum(more), dim, dtype, seed=seed)
    grown = encode(data[:, :tokens], codec(name), kv, dim, dtype)
    at = tokens
    for count in more:
        settled = sum(group.tokens for group in grown.groups if group.scale is not None)
        before = grown.decode()[:, :settled]
        grown = grown.extend(data[:, at : at + count])
        at += count
        assert grown.tokens == at
        assert np.array_equal(grown.decode()[:, :settled], before)
        assert sum(group.tokens for group in grown.groups if group.scale is None) <= 32 or name == "raw"


@settings(max_examples=100, deadline=None)
@given(**cases)
def test_errors_stay_within_half_a_step(name: str, kv: int, dim: int, dtype: str, tokens: int, seed: int) -> None:
    data = raw(tokens, dim, dtype, seed=seed)
    how = codec(name)
    encoded = encode(data, how, kv, dim, dtype)
    seen, true = widen(encoded.decode(), dtype), widen(data, dtype)
    rounding = np.abs(true).max(initial=0) * {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-10}[dtype]
    at = 0
    for group in encoded.groups:
        a, b = at, at + group.tokens
        at = b
        error = np.abs(seen[:, a:b] - true[:, a:b])
        if group.scale is None:
            assert not error.any()
            continue
        scale = group.scale.astype(np.float32)
        step = scale if kv == 0 else np.repeat(scale, how.group, axis=2)[:, :, :dim]
        slack = 0.51 * step if how.name != "fp8" else 16.1 * step  # near 448 numbers of e4m3 are 32 apart
        zero = 0 if group.zero is None else np.abs(group.zero.astype(np.float32)).max() * 2**-11
        assert (error <= slack + rounding + zero + 15 * step * 2**-10).all()


@settings(max_examples=60, deadline=None)
@given(**cases)
def test_bytes_of_a_fresh_block(name: str, kv: int, dim: int, dtype: str, tokens: int, seed: int) -> None:
    if name == "raw" or not tokens:
        return
    how = codec(name)
    encoded = encode(raw(tokens, dim, dtype, seed=seed), how, kv, dim, dtype)
    packed = pack(encoded)
    assert packed.shape == (2, how.block_bytes(tokens, dim, itemsize(dtype), kv))
    padded = np.concatenate([packed, np.full((2, 9), 7, np.uint8)], axis=1)
    again = unpack(padded, how, kv, dim, dtype, tokens)
    assert np.array_equal(again.decode(), encoded.decode())
    assert np.array_equal(pack(again), packed)
    with pytest.raises(ValueError, match="bytes"):
        unpack(packed[:, :-1], how, kv, dim, dtype, tokens)


def test_only_fresh_blocks_are_packed() -> None:
    encoded = encode(raw(130, 16, "float32"), codec("int4"), 0, 16, "float32")
    with pytest.raises(ValueError, match="fresh"):
        pack(encoded.slice(3, 130))


@pytest.mark.parametrize(("name", "most"), [("int8", 0.55), ("int4", 0.30), ("fp8", 0.55)])
def test_sizes_at_2000_tokens(name: str, most: float) -> None:
    full = 2000 * 64 * 2
    assert sum(codec(name).block_bytes(2000, 64, 2, kv) for kv in (0, 1)) <= most * 2 * full
    keys = encode(raw(2000, 64, "bfloat16", heads=1), codec(name), 0, 64, "bfloat16")
    assert keys.nbytes == codec(name).block_bytes(2000, 64, 2, 0)


def test_keys_have_scales_per_channel_and_values_per_token() -> None:
    data = raw(GROUP, 64, "float32")
    data.view(np.float32)[:, :, 5] += 1000  # one large channel
    errors = [
        np.abs(widen(encode(data, codec("int4"), kv, 64, "float32").decode(), "float32") - data.view(np.float32))
        for kv in (0, 1)
    ]
    assert errors[0][:, :, 9].max() * 10 < errors[1][:, :, 9].max()


def test_relocation_decodes_and_encodes_again() -> None:
    data = raw(150, 64, "float32")
    how = codec("int8")
    keys = encode(data, how, 0, 64, "float32").slice(10, 150)
    angle = 0.3

    def rotate(part: Any) -> Any:
        values = widen(part, "float32")
        a, b = values[:, :, :32], values[:, :, 32:]
        turned = np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=2)
        return narrow(turned.astype(np.float32), "float32")

    moved = relocated(keys, rotate)
    assert [group.tokens for group in moved.groups] == [group.tokens for group in keys.groups]
    expected = widen(rotate(keys.decode()), "float32")
    assert np.abs(widen(moved.decode(), "float32") - expected).max() < 0.4


def test_what_cannot_be_encoded_is_refused() -> None:
    data = raw(GROUP, 16, "float32")
    data.view(np.float32)[0, 3, 2] = np.nan
    with pytest.raises(ValueError, match="finite"):
        encode(data, codec("int4"), 0, 16, "float32")
    with pytest.raises(ConfigError, match="kv_codec"):
        codec("int3")
    one = encode(raw(GROUP, 16, "float32"), codec("int4"), 0, 16, "float32")
    with pytest.raises(ValueError, match="one codec"):
        concatenate([one, encode(raw(GROUP, 16, "float32"), codec("int8"), 0, 16, "float32")])
    for a, b in ((-1, 3), (0, 65), (5, 4)):
        with pytest.raises(IndexError):
            one.slice(a, b)


def test_equal_and_huge_values() -> None:
    for value in (0.0, 1.5, -3e4):
        data = np.full((1, GROUP, 8), value, np.float32)
        seen = encode(narrow(data, "float32"), codec("int4"), 0, 8, "float32").decode().view(np.float32)
        assert np.abs(seen - data).max() <= 0.001 * abs(value)


def test_identity_tells_codecs_apart() -> None:
    assert len({codec(name).identity for name in NAMES} | {Codec("int4", 32).identity}) == 5
    values = fp8_values()
    assert values[0x7E] == 448
    assert np.isnan(values[[0x7F, 0xFF]]).all()
