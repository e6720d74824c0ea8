"""What recomputed tokens carry over to their neighbours: the compiled kernel against torch, and what it means."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.core.geometry import KVGeometry
from keepwarm.core.rope import Rotary
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.blend.carry import _COMMON, _NEAR, _NOISE, _REACH, Changes
from keepwarm.runtime.device.host import HostPort
from keepwarm.runtime.native.build import CHUNKS, compiled

LENGTH, DIM = 700, 80  # of both kinds of products in the kernel: 64 numbers at a time, and 16
SPANS = [(20, 90), (90, 100), (110, 690)]  # one is longer than a window
ROTARY = Rotary(DIM, tuple((10_000.0 ** (-np.arange(0, DIM, 2) / DIM)).tolist()))
PARTIAL = Rotary(DIM, ROTARY.frequencies[:5], attention_factor=1.2)


def filled(dtype: str, seed: int) -> Arena:
    arena = Arena(KVGeometry.uniform(2, 3, DIM, dtype), LENGTH, HostPort())
    generator = torch.Generator().manual_seed(seed)
    for layer in arena.layers:
        for plane in (layer.keys, layer.values):
            assert plane is not None
            plane.copy_(torch.randn(plane.shape, generator=generator))
    return arena


def planes(arena: Arena) -> list[torch.Tensor]:
    return [plane[0] for layer in arena.layers for plane in (layer.keys, layer.values) if plane is not None]


def recomputed(arena: Arena, chosen: np.ndarray, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for plane in planes(arena):
        plane[:, chosen] += torch.randn(plane[:, chosen].shape, generator=generator).to(plane.dtype)


@pytest.mark.skipif(compiled(CHUNKS) is None, reason="no compiler here")
@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([ROTARY, PARTIAL, None]),
    st.sets(st.sampled_from([p for start, end in SPANS for p in range(start, end)]), min_size=1, max_size=200),
)
def test_the_kernel_does_what_torch_does(dtype: str, rotary: Rotary | None, positions: set[int]) -> None:
    chosen = np.array(sorted(positions))
    found = []
    for native in (True, False):
        arena = filled(dtype, 1)
        changes = Changes(arena, chosen, SPANS, [rotary] * 2, native=native)
        recomputed(arena, chosen, 2)
        if native and changes.windows:
            assert changes._carried()
        else:
            changes.carry()
        found.append(planes(arena))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-2 if dtype == "bfloat16" else 1e-4, rtol=1e-2)


@pytest.mark.parametrize("native", [True, False])
def test_only_tokens_of_the_same_chunk_that_were_not_recomputed_change(native: bool) -> None:
    chosen = np.array([25, 31, 60])
    arena = filled("float32", 1)
    changes = Changes(arena, chosen, SPANS, [ROTARY] * 2, native=native)
    recomputed(arena, chosen, 2)
    before = [plane.clone() for plane in planes(arena)]
    changes.carry()
    touched = np.setdiff1d(np.arange(20, 90), chosen)
    for old, new in zip(before, planes(arena), strict=True):
        differs = (old != new).any(-1).any(0).numpy()
        assert differs[touched].all()
        differs[touched] = False
        assert not differs.any()


@pytest.mark.parametrize("native", [True, False])
def test_a_change_that_all_share_is_taken_over_mostly_and_turned_with_the_keys(native: bool) -> None:
    chosen = np.arange(112, 690, 6)
    arena = filled("float32", 1)
    old = [plane.clone() for plane in planes(arena)]
    changes = Changes(arena, chosen, SPANS, [ROTARY] * 2, native=native)
    shift = np.random.default_rng(0).normal(size=(3, 1, DIM))
    rest = np.setdiff1d(np.arange(110, 690), chosen)
    moved = [ROTARY.rotate(shift, np.array([p])) for p in range(LENGTH)]
    for number, plane in enumerate(planes(arena)):
        for p in chosen:
            plane[:, p] += torch.from_numpy(moved[p] if number % 2 == 0 else shift)[:, 0].float()
    changes.carry()
    for number, (before, after) in enumerate(zip(old, planes(arena), strict=True)):
        for p in rest:
            full = torch.from_numpy(moved[p] if number % 2 == 0 else shift)[:, 0].float()
            taken = (after[:, p] - before[:, p]).flatten() @ full.flatten() / full.square().sum()
            assert 0.8 < taken <= 1.001
            torch.testing.assert_close(after[:, p] - before[:, p], taken * full, atol=1e-3, rtol=1e-3)


@settings(deadline=None)
@given(st.sets(st.integers(0, 149), min_size=1, max_size=149))
def test_smoothing_and_interpolating_is_gaussian_process_regression(positions: set[int]) -> None:
    chosen = np.array(sorted(positions))
    arena = Arena(KVGeometry.uniform(1, 1, 16, "float32"), 150, HostPort())
    (window,) = Changes(arena, chosen, [(0, 150)], [None]).windows

    def covariance(places: np.ndarray) -> np.ndarray:
        return _COMMON + _NEAR * np.exp(-np.abs(places[:, None] - chosen) / _REACH)

    noisy = covariance(chosen) + _NOISE * np.eye(len(chosen))
    expected = np.linalg.solve(noisy, covariance(window.rest).T).T  # equation 2.25
    added = window.smooth[1:][window.near["known"]]
    found = window.smooth[0] + (window.near["share"][..., None] * added).sum(1)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_chunk_without_recomputed_tokens_stays_as_it_is() -> None:
    arena = filled("float32", 1)
    before = [plane.clone() for plane in planes(arena)]
    chosen = np.arange(20, 90)  # one chunk whole, of the others nothing
    changes = Changes(arena, chosen, SPANS, [ROTARY] * 2)
    assert changes.divergence(6) == 0
    recomputed(arena, chosen, 2)
    assert changes.divergence(6) > 0
    changes.carry()
    for old, new in zip(before, planes(arena), strict=True):
        assert torch.equal(old[:, 90:], new[:, 90:])
