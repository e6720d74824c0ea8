"""bfloat16 weights in 12 bits: every bit is kept, and products find the same sums as with 16."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.emulated import emulated
from tests.helpers.lean import LENGTH, Lean, compiled, prompt, windows

from keepwarm.runtime.native import twelve
from keepwarm.runtime.native.decoder import LeanDecoder
from keepwarm.runtime.native.memory import WeightMemory
from keepwarm.runtime.native.twelve import Panels

pytestmark = [
    pytest.mark.skipif(compiled is None, reason="no C++ compiler: steps run through transformers"),
    pytest.mark.host_memory("weights of the lean decoder lie in the host's memory"),
]

_GROUP, _BYTES, _PART = 128, 192, 96  # weights of a group, its bytes, and those of a part, as in twelve.h and cells.h


def _read(panels: Panels, rows: int, columns: int, across: int) -> npt.NDArray[np.uint16]:
    """The bits of a matrix, read from its panels by the description in twelve.h."""
    found = np.zeros((len(panels.table) * 16, across), dtype=np.uint16)
    for number, panel in enumerate(panels.table[: -(-rows // 16)]):
        made = _groups(panel, across) if panel["others"] else _bytes(panel["at"], across * 32).view(np.uint16)
        # [columns / 2][16][2]
        found[number * 16 : number * 16 + 16] = made.reshape(across // 2, 16, 2).transpose(1, 0, 2).reshape(16, across)
    assert not found[rows:].any()
    assert not found[:, columns:].any()
    return found[:rows, :columns]


def _groups(panel: np.void, across: int) -> npt.NDArray[np.uint16]:
    count = across * 16 // _GROUP
    if panel["cells"]:
        first = _bytes(panel["cells"], 128).view(np.uint16)
        cells, places = (_sixes(_bytes(panel[part], count * _PART).reshape(count, _PART)) for part in ("at", "rest"))
        ordered = (first[cells] + places).reshape(-1)
    else:
        groups = _bytes(panel["at"], count * _BYTES).reshape(count, _BYTES)
        both, lower = groups[:, :64], groups[:, 64:].reshape(count, 2, 64)
        codes = np.stack([both & 15, both >> 4], axis=1)
        upper = panel["upper"][codes]  # [count, half, 64]
        both = lower.astype(np.uint16) | upper.astype(np.uint16) << 8
        # 16 bytes have 8 weights of one vector, then 8 of the next: [half, quarter, vector, 8]
        ordered = both.reshape(count, 2, 4, 2, 8).transpose(0, 1, 3, 2, 4).reshape(-1)
    at, listed = int(panel["others"]), ordered.view(np.uint8)
    while (other := int.from_bytes(ctypes.string_at(at, 4), "little")) != 0xFFFFFFFF:
        listed[other >> 8] = other & 255
        at += 4
    return ordered


def _sixes(parts: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    """Numbers of six bits, `[count, vector, 32]`, from parts of groups."""
    words = parts[:, :64].copy().view(np.uint16)
    more = parts[:, 64:].astype(np.uint16)
    return np.stack([words & 63, words >> 6 & 63, words >> 12 | more >> 6 << 4, more & 63], axis=1)


def _bytes(address: int, size: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(ctypes.string_at(int(address), size), dtype=np.uint8)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 25).map(lambda n: 16 * n),
    deep=st.sampled_from([2, 32]),
    rare=st.integers(0, 40),
    seed=st.integers(0, 99),
    in_parts=st.booleans(),
)
def test_every_bit_is_kept(rows: int, columns: int, deep: int, rare: int, seed: int, in_parts: bool) -> None:
    """Whatever the weights are: zeros of both signs, denormals, infinities, NaN with its payload."""
    chosen = np.random.default_rng(seed)
    weight = torch.from_numpy(chosen.standard_normal((rows, columns), dtype=np.float32)).bfloat16()
    bits = weight.view(torch.int16).numpy().view(np.uint16)
    places = chosen.integers(0, bits.size, rare)
    bits.reshape(-1)[places] = chosen.integers(0, 1 << 16, rare)
    memory = WeightMemory()
    across = -(-columns // max(deep, 8)) * max(deep, 8)
    panels = Panels(weight, deep, memory, in_parts=in_parts)
    assert np.array_equal(_read(panels, rows, columns, across), bits)
    assert (panels.errors is None) == (not panels.table["cells"].any())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 30).map(lambda n: 16 * n),
    size=st.sampled_from([1e-30, 0.02, 1, 1e20]),
    seed=st.integers(0, 99),
)
def test_errors_of_a_first_part_are_bounded(rows: int, columns: int, size: float, seed: int) -> None:
    """By the norm of what the weights are multiplied with, whatever that is: also by what is worst."""
    chosen = np.random.default_rng(seed)
    weight = torch.from_numpy(size * chosen.standard_normal((rows, columns))).bfloat16()
    memory = WeightMemory()
    panels = Panels(weight, 2, memory, in_parts=True)
    errors = panels.errors
    assert errors is not None
    whole = _read(panels, rows, columns, columns)
    for panel in panels.table[: -(-rows // 16)]:
        panel["cells"] += 128  # the middles follow the first values
        ctypes.memset(int(panel["rest"]), 0, columns * 16 // _GROUP * _PART)
    first = _read(panels, rows, columns, columns)
    exact, estimate = (torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).double() for bits in (whole, first))
    wrong = (exact - estimate).numpy()
    for x in (*chosen.standard_normal((5, columns)), *wrong):
        assert (np.abs(wrong @ x) <= errors[:rows].astype(np.float64) * np.linalg.norm(x)).all()


def test_usual_weights_take_three_quarters_of_their_bytes() -> None:
    memory = WeightMemory()
    panels = Panels(torch.randn(512, 1024).bfloat16(), 2, memory)
    assert sum(memory.storages.values()) < 0.76 * 512 * 1024 * 2
    assert panels.table["others"][:32].all()


def test_two_parts_take_no_more() -> None:
    memory = WeightMemory()
    assert Panels(torch.randn(512, 1024).bfloat16(), 2, memory, in_parts=True).table["cells"][:32].all()
    assert sum(memory.storages.values()) < 0.76 * 512 * 1024 * 2


def test_six_bits_tell_usual_weights_to_a_sixteenth() -> None:
    weight = torch.randn(512, 1024).bfloat16()
    errors = Panels(weight, 2, WeightMemory(), in_parts=True).errors
    assert errors is not None
    assert (errors[:512] < 1 / 16 * weight.float().norm(dim=1).numpy()).all()


def test_weights_of_every_size_stay_in_sixteen_bits() -> None:
    memory = WeightMemory()
    weight = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 15, (64, 64)).astype(np.int16)).view(
        torch.bfloat16
    )
    panels = Panels(weight, 2, memory)
    assert not panels.table["others"].any()
    assert np.array_equal(_read(panels, 64, 64, 64), weight.view(torch.int16).numpy().view(np.uint16))


def test_stacked_matrices_follow_each_other() -> None:
    """So an expert's first panel is found from its number."""
    memory, weight = WeightMemory(), torch.randn(3, 32, 64).bfloat16()
    panels = Panels(weight.transpose(1, 2).contiguous().transpose(1, 2), 2, memory)  # as some models keep them
    read = _read(panels, 96, 64, 64)
    assert np.array_equal(read, weight.view(96, 64).view(torch.int16).numpy().view(np.uint16))


def strange(model: Any) -> Any:
    """The model, in which every 700th weight of a matrix has another size than all others."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.view(-1)[::700] *= 2.0**-40
    return model


ODD = {"hidden_size": 80, "intermediate_size": 112, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 16}


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {}), ("llama", ODD), ("qwen3-moe", {})], ids=["llama", "odd", "qwen3-moe"]
)
@pytest.mark.parametrize("units", ["here", pytest.param("emulated", marks=pytest.mark.slow)])
def test_logits_are_those_of_weights_in_sixteen_bits(
    family: str, changes: dict[str, Any], units: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = compiled if units == "here" else emulated()
    if kernels is None or kernels.library.keepwarm_deep() == 1:
        pytest.skip("this processor does not multiply bfloat16, or multiplies it in tiles, so none are emulated")
    lean = Lean(family, torch.bfloat16, kernels, **changes)
    model, of = strange(lean.model), windows(lean.geometry)
    packed = LeanDecoder(model, kernels, of)
    monkeypatch.setattr(twelve, "_MOST_COLUMNS", 0)
    wide = LeanDecoder(model, kernels, of)
    assert sum(packed.storages.values()) < sum(wide.storages.values())
    for count in (1, 2, 3, 5, 8, 9, 12, 13, 24, 25, 33, 40, *([LENGTH] if units == "here" else [65])):
        ids = [token % lean.model.config.vocab_size for token in prompt(count, 0)]
        found = []
        for lean.decoder in (packed, wide):
            found.append(lean.run(ids, [], lean.arena(), range(count)))
        assert torch.isfinite(found[0]).all()
        assert torch.equal(*found), count
