"""Weights in blocks: what the blocks mean, how they are packed, and products of 8 bits over them."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.gguf_files import MIXTURE, blocks, write
from torch import nn

from keepwarm.config import EngineConfig
from keepwarm.core.blocks import token_ids
from keepwarm.runtime.agreement import disagreement
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.device.host import HostPort
from keepwarm.runtime.loader import LoadedModel, load
from keepwarm.runtime.native.blocks import KINDS, BlockLinear, Blocks, Packed, can_compute, raw_bytes
from keepwarm.runtime.native.decoder import unsupported
from keepwarm.runtime.native.families import described
from keepwarm.runtime.native.outline import Outline
from keepwarm.runtime.probe import probe
from keepwarm.runtime.runner import Runner

pytestmark = [
    pytest.mark.slow,  # kernels of their own are compiled for these tests
    pytest.mark.skipif(not can_compute(), reason="no C++ compiler"),
    pytest.mark.host_memory("the lean decoder attends to the host's memory"),
]
LENGTH = 90
EVERY = {  # kinds of 4 to 8 bits in one model
    "attn_q": "Q4_0",
    "attn_k": "Q4_1",
    "attn_v": "Q5_0",
    "attn_output": "Q5_1",
    "ffn_gate": "Q5_K",
    "ffn_up": "Q4_K",
    "ffn_down": "Q6_K",
    "output": "Q8_0",
    "": "Q5_K",
}

OTHERS = {  # kinds of few bits, and kinds whose codes stand for numbers of a table
    "attn_q": "IQ4_NL",
    "attn_k": "IQ4_XS",
    "attn_v": "MXFP4",
    "attn_output": "Q3_K",
    "ffn_gate": "IQ4_XS",
    "ffn_up": "MXFP4",
    "ffn_down": "Q3_K",
    "output": "Q2_K",
    "": "IQ4_XS",
}


def of(kind: str, rows: int, columns: int, seed: int = 0) -> Blocks:
    return Blocks(raw_bytes(blocks(kind, rows, columns, seed)), KINDS[kind], columns)


@pytest.fixture(scope="module", params=["every-float32", "every-bfloat16", "mixture-float32", "others-float32"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    kinds, dtype = request.param.split("-")
    path = write(
        tmp_path_factory.mktemp("gguf") / "m.gguf", {"every": EVERY, "mixture": MIXTURE, "others": OTHERS}[kinds]
    )
    return load(path, EngineConfig.build(dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_mean_what_gguf_says(kind: str) -> None:
    """To the bit."""
    weight = of(kind, 20, 512)
    theirs = gguf.dequantize(weight.raw.numpy(), gguf.GGMLQuantizationType(KINDS[kind]))
    assert np.array_equal(weight.widened(torch.arange(20)).numpy(), theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_product_rounds_as_float32_does(kind: str) -> None:
    weight, x = of(kind, 20, 512), torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    exact = x.double() @ weight.widened(torch.arange(20)).double().T
    assert torch.allclose(weight.product(x).double(), exact, atol=1e-5 * float(exact.abs().max()))


def test_packed_weights_take_little_more_room_than_the_file() -> None:
    for kind in KINDS:
        weight = of(kind, 256, 2048)
        assert Packed([weight]).nbytes <= (1.06 if kind == "Q3_K" else 1.05) * weight.raw.numel()


def arena(model: LoadedModel) -> Arena:
    return Arena(model.geometry, LENGTH, HostPort())


def run(model: LoadedModel, ids: list[int], cuts: list[int]) -> tuple[torch.Tensor, Arena]:
    """Logits of every row, and the KV."""
    lean, held = model.runner.lean, arena(model)
    assert lean is not None
    logits = [
        lean.step([token_ids(ids[a:b])], [a], [held.sequenced()], range(b - a))
        for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)
    ]
    return torch.cat(logits), held


def test_logits_are_near_those_of_the_widened_weights(model: LoadedModel) -> None:
    """Only 8 bits of the other operand, and bfloat16 of keys and values, make a difference."""
    ids = np.random.default_rng(0).integers(0, 256, LENGTH).tolist()
    mine, _ = run(model, ids, [])
    with torch.inference_mode():
        theirs = model.model(torch.tensor([ids])).logits[0].float()
    scale = float(theirs.abs().max())
    assert float((mine - theirs).abs().max()) < 0.04 * scale
    assert float((mine - theirs).abs().mean()) < 0.01 * scale


@settings(max_examples=8, deadline=None, derandomize=True)
@given(cuts=st.sets(st.integers(1, LENGTH - 1), max_size=5), seed=st.integers(0, 2))
def test_no_cut_changes_a_bit(model: LoadedModel, cuts: set[int], seed: int) -> None:
    ids = np.random.default_rng(seed).integers(0, 256, LENGTH).tolist()
    whole, first = run(model, ids, [])
    parts, second = run(model, ids, sorted(cuts))
    assert torch.equal(whole, parts)
    for a, b in zip(first.layers, second.layers, strict=True):
        assert a.keys is not None
        assert b.keys is not None
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)  # type: ignore[arg-type]


def test_neither_threads_nor_neighbours_change_a_bit(model: LoadedModel) -> None:
    ids = np.random.default_rng(3).integers(0, 256, LENGTH).tolist()
    lean = model.runner.lean
    assert lean is not None
    alone, _ = run(model, ids, [])
    arenas = [arena(model) for _ in range(3)]  # their memory is freed with them
    others = [each.sequenced() for each in arenas]
    tokens = [token_ids(ids[:17]), token_ids(ids[::-1]), token_ids(ids)]
    together = lean.step(tokens, [0, 0, 0], others, range(17 + LENGTH, 17 + 2 * LENGTH))
    assert torch.equal(alone, together)
    try:
        for lean.threads in (1, 2, 3):
            assert torch.equal(alone, run(model, ids, [])[0])
    finally:
        lean.threads = None


def test_only_whole_blocks_of_the_right_shape_are_covered(model: LoadedModel) -> None:
    """The kernels trust kinds, lengths and shapes."""
    mlp = model.model.model.layers[1].mlp
    up, own = mlp.up_proj, mlp.up_proj.blocks
    others = {
        "weights of which only some are in blocks": nn.Linear(256, 512, bias=False, dtype=model.model.dtype),
        "blocks of another kind or length": BlockLinear(replace(own, kind=KINDS["Q8_0"]), None),
        "layer 1: up of shape [496, 256], where": BlockLinear(replace(own, raw=own.raw[:496]), None),
    }
    for told, other in others.items():
        mlp.up_proj = other
        try:
            assert unsupported(model.model, [None] * 2).startswith(told)
        finally:
            mlp.up_proj = up
    assert unsupported(model.model, [None] * 2) == ""


def test_the_outline_names_weights_in_blocks(model: LoadedModel) -> None:
    """By their place and kind: a digest of their bytes would take as long as reading the file."""
    told = Outline(model.model).of(described(model.model))
    up = model.model.model.layers[1].mlp.up_proj.blocks
    place = ["model.layers.1.mlp.up_proj.weight", 0, list(up.raw.shape), list(up.raw.stride())]
    assert told["layers"][1]["mlp"]["up"]["weight"] == {"raw": place, "kind": up.kind, "columns": 256}
    assert told["head"]["raw"][0] == "lm_head.weight"


def test_the_comparison_at_load_sees_a_fault(model: LoadedModel) -> None:
    own = Runner(model.model, None)
    assert disagreement(model.runner, own, probe(own)) == ""
    mlps = [layer.mlp for layer in model.model.model.layers]
    for mlp in mlps:
        mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj
    try:
        assert disagreement(model.runner, own, probe(own)).startswith("logits differ by ")
    finally:
        for mlp in mlps:
            mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj
