"""Rows with a LoRA adapter: logits of merged weights in float64, and bits that depend on the tokens before alone."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.adapters import ATTENTION, EVERY, MLP, adapter, loaded, merged
from tests.helpers.lean import Lean, compiled

from keepwarm.core import levels
from keepwarm.core.blocks import token_ids
from keepwarm.core.lora import Lora
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.native import build

pytestmark = [
    pytest.mark.slow,  # their kernels are compiled first
    pytest.mark.skipif(compiled is None, reason="no C++ compiler: steps run through transformers"),
    pytest.mark.host_memory("the lean decoder attends to the host's memory"),
]

COUNT = 90
IDS = [3 + i * 7919 % 600 for i in range(COUNT)]
WIDE = {"intermediate_size": 2080}  # more than two parts of a sum, and no whole ones
# Modules by family: fused, without a gate, with norms behind, with factors, side by side, with experts
CASES = {
    "llama": EVERY,
    "qwen2": ("q_proj", "v_proj", "down_proj"),
    "qwen3": MLP,
    "biased": EVERY,
    "cohere": EVERY,
    "gemma2": EVERY,
    "gemma4": EVERY,
    "granite": ("k_proj", *MLP),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "qwen3-moe": ATTENTION,
    "starcoder2": (*ATTENTION, "c_fc", "c_proj"),
    "lfm2": ("in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "w1", "w2", "w3"),
    "qwen3.5": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", *EVERY, "out_proj"),
    "qwen3-next": ("in_proj_qkvz", "in_proj_ba", "q_proj", "out_proj", "o_proj"),
}
SLOW = ("biased", "cohere", "granite", "qwen2", "qwen3", "qwen3-moe", "starcoder2")


def lean_with(family: str, dtype: torch.dtype, **changes: Any) -> Lean:
    lean = Lean(family, dtype, **changes)
    lean.decoder.adapted = lambda: build.kernels(adapters=True)
    return lean


def arena_with(lean: Lean, lora: Lora | None) -> Arena:
    arena = lean.arena()
    arena.lora = lora
    return arena


@pytest.mark.parametrize("family", [pytest.param(f, marks=[pytest.mark.slow] if f in SLOW else []) for f in CASES])
def test_logits_are_those_of_merged_weights_in_float64(family: str, tmp_path: Path) -> None:
    lean = lean_with(family, torch.float32, **(WIDE if family in ("llama", "qwen2") else {}))
    folder = adapter(tmp_path / "one", lean.model, CASES[family], rank=6, alpha=9)
    with torch.inference_mode():
        exact = merged(folder, lean.model)(torch.tensor([IDS])).logits[0]
        without = lean.model(torch.tensor([IDS])).logits[0].double()
    mine = lean.run(IDS, [31], arena_with(lean, loaded(folder, lean.model)), range(COUNT - 31)).double()
    scale = exact.abs().max()
    assert (without - exact).abs().max() > 0.05 * scale  # the adapter matters
    assert (mine - exact[31:]).abs().max() < 1e-4 * scale


@pytest.mark.parametrize("family", CASES)
def test_half_precision_is_near_float64(family: str, tmp_path: Path) -> None:
    lean = lean_with(family, torch.bfloat16)
    folder = adapter(tmp_path / "one", lean.model, CASES[family], rank=6, alpha=9)
    with torch.inference_mode():
        exact = merged(folder, lean.model)(torch.tensor([IDS])).logits[0]
        without = lean.model(torch.tensor([IDS])).logits[0].double()
    mine = lean.run(IDS, [], arena_with(lean, loaded(folder, lean.model)), range(COUNT)).double()
    assert (mine - exact).abs().mean() < 0.25 * (without - exact).abs().mean()


class Several:
    """A model with adapters of other modules and ranks."""

    def __init__(self, family: str, dtype: torch.dtype, folder: Path) -> None:
        self.lean = lean_with(family, dtype, **(WIDE if family == "llama" else {}))
        shapes = [(EVERY, 4), (("q_proj", "o_proj"), 19), (MLP, 1)]
        made = [adapter(folder / str(i), self.lean.model, t, rank=r, seed=i) for i, (t, r) in enumerate(shapes)]
        self.loras = [loaded(each, self.lean.model) for each in made]
        self.whole = [self.lean.run(IDS, [], arena_with(self.lean, lora), range(COUNT)) for lora in self.loras]


@pytest.fixture(
    scope="module", params=[("llama", torch.float32), ("llama", torch.bfloat16), ("gemma4", torch.bfloat16)], ids=str
)
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Several:
    return Several(*request.param, tmp_path_factory.mktemp("adapters"))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(cuts=st.sets(st.integers(1, COUNT - 1), max_size=6), threads=st.integers(1, 3), which=st.integers(0, 2))
def test_no_cut_and_no_number_of_threads_changes_a_bit(
    several: Several, cuts: set[int], threads: int, which: int
) -> None:
    lean, arena = several.lean, arena_with(several.lean, several.loras[which])
    whole = arena_with(lean, several.loras[which])
    lean.run(IDS, [], whole)
    lean.decoder.threads = threads
    try:
        last = lean.run(IDS, sorted(cuts), arena, range(COUNT - max(cuts, default=0)))
    finally:
        lean.decoder.threads = None
    assert torch.equal(last, several.whole[which][max(cuts, default=0) :])
    for one, other in zip(whole.layers, arena.layers, strict=True):
        assert torch.equal(one.keys[:, :, :COUNT], other.keys[:, :, :COUNT])  # type: ignore[index]
        assert torch.equal(one.values[:, :, :COUNT], other.values[:, :, :COUNT])  # type: ignore[index]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 2), st.integers(1, COUNT)), min_size=1, max_size=5),
    steps=st.integers(1, 3),
)
def test_sequences_of_several_adapters_run_in_one_step(
    several: Several, sequences: list[tuple[int, int]], steps: int
) -> None:
    """Each row is that of its sequence alone; decoding goes on together."""
    lean = several.lean
    arenas = [arena_with(lean, several.loras[which]) for which, _ in sequences]
    ends = [max(1, length - steps) for _, length in sequences]
    tokens = [token_ids(IDS[:end]) for end in ends]
    places = [arena.sequenced() for arena in arenas]
    rows = lean.decoder.step(tokens, [0] * len(tokens), places, range(sum(ends)))
    assert torch.equal(rows, torch.cat([several.whole[w][:end] for (w, _), end in zip(sequences, ends, strict=True)]))
    last = [end - 1 for end in accumulate(ends)]
    others = [arena_with(lean, several.loras[which]) for which, _ in sequences]
    again = lean.decoder.step(tokens, [0] * len(tokens), [arena.sequenced() for arena in others], last)
    assert torch.equal(rows[last], again)
    for more in range(min(COUNT - max(ends), steps)):
        at = [end + more for end in ends]
        rows = lean.decoder.step([token_ids([IDS[i]]) for i in at], at, places, range(len(at)))
        assert torch.equal(rows, torch.stack([several.whole[w][i] for (w, _), i in zip(sequences, at, strict=True)]))


def test_a_step_has_adapters_in_all_sequences_or_in_none(several: Several) -> None:
    lean = several.lean
    places = [arena_with(lean, lora).sequenced() for lora in (None, several.loras[0])]
    with pytest.raises(ValueError, match="others without"):
        lean.decoder.step([token_ids([1])] * 2, [0, 0], places, [0, 1])


def test_kernels_of_other_machines(tmp_path: Path) -> None:
    """bfloat16 by pairs or widened: what this machine would not choose."""
    for defines in ((build.PAIRS,) if "avx512_bf16" in build.cpu_flags() else (), ()):
        plain, adapted = (build.compiled(build._KERNELS, *defines, *more) for more in ((), (levels.ADAPTERS,)))
        lean = Lean("llama", torch.bfloat16, plain)
        lean.decoder.adapted = lambda found=adapted: found  # type: ignore[misc]
        lora = loaded(adapter(tmp_path / "-".join(["a", *defines]), lean.model), lean.model)
        whole = lean.run(IDS, [], arena_with(lean, lora), range(COUNT))
        parts = lean.run(IDS, [7, 8, 40], arena_with(lean, lora), range(COUNT - 40))
        assert torch.equal(whole[40:], parts)
