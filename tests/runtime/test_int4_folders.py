"""Folders of GPTQ, AWQ and compressed-tensors: loaded into the compiled kernels, their logits, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.adapters import adapter
from tests.helpers.int4_folders import Folder, How, quantized, write

from keepwarm import Engine
from keepwarm.config import EngineConfig
from keepwarm.core.blocks import token_ids
from keepwarm.errors import UnsupportedModel
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.device.host import HostPort
from keepwarm.runtime.loader import LoadedModel, load
from keepwarm.runtime.native.blocks import KINDS, BlockLinear, Blocks, can_compute
from keepwarm.runtime.native.grouped import GroupedLinear

pytestmark = [
    pytest.mark.slow,  # kernels of their own are compiled for these tests
    pytest.mark.skipif(not can_compute(), reason="no C++ compiler"),
    pytest.mark.host_memory("the lean decoder attends to the host's memory"),
]
ASKED: dict[str, Any] = {
    "messages": [{"role": "system", "content": "once upon a time " * 40}, {"role": "user", "content": "Hello"}],
    "max_new_tokens": 5,
    "trace": True,
}
LENGTH = 90
METHODS = {
    "gptq": How("gptq"),
    "awq": How("awq", 64, symmetric=False),
    "compressed": How("compressed-tensors", 32, symmetric=False, dtype=torch.bfloat16),
    "channel": How("compressed-tensors", None, dtype=torch.bfloat16),
}
Write = Callable[..., Folder]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Write:
    """Writes a folder of its own."""

    def written(how: How = METHODS["gptq"], **others: Any) -> Folder:
        return write(tmp_path_factory.mktemp("int4"), how, tokenizer, **others)

    return written


@pytest.fixture(
    scope="module", params=[(name, dtype) for name in METHODS for dtype in ("float32", "bfloat16")], ids=str
)
def loaded(request: pytest.FixtureRequest, folder: Write) -> tuple[Folder, LoadedModel]:
    name, dtype = request.param
    made = folder(METHODS[name], family="llama" if name == "awq" else "qwen2")
    return made, load(made.path, EngineConfig.build(dtype=dtype))


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed"])
@pytest.mark.parametrize("family", ["phi3", "glm4"])
def test_products_that_are_several_in_one(family: str, method: str, folder: Write, tmp_path: Path) -> None:
    """Also with an adapter beside them: its parts are those of the fused product."""
    made = folder(METHODS[method], family=family)
    model = load(made.path, EngineConfig.build(dtype="float32"))
    with torch.inference_mode():
        exact = made.model(torch.tensor([some_ids()])).logits[0]
    mine, _ = run(model, some_ids(), [])
    assert float((mine - exact).abs().max()) < 0.05 * float(exact.abs().max())
    targets = ("qkv_proj", "gate_up_proj") if family == "phi3" else ("gate_up_proj", "q_proj")
    one = adapter(tmp_path / "one", model.model, targets, size=0.05)
    with Engine.from_pretrained(made.path, dtype="float32", adapters={"one": one}) as engine:
        ids = [token % 300 for token in some_ids()]
        with_it, without = (engine.generate(ids, adapter=name, max_new_tokens=1, trace=True) for name in ("one", None))
        assert with_it.logits_digest != without.logits_digest


EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"moe_intermediate_size": 128},
    "qwen2-moe": {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 256},
    "mixtral": {"intermediate_size": 128},
    "glm4-moe": {"moe_intermediate_size": 128, "head_dim": 64},
}


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed"])
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_run_on_the_kernels(family: str, method: str, folder: Write) -> None:
    """Each has tensors of its own in the folder; cold, in parts and beside others rows have the same bits."""
    made = folder(METHODS[method], family=family, config=EXPERTS[family])
    model = load(made.path, EngineConfig.build(dtype="float32"))
    ids = some_ids()
    with torch.inference_mode():
        exact = made.model(torch.tensor([ids])).logits[0]
        modules = model.model(torch.tensor([ids])).logits[0].double()
    assert float((modules - exact).abs().max()) < 1e-3 * float(exact.abs().max())
    mine, _ = run(model, ids, [])
    assert torch.equal(mine, run(model, ids, [1, 30, 31])[0])
    # rounding to 8 bits may move a row to another expert, and with it all that follows
    assert float((mine - exact).abs().mean(-1).median()) < 0.02 * float(exact.abs().max())


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_run_on_the_kernels_in_half_precision(family: str, method: str, folder: Write) -> None:
    """Rounding may have a row choose other experts when a prompt is computed in parts: that is no reason to cache
    nothing."""
    made = folder(METHODS[method], family=family, config=EXPERTS[family])
    model = load(made.path, EngineConfig.build(dtype="bfloat16"))
    assert not model.uncached_reason
    assert model.runner.lean is not None


def copied(source: str, target: str) -> Callable[[dict[str, torch.Tensor]], None]:
    """Have an expert's tensors under other names, too."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if source in name]:
            tensors[name.replace(source, target)] = tensors[name].clone()

    return change


def without_one(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if ".experts.3.up_proj." in name]:
        del tensors[name]


@pytest.mark.parametrize(
    ("family", "changed", "words"),
    [
        ("qwen3-moe", without_one, r"layers\.0\.mlp\.experts has 39 .* up; expected 40\. Expert 3 is missing"),
        ("qwen3-moe", copied(".experts.0.", ".experts.40."), r"expected 40\. Expert 40 is one too many"),
        ("qwen3-moe", copied(".experts.0.up_proj.", ".experts.0.w3."), "w3 has the up of an expert that is there"),
        ("mixtral", copied(".mlp.gate.", ".block_sparse_moe.gate."), r"gate\.weight twice"),
        ("mixtral", copied(".block_sparse_moe.experts.0.w1.", ".mlp.experts.0.w1."), "twice"),
    ],
)
def test_experts_that_are_missing_or_there_twice_are_refused(
    family: str, changed: Callable[[dict[str, torch.Tensor]], None], words: str, folder: Write
) -> None:
    made = folder(family=family, config=EXPERTS[family], changed=changed)
    with pytest.raises(UnsupportedModel, match=words):
        load(made.path, EngineConfig.build(dtype="float32"))


def test_experts_biases_of_zeros_are_passed_over(folder: Write) -> None:
    def more(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name and name.endswith(".qweight")]:
            tensors[name.replace("qweight", "bias")] = torch.zeros(4, dtype=torch.float16)

    made = folder(family="qwen3-moe", config=EXPERTS["qwen3-moe"], changed=more)
    assert load(made.path, EngineConfig.build(dtype="float32")).runner.lean is not None


def test_groups_that_the_configuration_does_not_know_are_refused(folder: Write) -> None:
    made = folder(How("gptq", 64), quantization={"group_size": 128})
    with pytest.raises(UnsupportedModel, match="groups of 64 columns; its configuration says 128"):
        load(made.path, EngineConfig.build(dtype="float32"))


def run(model: LoadedModel, ids: list[int], cuts: list[int]) -> tuple[torch.Tensor, Arena]:
    """Logits of every row, and the KV."""
    lean, held = model.runner.lean, Arena(model.geometry, LENGTH, HostPort())
    assert lean is not None
    parts = zip([0, *cuts], [*cuts, len(ids)], strict=True)
    return torch.cat([lean.step([token_ids(ids[a:b])], [a], [held.sequenced()], range(b - a)) for a, b in parts]), held


def some_ids(seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, 40_000, LENGTH).tolist()
    return found


def test_logits_are_those_of_the_weights_that_the_codes_mean(loaded: tuple[Folder, LoadedModel]) -> None:
    """Modules compute in float32; kernels round the other operand to 8 bits. The reference is in float64."""
    made, model = loaded
    ids = some_ids()
    with torch.inference_mode():
        exact = made.model(torch.tensor([ids])).logits[0]
        modules = model.model(torch.tensor([ids])).logits[0].double()
    scale = float(exact.abs().max())
    near = 1e-4 if model.model.dtype is torch.float32 else 0.04
    assert float((modules - exact).abs().max()) < near * scale
    mine, _ = run(model, ids, [])
    assert float((mine - exact).abs().max()) < 0.05 * scale
    assert float((mine - exact).abs().mean()) < 0.01 * scale


@settings(max_examples=6, deadline=None, derandomize=True)
@given(cuts=st.sets(st.integers(1, LENGTH - 1), max_size=5), seed=st.integers(0, 2))
def test_no_cut_changes_a_bit(loaded: tuple[Folder, LoadedModel], cuts: set[int], seed: int) -> None:
    _, model = loaded
    whole, first = run(model, some_ids(seed), [])
    parts, second = run(model, some_ids(seed), sorted(cuts))
    assert torch.equal(whole, parts)
    for a, b in zip(first.layers, second.layers, strict=True):
        assert a.keys is not None
        assert b.keys is not None
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)  # type: ignore[arg-type]


def test_neither_threads_nor_neighbours_change_a_bit(loaded: tuple[Folder, LoadedModel]) -> None:
    _, model = loaded
    ids, lean = some_ids(3), model.runner.lean
    assert lean is not None
    alone, _ = run(model, ids, [])
    arenas = [Arena(model.geometry, LENGTH, HostPort()) for _ in range(3)]  # their memory is freed with them
    others = [each.sequenced() for each in arenas]
    tokens = [token_ids(ids[:17]), token_ids(ids[::-1]), token_ids(ids)]
    together = lean.step(tokens, [0, 0, 0], others, range(17 + LENGTH, 17 + 2 * LENGTH))
    assert torch.equal(alone, together)
    try:
        for lean.threads in (1, 2, 3):
            assert torch.equal(alone, run(model, ids, [])[0])
    finally:
        lean.threads = None


def test_the_kernels_agree_with_the_same_weights_as_blocks_of_gguf(folder: Write) -> None:
    """Symmetric groups of 32 are blocks of Q4_0: the same numbers, and another packing.

    Sums are rounded elsewhere, and where that moves one of the other operand's 8 bits, all later rows differ by more.
    """
    model = load(folder(How("gptq", 32)).path, EngineConfig.build(dtype="float32"))
    mine, _ = run(model, some_ids(), [])
    for name, module in list(model.model.named_modules()):
        if isinstance(module, GroupedLinear):
            model.model.set_submodule(name, BlockLinear(as_q4_0(module), module.bias))
    model.namespace()  # packs the changed weights
    others, _ = run(model, some_ids(), [])
    assert model.runner.lean is not None
    apart = (mine - others).abs().amax(-1) / mine.abs().amax(-1)
    assert float(apart[:8].min()) < 1e-5
    assert float(apart.max()) < 0.04


def as_q4_0(module: GroupedLinear) -> Blocks:
    weight = module.blocks
    scales = weight.scales.view(torch.float16).T.reshape(weight.rows, -1, 1)
    codes = weight.widened(torch.arange(weight.rows)).reshape(weight.rows, -1, 32) / scales.float() + 8
    codes = codes.round().to(torch.uint8)
    joined = codes[..., :16] | codes[..., 16:] << 4
    raw = torch.cat([scales.contiguous().view(torch.uint8), joined], -1).reshape(weight.rows, -1)
    return Blocks(raw, KINDS["Q4_0"], weight.columns)


@pytest.mark.parametrize("how", METHODS.values(), ids=METHODS)
def test_cold_warm_and_restarted_answers_are_equal_to_the_bit(folder: Write, how: How, tmp_path: Path) -> None:
    path = folder(how, shards=2).path
    with Engine.from_pretrained(path, store=tmp_path / "store") as engine:
        cold, warm = engine.generate(**ASKED), engine.generate(**ASKED)
    with Engine.from_pretrained(str(path), store=tmp_path / "store") as engine:
        restarted = engine.generate(**ASKED)
    assert cold.cached_tokens == 0
    assert warm.cached_tokens > 100
    assert restarted.cached_by_tier.get("disk", 0) > 100
    assert {each.exactness for each in (cold, warm, restarted)} == {"exact"}
    assert len({each.logits_digest for each in (cold, warm, restarted)}) == 1
    assert len({each.token_ids for each in (cold, warm, restarted)}) == 1


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "starcoder2"])
def test_families_and_tied_heads(folder: Write, family: str) -> None:
    made = folder(METHODS["awq"], family=family, config={"tie_word_embeddings": True})
    model = load(made.path, EngineConfig.build(dtype="float32"))
    assert model.runner.lean is not None
    with torch.inference_mode():
        exact = made.model(torch.tensor([some_ids()])).logits[0]
    mine, _ = run(model, some_ids(), [])
    assert float((mine - exact).abs().max()) < 0.05 * float(exact.abs().max())


def test_short_convolutions(folder: Write, tmp_path: Path) -> None:
    made = folder(METHODS["gptq"], family="lfm2")
    ids = [token % 300 for token in some_ids()]
    with Engine.from_pretrained(made.path, store=tmp_path) as engine:
        assert engine.pipeline.model.runner.lean is not None
        cold, warm = (engine.generate(ids, max_new_tokens=2, trace=True) for _ in range(2))
        assert (cold.cached_tokens, warm.cached_tokens, warm.exactness) == (0, len(ids) - 1, "exact")
        assert warm.logits_digest == cold.logits_digest


def test_content_is_the_identity_not_the_name(folder: Write) -> None:
    def flipped(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.qweight"][0, 0] ^= 1

    def other_zero(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.qzeros"][0, 0] ^= 1

    config = EngineConfig.build()
    own, same, other, zero = (
        load(folder(**how).path, config).identity for how in ({}, {}, {"changed": flipped}, {"changed": other_zero})
    )
    assert own == same
    assert len({own.weights, other.weights, zero.weights}) == 3
    assert '"quant_method":"gptq"' in own.quantization


def test_what_is_damaged_is_said(folder: Write) -> None:
    def refused(path: Path, *words: str) -> None:
        with pytest.raises(UnsupportedModel) as error:
            load(path, EngineConfig.build())
        assert all(word in str(error.value) for word in (*words, str(path)))

    up = "model.layers.1.mlp.up_proj."
    for left in (100, 60_000):
        cut = folder().path
        weights = cut / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:left])
        refused(cut, "not a whole safetensors file", "fetch it again")
    garbage = folder().path
    (garbage / "model.safetensors").write_bytes(b"PK" * 100)
    refused(garbage, "not a whole safetensors file")
    gone = folder(shards=2).path
    (gone / "model-00002-of-00002.safetensors").unlink()
    refused(gone, "model-00002-of-00002.safetensors")

    def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
        return lambda tensors: tensors.__delitem__(name)

    refused(folder(changed=without(up + "scales")).path, up[:-1], "no scales", "qweight")
    refused(folder(changed=without("model.layers.1.post_attention_layernorm.weight")).path, "lacks", "layernorm")
    refused(folder(changed=without("model.layers.1.self_attn.q_proj.bias")).path, "q_proj", "lacks its bias")

    def short(tensors: dict[str, torch.Tensor]) -> None:
        tensors[up + "qweight"] = tensors[up + "qweight"][:-1]

    refused(folder(changed=short).path, up[:-1], "[31, 512]", "expected [32, 512]")


def test_what_does_not_map_goes_to_transformers(folder: Write) -> None:
    """Without the packages it needs, the error gives both reasons."""

    def refused(words: str, how: How = METHODS["gptq"], **others: Any) -> None:
        with pytest.raises(UnsupportedModel, match="does not load: .*do not run on the compiled kernels") as error:
            load(folder(how, **others).path, EngineConfig.build())
        assert words in str(error.value)
        assert "pip install" in str(error.value)

    def reordered(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.g_idx"] = tensors["model.layers.0.mlp.up_proj.g_idx"].flip(0)

    def unpacked(tensors: dict[str, torch.Tensor]) -> None:  # as older versions of compressed-tensors wrote them
        for name in [name for name in tensors if name.endswith("weight_zero_point")]:
            tensors[name] = torch.zeros(8 * len(tensors[name]), tensors[name].shape[1], dtype=torch.int8)

    refused("zeros in torch.int8", METHODS["compressed"], changed=unpacked)
    refused("bits is 3", quantization={"bits": 3})
    refused("bits is 8", METHODS["awq"], quantization={"bits": 8})
    refused("desc_act", quantization={"desc_act": True})
    refused("desc_act", changed=reordered)
    refused("version is 'gemv'", METHODS["awq"], quantization={"version": "gemv"})
    refused("format is 'float-quantized'", METHODS["channel"], quantization={"format": "float-quantized"})
    outputs = {"group_0": {"weights": {"num_bits": 4, "strategy": "channel"}, "output_activations": {"num_bits": 8}}}
    refused("output_activations", METHODS["channel"], quantization={"config_groups": outputs})
    refused("multiples of 32", How("gptq", 16))
    refused("a tensor model.layers.0.more", changed=lambda t: t.update({"model.layers.0.more": torch.zeros(2)}))
    refused("no place", changed=lambda t: t.update({"model.layers.0.weight": torch.zeros(2)}))
    with pytest.raises(UnsupportedModel, match=r"float16"):
        load(folder().path, EngineConfig.build(dtype="float16"))


def test_compressed_tensors_own_package_agrees() -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    told = pytest.importorskip("compressed_tensors.quantization")
    for how in (each for each in METHODS.values() if each.method == "compressed-tensors"):
        found = quantized(torch.randn(64, 256), how)
        arguments = told.QuantizationArgs(
            num_bits=4,
            type="int",
            symmetric=how.symmetric,
            strategy="group" if how.group else "channel",
            group_size=how.group,
        )
        scheme = told.QuantizationScheme(targets=["Linear"], weights=arguments)
        wide = found.tensors | {"weight_scale": found.tensors["weight_scale"].double()}
        theirs = compressors.PackedQuantizationCompressor.decompress(wide, scheme)["weight"]
        assert torch.equal(theirs, found.meant)
