"""What names of KV hold of the environment: all that reaches others' kernels, and nothing where only ours compute."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.models import tiny
from tests.helpers.prompts import ids

from keepwarm import Engine
from keepwarm.config import EngineConfig
from keepwarm.core.identity import ArithmeticIdentity
from keepwarm.runtime.arithmetic import Surroundings
from keepwarm.runtime.dispatch import rounds_float32
from keepwarm.runtime.loader import LoadedModel, load
from keepwarm.runtime.native import build
from keepwarm.runtime.processor import processor

PROMPT = ids(60, 8)


def loaded(tokenizer: Any, attention: str = "model", model: Any = None) -> LoadedModel:
    return load((tiny("llama") if model is None else model, tokenizer), EngineConfig.build(attention=attention))


def arithmetic(tokenizer: Any, attention: str = "model") -> ArithmeticIdentity:
    return loaded(tokenizer, attention).namespace().arithmetic


needs_kernels = pytest.mark.skipif(build.kernels() is None, reason="no compiler here")

VARIABLES = [
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_NUM_THREADS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
]


@pytest.mark.slow
@pytest.mark.parametrize("variable", VARIABLES)
def test_variables_that_choose_others_kernels_are_named(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv(variable, raising=False)
    without = arithmetic(tokenizer)
    monkeypatch.setenv(variable, "1")
    assert json.loads(arithmetic(tokenizer).environment)[variable] == "1"
    assert arithmetic(tokenizer).digest != without.digest
    monkeypatch.setenv("ONEDNN_VERBOSE", "0")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # not of the processor
    monkeypatch.delenv(variable)
    assert arithmetic(tokenizer) == without


@contextmanager
def set_to(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


cuda, onednn = torch.backends.cuda, torch.backends.mkldnn
SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False),
    "math": (cuda.math_sdp_enabled, cuda.enable_math_sdp, False),
    "efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, False),
    "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "threads": (torch.get_num_threads, torch.set_num_threads, 5),
    "denormals": (lambda: False, torch.set_flush_denormal, True),
    "fpmath": (lambda: "none", lambda value: setattr(onednn.matmul, "fp32_precision", value), "bf16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("switch", [name for name in SWITCHES if name != "fpmath" or hasattr(onednn, "matmul")])
def test_switches_of_torch_are_named_as_they_are_now(tokenizer: Any, switch: str) -> None:
    model = loaded(tokenizer)
    before = model.namespace()
    with set_to(*SWITCHES[switch]):
        assert model.namespace().exact_root != before.exact_root
        assert model.namespace().prefix_root == before.prefix_root
    assert model.namespace().exact_root == before.exact_root


def test_libraries_and_processor_are_named(tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = arithmetic(tokenizer)
    assert processor() in before.instruction_set
    for name in ("causal_conv1d", "fla", "mamba_ssm"):
        assert name not in json.loads(before.libraries)
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    about = tmp_path / "causal_conv1d-1.5.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: causal-conv1d\nVersion: 1.5.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    after = json.loads(arithmetic(tokenizer).libraries)
    assert {name: after[name] for name in ("causal_conv1d", "fla", "mamba_ssm")} == {
        "causal_conv1d": "1.5.0",
        "fla": "unknown",
        "mamba_ssm": "unknown",
    }


@pytest.mark.parametrize("kind", ["mps", "cuda"])
def test_a_devices_names_hold_nothing_of_the_processors_kernels(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA here")
    model = loaded(tokenizer)

    def around() -> Surroundings:
        return Surroundings.of(model.model, {"": torch.device(kind)}, model.identity, "")

    before = around()
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert not before.threaded
    assert (around().environment, around().build) == (before.environment, before.build)
    assert not {"mkldnn_enabled", "flushes_denormals"} & dict(before.readers).keys()
    if kind == "cuda":
        assert processor() not in before.instruction_set
        assert {"cudnn", "cublas"} <= before.libraries.keys()
        assert "unknown" not in before.libraries.values()
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        assert around().environment["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize("switch", ["precision", "fpmath"])
def test_float32_that_torch_rounds_is_known(switch: str) -> None:
    host = torch.device("cpu")
    assert not rounds_float32(host)
    if switch == "fpmath" and not hasattr(onednn, "matmul"):
        pytest.skip("this torch has the one setting alone")
    with set_to(*SWITCHES[switch]):
        assert rounds_float32(host)
    assert not rounds_float32(host)


# ---- our own kernels ----


@pytest.mark.host_memory("our own kernels run on the processor")
@pytest.mark.slow
@needs_kernels
def test_nothing_of_the_environment_is_in_the_names_of_our_own_kernels(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = arithmetic(tokenizer, "auto")
    assert before.attention.startswith("lean:")
    assert (before.torch, before.instruction_set, before.libraries, before.switches) == ("", "", "", "")
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "1")
    for name in SWITCHES.keys() - {"threads", "denormals"}:
        if name != "fpmath" or hasattr(onednn, "matmul"):
            with set_to(*SWITCHES[name]):
                assert arithmetic(tokenizer, "auto") == before


@pytest.mark.host_memory("our own kernels run on the processor")
@needs_kernels
def test_our_kernels_compute_denormals_whatever_the_process_says(tokenizer: Any) -> None:
    model = tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.data *= 1e-38  # values below float32's smallest normal number
        layer.self_attn.o_proj.weight.data *= 1e37
    with Engine.from_pretrained((model, tokenizer)) as engine:
        assert engine.pipeline.model.runner.lean is not None
        cold = engine.generate(PROMPT, max_new_tokens=4, reuse="off", trace=True)
        with set_to(*SWITCHES["denormals"]):
            flushed = engine.generate(PROMPT, max_new_tokens=4, reuse="off", trace=True)
            assert torch.tensor(1e-40) * 1 == 0  # and the caller's setting is left as it was
    assert flushed.logits_digest == cold.logits_digest


@needs_kernels
def test_our_kernels_are_named_by_their_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same source tuned to another processor is other code; flags that Linux adds are not."""
    found = build.kernels()
    assert found is not None
    monkeypatch.setenv("KEEPWARM_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "DELIVERED", "nowhere")  # `make` put libraries beside the sources
    monkeypatch.setattr(build, "processor", lambda: "another one with the same vector units")
    watch = build.compiled_for.__wrapped__(build.level(), build.WATCH)
    monkeypatch.undo()
    assert watch is not None
    assert watch.digest == build.compiled(build.WATCH).digest  # type: ignore[union-attr]
    assert watch.library._name != build.compiled(build.WATCH).library._name  # type: ignore[union-attr]


# ---- buffers that no file holds ----


def scaled(tokenizer: Any, factor: float, attention: str) -> LoadedModel:
    model = tiny("llama")
    model.model.rotary_emb.inv_freq.mul_(factor)
    return loaded(tokenizer, attention, model)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["model", "auto"])
def test_frequencies_scaled_by_hand_are_another_model(tokenizer: Any, attention: str) -> None:
    plain, other = scaled(tokenizer, 1.0, attention), scaled(tokenizer, 0.5, attention)
    assert plain.identity.buffers == "none"
    assert other.identity.buffers != "none"
    assert plain.identity.digest == loaded(tokenizer, attention).identity.digest
    assert scaled(tokenizer, 0.5, attention).identity.digest == other.identity.digest != plain.identity.digest


@pytest.mark.parametrize("attention", ["model", "auto"])
def test_a_last_bit_of_the_frequencies_is_another_arithmetic(tokenizer: Any, attention: str) -> None:
    """As another machine or device makes them of the same configuration."""
    model = tiny("llama")
    frequencies = model.model.rotary_emb.inv_freq
    frequencies[1] = torch.nextafter(frequencies[1], torch.tensor(1.0))
    plain, other = loaded(tokenizer, attention).namespace(), loaded(tokenizer, attention, model).namespace()
    assert other.prefix_root == plain.prefix_root
    assert other.exact_root != plain.exact_root


def test_other_buffers_are_the_models_own(tokenizer: Any) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = Gemma2ForCausalLM(config).eval()
    before = loaded(tokenizer, model=model).identity
    model.model.embed_tokens.embed_scale.mul_(2)
    assert loaded(tokenizer, model=model).identity.buffers != before.buffers


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["model", "auto"])
@pytest.mark.parametrize("how", ["in place", "behind", "exchanged"])
def test_frequencies_changed_while_an_engine_lives_are_noticed(tokenizer: Any, attention: str, how: str) -> None:
    model = tiny("llama")
    rotary = model.model.rotary_emb
    with Engine.from_pretrained((model, tokenizer), step=16, attention=attention) as engine:
        engine.generate(PROMPT, max_new_tokens=1)
        if how == "in place":
            rotary.inv_freq.mul_(0.5)
        elif how == "behind":
            rotary.inv_freq.data.mul_(0.5)
        else:
            rotary.inv_freq = rotary.inv_freq * 0.5
        found = engine.generate(PROMPT, max_new_tokens=3, trace=True)
        assert found.cached_tokens == 0
    changed = tiny("llama")
    changed.model.rotary_emb.inv_freq.mul_(0.5)
    with Engine.from_pretrained((changed, tokenizer), step=16, attention=attention) as fresh:
        assert fresh.generate(PROMPT, max_new_tokens=3, trace=True).logits_digest == found.logits_digest


def test_frequencies_that_follow_the_length_are_no_change(tokenizer: Any) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny("llama", max_position_embeddings=64, rope_parameters=rope)
    with Engine.from_pretrained((model, tokenizer), step=16) as engine:
        before = engine.pipeline.model.namespace()
        engine.generate(PROMPT, max_new_tokens=1)
        model(torch.tensor([ids(100, 1)]))  # beyond the window: the model exchanges its frequencies
        assert not engine.pipeline.model.watch.changed()
        assert engine.pipeline.model.namespace() is before
