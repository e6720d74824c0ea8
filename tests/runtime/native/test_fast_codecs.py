"""The fast codecs equal the reference to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.values import raw

from keepwarm.core.codecs import codec, encode, fp8_values, itemsize, pack
from keepwarm.runtime.codecs import TorchCodec


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(["int8", "int4", "fp8"]),
    kv=st.integers(0, 1),
    dim=st.sampled_from([1, 7, 16, 64, 80, 128]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    tokens=st.integers(1, 200),
    seed=st.integers(0, 9),
    spread=st.sampled_from([0.0, 1e-6, 3.0, 1e4]),
    native=st.booleans(),
    data=st.data(),
)
def test_encoding_and_decoding_equal_the_reference(
    name: str, kv: int, dim: int, dtype: str, tokens: int, seed: int, spread: float, native: bool, data: st.DataObject
) -> None:
    how = codec(name)
    fast = TorchCodec(how, native=native)
    with np.errstate(over="ignore"):
        given_raw = raw(tokens, dim, dtype, seed=seed, spread=min(spread, 1e3) if dtype == "float16" else spread)
    reference = encode(given_raw, how, kv, dim, dtype)
    packed = fast.encode(given_raw, kv, dim, dtype)
    assert np.array_equal(packed, pack(reference))
    wanted = data.draw(st.integers(0, tokens))
    room = np.zeros((2, wanted + 3, dim * itemsize(dtype)), np.uint8)  # a view into something larger, as an arena's
    fast.decode(packed, kv, dim, dtype, tokens, room[:, :wanted])
    assert np.array_equal(room[:, :wanted], reference.decode()[:, :wanted])
    assert not room[:, wanted:].any()


def test_every_fp8_code_decodes_as_torch_does() -> None:
    import torch

    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(codes, fp8_values(), equal_nan=True)


def test_short_blocks_and_numbers_that_are_not_finite_are_refused() -> None:
    fast = TorchCodec(codec("int4"))
    data = raw(100, 16, "bfloat16")
    packed = fast.encode(data, 0, 16, "bfloat16")
    with pytest.raises(ValueError, match="longer"):
        fast.decode(packed[:, :-1], 0, 16, "bfloat16", 100, np.empty_like(data))
    data[0, 3, 1::2] = 0x7F
    data[0, 3, 0::2] = 0x80
    with pytest.raises(ValueError, match="finite"):
        fast.encode(data, 0, 16, "bfloat16")
