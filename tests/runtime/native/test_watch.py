"""Attention that is watched: the compiled kernel against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.runtime.blend.scatter import Watch
from keepwarm.runtime.native.build import CHUNKS, compiled


@pytest.mark.skipif(compiled(CHUNKS) is None, reason="no compiler here")
@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([(1, 1), (3, 3), (7, 2)]),
    st.integers(1, 9),
    st.integers(1, 400),
    st.data(),
)
def test_the_kernel_sees_what_torch_sees(
    dtype: torch.dtype, shape: tuple[int, int], rows: int, total: int, data: st.DataObject
) -> None:
    group, kv_heads = shape
    generator = torch.Generator().manual_seed(rows + total)
    places = data.draw(st.lists(st.integers(0, total - 1), min_size=rows, max_size=rows))
    positions = np.array(sorted(places))
    queries = torch.randn(rows + 2, group * kv_heads + 3, 32, generator=generator)[:, : group * kv_heads]
    keys = torch.randn(kv_heads, total + 5, 32, generator=generator).to(dtype)[:, :total]
    found = []
    for native in (True, False):
        watch = Watch(torch.zeros(2, total), positions, 1)
        watch.see(0, queries, keys, 0.5, native=native)
        if native:
            assert watch._seen(1, queries[-rows:], keys, 0.5)
        else:
            watch.see(1, queries, keys, 0.5, native=False)
        found.append(watch.mass)
    assert not found[0][0].any()
    assert not found[0][1, positions[-1] + 1 :].any()
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("native", [True, False])
def test_scores_of_any_size_are_seen(native: bool) -> None:
    mass = torch.zeros(1, 50)
    queries, keys = torch.full((1, 1, 16), 100.0), torch.full((1, 50, 16), 100.0)
    Watch(mass, np.array([29])).see(0, queries, keys, 1.0, native=native)
    torch.testing.assert_close(mass[0, :30], torch.full((30,), 1 / 30))
    assert not mass[0, 30:].any()
