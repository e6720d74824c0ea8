"""Models from GGUF files: what is loaded, reused and refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from tests.helpers import llamacpp_logits
from tests.helpers.gguf_files import DIM, LAYERS, write
from transformers import AutoModelForCausalLM, GgufConfig

from keepwarm import Engine
from keepwarm.config import EngineConfig
from keepwarm.errors import ConfigError, ModelNotFound, UnsupportedModel
from keepwarm.models.places import gguf_parts
from keepwarm.models.weight_files import weight_files
from keepwarm.runtime.gguf.architectures import ARCHITECTURES
from keepwarm.runtime.gguf.reader import Reader
from keepwarm.runtime.gguf.tensors import processor_of, tensor_names
from keepwarm.runtime.loader import LoadedModel, load
from keepwarm.runtime.native.blocks import can_compute

pytestmark = [
    pytest.mark.slow,  # kernels of their own are compiled for these tests
    pytest.mark.skipif(not can_compute(), reason="no C++ compiler"),
    pytest.mark.host_memory("the lean decoder attends to the host's memory"),
]
ASKED: dict[str, Any] = {
    "messages": [{"role": "system", "content": "x" * 200}, {"role": "user", "content": "Hello"}],
    "max_new_tokens": 5,
    "trace": True,
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.mark.parametrize(
    "architecture", ["qwen2", "lfm2", "gemma3", "granitehybrid", "qwen3moe", "qwen35", "gemma4", "gemma4-moe"]
)
def test_cold_warm_and_restarted_answers_are_equal_to_the_bit(architecture: str, tmp_path: Path) -> None:
    """Of a plain model, of one with short convolutions, with windows, with experts, and with delta nets."""
    is_tied = architecture in ("lfm2", "gemma3", "gemma4", "gemma4-moe")
    file = write(tmp_path / "model.gguf", architecture=architecture, is_tied=is_tied)
    with Engine.from_pretrained(file, store=tmp_path / "store") as engine:
        assert engine.pipeline.model.runner.lean is not None
        cold, warm = engine.generate(**ASKED), engine.generate(**ASKED)
    with Engine.from_pretrained(str(file), store=tmp_path / "store") as engine:
        restarted = engine.generate(**ASKED)
    assert cold.cached_tokens == 0
    assert warm.cached_tokens > 200
    assert restarted.cached_by_tier.get("disk", 0) > 200
    assert {each.exactness for each in (cold, warm, restarted)} == {"exact"}
    assert len({each.logits_digest for each in (cold, warm, restarted)}) == 1
    assert len({each.token_ids for each in (cold, warm, restarted)}) == 1


READ = {  # what transformers reads, and whether the head is the table of embeddings
    "gemma2": True,
    "gemma3": True,
    "lfm2": True,
    "llama": True,
    "phi3": False,
    "qwen2": False,
    "qwen2moe": False,
    "qwen3": True,
    "qwen35": False,
    "qwen35moe": False,
    "qwen3moe": False,
}


@pytest.mark.parametrize("architecture", READ)
def test_the_model_is_the_one_that_transformers_reads(architecture: str, tmp_path: Path) -> None:
    """transformers widens all weights. The same logits, in float32: names, rows' order, biases, norms and ties."""
    path = write(tmp_path / "m.gguf", architecture=architecture, is_tied=READ[architecture])
    found = load(path, EngineConfig.build(dtype="float32"))
    assert found.runner.lean is not None
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="m.gguf",
        dtype=torch.float32,
        config=_plain(found),
        quantization_config=GgufConfig(dequantize=True),
    )
    _same(found, theirs)


@pytest.mark.parametrize("architecture", ["mixtral", "gpt-oss"])
def test_so_is_one_that_transformers_does_not_read(architecture: str, tmp_path: Path) -> None:
    """Its model gets the file's tensors here, with experts as its class has them."""
    path = write(tmp_path / "m.gguf", architecture=architecture)
    found = load(path, EngineConfig.build(dtype="float32"))
    assert found.runner.lean is not None
    theirs = AutoModelForCausalLM.from_config(_plain(found), dtype=torch.float32)
    reader = Reader(path)
    names = tensor_names(theirs, "llama" if architecture == "mixtral" else architecture)
    process = processor_of(theirs, "llama" if architecture == "mixtral" else architecture).process
    held: dict[str, Any] = {
        each.name: torch.from_numpy(
            np.array(process(weights=gguf.dequantize(each.data, each.tensor_type), name=each.name).weights)
        )
        for each in reader.tensors
    }
    state = {names[name]: tensor for name, tensor in held.items() if "_exps" not in name}
    for layer in range(LAYERS):
        at, to = f"blk.{layer}.ffn_%s_exps.%s", f"model.layers.{layer}.mlp.experts."
        gate, up, down = (held[at % (part, "weight")] for part in ("gate", "up", "down"))
        if architecture == "mixtral":
            state |= {to + "gate_up_proj": torch.cat([gate, up], 1), to + "down_proj": down}
            continue
        state[to + "gate_up_proj"] = torch.stack([gate, up], 2).flatten(1, 2).transpose(1, 2)
        state[to + "gate_up_proj_bias"] = torch.stack(
            [held[at % (part, "bias")] for part in ("gate", "up")], 2
        ).flatten(1)
        state |= {to + "down_proj": down.transpose(1, 2), to + "down_proj_bias": held[at % ("down", "bias")]}
    theirs.load_state_dict(state)
    _same(found, theirs)


def _plain(found: LoadedModel) -> Any:
    config = copy.deepcopy(found.model.config)
    del config.quantization_config
    return config


def _same(found: LoadedModel, theirs: Any) -> None:
    ids = torch.tensor([np.random.default_rng(1).integers(0, 256, 40).tolist()])
    with torch.inference_mode():
        mine, other = found.model(ids).logits, theirs.eval()(ids).logits
    assert torch.allclose(mine, other, atol=1e-4 * float(other.abs().max()))


@pytest.mark.parametrize("architecture", sorted(llamacpp_logits.known()))
def test_logits_are_near_those_of_llama_cpp(architecture: str, tmp_path: Path) -> None:
    """Both round, and may choose other experts for a row: so the median of some rows is compared."""
    found = load(llamacpp_logits.written(tmp_path / "m.gguf", architecture), EngineConfig.build(dtype="float32"))
    assert found.runner.lean is not None
    theirs = torch.tensor(llamacpp_logits.known()[architecture])
    with torch.inference_mode():
        every = found.model(torch.tensor([llamacpp_logits.IDS])).logits[0]
    mine = every[list(llamacpp_logits.ROWS), llamacpp_logits.WORDS]
    apart = (mine - theirs).abs().amax(-1) / theirs.abs().amax(-1)
    assert float(apart.median()) < 0.06


def test_a_value_that_is_listed_for_each_layer_may_be_the_same_in_all(tmp_path: Path) -> None:
    """So Granite's converter writes heads of keys."""
    path = write(tmp_path / "m.gguf", architecture="granite", heads_of_keys=[2, 2])
    assert load(path, EngineConfig.build(dtype="float32")).model.config.num_key_value_heads == 2


def test_every_architecture_is_compared_with_llama_cpp() -> None:
    assert {*llamacpp_logits.known()} == {*ARCHITECTURES, *llamacpp_logits.MORE_KINDS}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
def test_a_file_that_nobody_quantized_becomes_a_model_in_the_engines_dtype(
    kind: str, is_tied: bool, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", {"": kind}, architecture="llama", is_tied=is_tied)
    found = load(path, EngineConfig.build(dtype="float32"))
    assert found.runner.lean is not None
    assert not found.runner.lean.in_blocks
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    _same(found, theirs)


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
def test_floats_lie_beside_blocks(kind: str, tmp_path: Path) -> None:
    """Embeddings and the head have often more bits than the rest."""
    path = write(tmp_path / "m.gguf", {"attn_k": kind, "token_embd": kind, "output": kind, "": "Q4_K"})
    found = load(path, EngineConfig.build(dtype="float32"))
    assert found.runner.lean is not None
    assert found.runner.lean.in_blocks
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    _same(found, theirs)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_K"])
def test_experts_stay_as_the_file_has_them(kind: str, tmp_path: Path) -> None:
    found = load(write(tmp_path / "m.gguf", {"": kind}, architecture="qwen3moe"), EngineConfig.build())
    assert found.runner.lean is not None
    assert found.runner.lean.in_blocks


def test_gates_and_ups_of_experts_may_lie_in_one_tensor(tmp_path: Path) -> None:
    apart, one = (
        load(write(tmp_path / f"{fused}.gguf", architecture="qwen35moe", fused=fused), EngineConfig.build())
        for fused in (False, True)
    )
    _same(apart, one.model)
    module = one.model.model.layers[0].mlp.experts
    assert module.gate.weight.untyped_storage().data_ptr() == module.up.weight.untyped_storage().data_ptr(), "a copy"


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    more = {f"blk.{LAYERS}.nextn.eh_proj.weight": (np.zeros((4, 32), np.float32), GGMLQuantizationType.F32)}
    counts = {"qwen35.block_count": LAYERS + 1, "qwen35.nextn_predict_layers": 1}
    found = load(write(tmp_path / "m.gguf", architecture="qwen35", others=more | counts), EngineConfig.build())
    assert found.model.config.num_hidden_layers == LAYERS
    assert found.runner.lean is not None
    with pytest.raises(UnsupportedModel, match=f"blk.{LAYERS - 1}.* no place"):
        load(write(tmp_path / "n.gguf", others={"qwen2.block_count": LAYERS - 1}), EngineConfig.build())


def test_heads_of_qwen3_are_as_wide_as_the_file_says(tmp_path: Path) -> None:
    found = load(write(tmp_path / "m.gguf", architecture="qwen3", is_tied=True), EngineConfig.build())
    assert found.model.config.head_dim == DIM
    assert found.runner.lean is not None


def test_content_is_the_identity_not_the_name(file: Path, tmp_path: Path) -> None:
    config = EngineConfig.build()
    (tmp_path / "other.gguf").write_bytes(file.read_bytes())
    changed = bytearray(file.read_bytes())
    changed[-300] ^= 1
    (tmp_path / "changed.gguf").write_bytes(changed)
    own, same, other = (
        load(each, config).identity for each in (file, tmp_path / "other.gguf", tmp_path / "changed.gguf")
    )
    assert own == same
    assert own.weights != other.weights
    assert "Q4_K" in own.quantization


def test_frequencies_are_divided_by_the_files_factors(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    more = {"rope_freqs.weight": (factors, GGMLQuantizationType.F32)}
    plain = load(write(tmp_path / "a.gguf", architecture="llama"), EngineConfig.build())
    scaled = load(write(tmp_path / "b.gguf", architecture="llama", others=more), EngineConfig.build())
    assert torch.allclose(
        scaled.model.model.rotary_emb.inv_freq * torch.from_numpy(factors), plain.model.model.rotary_emb.inv_freq
    )
    assert scaled.identity.buffers != plain.identity.buffers
    assert scaled.arithmetic.identity != plain.arithmetic.identity


def test_what_the_file_recommends_is_known(file: Path, tmp_path: Path) -> None:
    assert load(file, EngineConfig.build()).recommended_sampling == {}
    told = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": -1.0, "penalty_repeat": 1.05, "mirostat": 2.0}
    recommended = {f"general.sampling.{name}": value for name, value in told.items()}
    found = load(write(tmp_path / "m.gguf", others=recommended), EngineConfig.build())
    assert found.recommended_sampling == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}


def test_what_is_wrong_with_a_file_is_said(file: Path, tmp_path: Path) -> None:
    def refused(path: Path, *words: str, **settings: Any) -> None:
        with pytest.raises(UnsupportedModel) as error:
            load(path, EngineConfig.build(**settings))
        assert all(word in str(error.value) for word in (*words, str(path)))

    whole = file.read_bytes()
    cut, short, garbage = (tmp_path / f"{name}.gguf" for name in ("cut", "short", "garbage"))
    cut.write_bytes(whole[: len(whole) // 2])
    short.write_bytes(whole[:40])
    garbage.write_bytes(b"PK" + whole[2:])
    for path in (cut, short):
        refused(path, "not a whole GGUF file", "fetch it again")
    refused(garbage, "no GGUF file", "PKUF")
    refused(write(tmp_path / "a.gguf", has_tokenizer=False), "no tokenizer", "tokenizer.ggml")
    refused(write(tmp_path / "b.gguf", architecture="mamba"), "'mamba'", "qwen2")
    refused(write(tmp_path / "c.gguf", left_out=f"blk.{LAYERS - 1}.ffn_norm.weight"), "lacks", "layernorm")
    changed = file.read_bytes().replace(b"a b", b"a \x7f")  # a merge of a word that is not there
    (tmp_path / "e.gguf").write_bytes(changed)
    refused(tmp_path / "e.gguf", "does not load")
    write(tmp_path / "f.gguf", architecture="lfm2", is_tied=True, heads_of_keys=[0, 2, 2])
    refused(tmp_path / "f.gguf", "does not load")
    tiny = {"blk.0.more.weight": (np.zeros((4, 98), np.uint8), GGMLQuantizationType.IQ3_XXS)}
    refused(write(tmp_path / "d.gguf", others=tiny), "type IQ3_XXS", "Q4_K", "safetensors")
    more = {"blk.0.more.weight": (np.zeros((4, 32), np.float16), GGMLQuantizationType.F16)}
    refused(write(tmp_path / "d.gguf", others=more), "blk.0.more.weight", "no place")
    part = f"blk.{LAYERS - 1}.ffn_up_exps.weight"
    refused(write(tmp_path / "g.gguf", architecture="qwen3moe", left_out=part), "lacks up_weight", "experts")
    for part in ("gate", "up"):
        file = write(tmp_path / "n.gguf", architecture="granitehybrid", left_out=f"blk.1.ffn_{part}.weight")
        refused(file, f"lacks the {part}", "shared_mlp.input_linear")
    nothing = {"rope.scaling.factor": 0.0, "rope.freq_base": 0.0, "attention.temperature_scale": float("nan")}
    for key, value in nothing.items():
        more = llamacpp_logits.MORE["mistral3"] | {f"mistral3.{key}": value}
        refused(write(tmp_path / "p.gguf", architecture="mistral3", others=more), key, str(value))
    refused(write(tmp_path / "q.gguf", others={"qwen2.context_length": 0}), "context_length", "above 0")
    twice = {"blk.1.ffn_up_shexp.weight": (np.zeros((8, 144), np.uint8), GGMLQuantizationType.Q4_K)}
    refused(write(tmp_path / "r.gguf", architecture="granitehybrid", others=twice), "the up", "twice")
    rises = {"blk.0.ssm_a": (np.ones((32, 1), np.float32), GGMLQuantizationType.F32)}
    path = write(tmp_path / "s.gguf", architecture="granitehybrid", left_out="blk.0.ssm_a", others=rises)
    refused(path, "ssm_a", "not below zero")
    wide = {"granitehybrid.ssm.inner_size": 300}
    refused(write(tmp_path / "o.gguf", architecture="granitehybrid", others=wide), "300 columns", "32 heads")
    bias = (np.zeros(1, np.float32), GGMLQuantizationType.F32)
    path = write(tmp_path / "i.gguf", left_out="blk.0.attn_q.bias", others={"blk.0.attn_q.bias": bias})
    refused(path, "bias", "(1,)", "expected (256,)")
    for name, value in {"block_count": 1 << 31, "attention.key_length": 1 << 20}.items():
        refused(write(tmp_path / "j.gguf", others={f"qwen2.{name}": value}), name, str(value))
    refused(write(tmp_path / "k.gguf", lacking=".attention.layer_norm_rms_epsilon"), "lacks", "rms_epsilon")
    factors = {"rope_freqs.weight": (np.ones(1, np.float32), GGMLQuantizationType.F32)}
    refused(write(tmp_path / "l.gguf", architecture="llama", others=factors), "1 factors")
    part = "blk.1.exp_probs_b.bias"
    refused(write(tmp_path / "m.gguf", architecture="lfm2moe", is_tied=True, left_out=part), part)
    long = {"rope_factors_long.weight": (np.ones(32, np.float32), GGMLQuantizationType.F32)}
    refused(write(tmp_path / "h.gguf", architecture="phi3", others=long), "rotary", "safetensors")
    refused(write(tmp_path / "e.gguf", others={"qwen2.rope.scaling.type": "yarn"}), "'yarn'", "safetensors")


def test_dtype_device_and_path_are_checked(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bfloat16 or float32"):
        load(file, EngineConfig.build(dtype="float16"))
    with pytest.raises(ModelNotFound, match="no GGUF file"):
        Engine.from_pretrained(tmp_path / "none.gguf")


def test_a_files_digest_is_cached_for_the_file_alone(file: Path) -> None:
    assert weight_files(file) == [file]
    (file.parent / "beside.gguf").write_bytes(b"")
    assert weight_files(file) == [file]


def test_a_model_that_is_split_is_the_same_one(file: Path, tmp_path: Path) -> None:
    first = write(tmp_path / "m.gguf", each=8)
    files = gguf_parts(first)
    assert len(files) > 2
    assert sorted(tmp_path.iterdir()) == files == weight_files(first)
    whole, parts, last = (load(path, EngineConfig.build()) for path in (file, first, files[-1]))
    assert whole.identity == parts.identity == last.identity
    prompt = torch.arange(40)[None]
    assert torch.equal(whole.model(prompt).logits, parts.model(prompt).logits)
    later = files[-1].read_bytes()
    files[-1].write_bytes(later[:-300] + bytes([later[-300] ^ 1]) + later[-299:])
    assert load(first, EngineConfig.build()).identity.weights != whole.identity.weights  # the digest is not an old one


def test_what_is_wrong_with_a_split_model_is_said(tmp_path: Path) -> None:
    def refused(path: Path, *words: str) -> None:
        with pytest.raises(UnsupportedModel) as error:
            load(path, EngineConfig.build())
        assert all(word in str(error.value) for word in words), str(error.value)

    first = write(tmp_path / "m.gguf", each=8)
    files = gguf_parts(first)
    second = files[1].read_bytes()
    files[1].unlink()
    refused(first, f"one of {len(files)} files", f"{files[1].name} is not beside it")
    files[1].write_bytes(first.read_bytes())
    refused(first, str(files[1]), "part 1 of", f"by its name it is 2 of {len(files)}")
    files[1].write_bytes(second[:60])
    refused(first, str(files[1]), "not a whole GGUF file")
    files[1].write_bytes(b"<htm" + second[4:])
    refused(first, str(files[1]), "no GGUF file")
    files[1].write_bytes(second)
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(first.read_bytes())
    refused(renamed, "its name does not end in", f"-00001-of-{len(files):05d}.gguf")
    other = gguf_parts(write(tmp_path / "n.gguf", each=8, left_out=f"blk.{LAYERS - 1}.ffn_norm.weight"))
    assert len(other) == len(files)
    files[-1].write_bytes(other[-1].read_bytes())
    refused(first, str(first), "tensors; expected", "of different models")


def test_one_file_that_is_called_a_part_is_whole(file: Path, tmp_path: Path) -> None:
    alone = tmp_path / "m-00001-of-00003.gguf"
    alone.write_bytes(file.read_bytes())
    assert load(alone, EngineConfig.build()).identity == load(file, EngineConfig.build()).identity


@pytest.mark.parametrize("names", [("m-00001-of-00002", "m-00002-of-00002"), ("m-00001-of-00002", "m-00003-of-00002")])
def test_files_that_are_only_called_parts_are_models_of_their_own(names: tuple[str, str], tmp_path: Path) -> None:
    for seed, name in enumerate(names):
        write(tmp_path / f"{name}.gguf", seed=seed)
    one, other = (load(tmp_path / f"{name}.gguf", EngineConfig.build()).identity for name in names)
    assert one.weights != other.weights
    write(tmp_path / f"{names[1]}.gguf", seed=5)
    assert load(tmp_path / f"{names[1]}.gguf", EngineConfig.build()).identity.weights != other.weights


def test_no_part_repeats_a_tensor_of_another(tmp_path: Path) -> None:
    first = write(tmp_path / "m.gguf", each=8)
    files = gguf_parts(first)
    named = [(path, each.name.encode()) for path in files for each in gguf.GGUFReader(path).tensors]
    pairs = ((a, b) for a in named for b in named if a[0] != b[0] and len(a[1]) == len(b[1]))
    (_, name), (path, other) = next(pairs)
    path.write_bytes(path.read_bytes().replace(other, name))
    with pytest.raises(UnsupportedModel, match="twice"):
        load(first, EngineConfig.build())
