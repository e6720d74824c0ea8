"""Checkpoints that read pictures, too: their language model is loaded alone, and answers as the whole does."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.adapters import adapter
from tests.helpers.lean import compiled
from tests.helpers.models import VOCABULARY, tiny
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig

from keepwarm import Engine
from keepwarm.errors import UnsupportedModel
from keepwarm.runtime.checkpoint import language_model, tokenizer_on, weights_on

CPU = torch.device("cpu")
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "layer_types": None,  # as the number of layers says
}
_SEEN = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
_QWEN = {"depth": 1, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 64}
_THREE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}}
_GROWING = {
    "model_type": "ministral3",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 16,
    },
}
_FOURTH = {
    "global_head_dim": 64,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCABULARY,
    "sliding_window": 64,
}
_BY_FOUR = {"model_type": "gemma4_vision", "patch_size": 14, "head_dim": 16, "num_key_value_heads": 2}
# By the class of the language model alone: the type of the whole, and settings of its text and of its pictures.
WHOLES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma 3": ("Gemma3ForCausalLM", "gemma3", {}, _SEEN | {"patch_size": 14}),
    "gemma 4": ("Gemma4ForCausalLM", "gemma4", _FOURTH, _SEEN | _BY_FOUR),
    "mistral small": ("MistralForCausalLM", "mistral3", {}, _SEEN | {"patch_size": 14}),
    "ministral 3": ("Ministral3ForCausalLM", "mistral3", _GROWING, _SEEN | {"patch_size": 14}),
    "qwen 2 vl": (
        "Qwen2ForCausalLM",
        "qwen2_vl",
        _THREE,
        {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
    ),
    "qwen 2.5 vl": ("Qwen2ForCausalLM", "qwen2_5_vl", _THREE, _QWEN),
    "qwen 3 vl": ("Qwen3ForCausalLM", "qwen3_vl", _THREE, _QWEN | {"deepstack_visual_indexes": [0]}),
    "lfm 2 vl": ("Lfm2ForCausalLM", "lfm2_vl", {"layer_types": ["conv", "full_attention"]}, _SEEN),
    "llava": ("LlamaForCausalLM", "llava", {}, _SEEN | {"patch_size": 14}),
    "smolvlm": ("LlamaForCausalLM", "smolvlm", {}, _SEEN | {"patch_size": 14}),
    "internvl": ("Qwen2ForCausalLM", "internvl", {}, _SEEN | {"image_size": [28, 28], "patch_size": [14, 14]}),
}


def settings(name: str, **changes: Any) -> PreTrainedConfig:
    _, kind, text, pictures = WHOLES[name]
    told = AutoConfig.for_model(kind).to_dict()
    told["text_config"] |= _TEXT | text | changes
    told["text_config"].pop("per_layer_config", None)  # it is that of other layers
    told["vision_config"] = (told["vision_config"] or {}) | pictures
    for unused in ("layer_types", "attention_types"):
        if told["text_config"].get(unused, 0) is None:
            del told["text_config"][unused]
    return AutoConfig.for_model(**told)


def whole(folder: Path, name: str, *, tied: bool = False, **changes: Any) -> Any:
    """A tiny model with its other parts, saved in a folder."""
    config = settings(name, **changes)
    config.tie_word_embeddings = tied
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    try:
        model = AutoModelForImageTextToText.from_config(config).eval()
    finally:
        torch.random.set_rng_state(state)
    model.save_pretrained(folder)
    return model


def alone(folder: Path) -> Any:
    return weights_on(CPU, str(folder), torch.float32, AutoConfig.from_pretrained(folder), trust_remote_code=False)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", WHOLES)
def test_the_language_model_alone_computes_what_the_whole_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, tied: bool
) -> None:
    model = whole(tmp_path, name, tied=tied)
    with caplog.at_level(logging.WARNING):
        found = alone(tmp_path)
    assert "LOAD REPORT" not in caplog.text, "it names each tensor of the other parts"
    assert type(found).__name__ == WHOLES[name][0]
    ids = torch.arange(3, 43)[None]
    with torch.inference_mode():
        assert torch.equal(found(ids).logits, model(ids).logits)
    assert sum(each.numel() for each in found.parameters()) < sum(each.numel() for each in model.parameters())


@pytest.mark.host_memory("the lean decoder attends to the host's memory")
@pytest.mark.parametrize("name", ["gemma 3", "gemma 4", "ministral 3"])
def test_it_is_served_from_its_folder(tmp_path: Path, tokenizer: Any, name: str) -> None:
    whole(tmp_path, name, vocab_size=VOCABULARY)
    tokenizer.save_pretrained(tmp_path)
    prompt = "The ferry leaves at six, and the crane is closed on Sundays. " * 3
    with Engine.from_pretrained(tmp_path, dtype="float32", store=tmp_path / "store") as engine:
        assert type(engine.pipeline.model.model).__name__ == WHOLES[name][0]
        first = engine.generate(prompt, max_new_tokens=4, trace=True)
    with Engine.from_pretrained(tmp_path, dtype="float32", store=tmp_path / "store") as engine:
        again = engine.generate(prompt, max_new_tokens=4, trace=True)
        assert compiled is None or engine.pipeline.model.runner.lean is not None
    assert (first.cached_tokens, again.cached_tokens) == (0, first.prompt_tokens - 1)
    assert again.logits_digest == first.logits_digest


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    """transformers would answer with random numbers in their place."""
    whole(tmp_path, "mistral small")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    lost = "language_model.model.layers.1.mlp.up_proj.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file, {"format": "pt"})
    with pytest.raises(
        UnsupportedModel, match=r"lacks weights that MistralForCausalLM needs: model.layers.1.mlp.up_proj"
    ):
        alone(tmp_path)
    with pytest.raises(UnsupportedModel, match="Fetch it again"):
        Engine.from_pretrained(tmp_path)
    save_file(tensors | {"language_model.model.layers.1.mlp.more.weight": torch.ones(1)}, file, {"format": "pt"})
    with pytest.raises(
        UnsupportedModel, match="its language model, as MistralForCausalLM, has not: model.layers.1.mlp.more"
    ):
        alone(tmp_path)


def test_a_head_of_its_own_is_not_tied_whatever_the_configuration_says(tmp_path: Path) -> None:
    """The classes of some wholes tie by default, and their configurations may leave it out."""
    model = whole(tmp_path, "mistral small")
    told = json.loads((tmp_path / "config.json").read_text())
    del told["tie_word_embeddings"]
    told["text_config"]["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(told))
    ids = torch.arange(3, 43)[None]
    with torch.inference_mode():
        assert torch.equal(alone(tmp_path)(ids).logits, model(ids).logits)


def test_a_missing_file_of_several_is_said(saved: Any) -> None:
    folder = saved("llama")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModel, match=r"1 of 2 files of weights are missing \(model-00002.*Fetch it again"):
        Engine.from_pretrained(folder)


def test_weights_without_a_place_are_told(saved: Any, caplog: pytest.LogCaptureFixture) -> None:
    folder = saved("llama")
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"model.more.weight": torch.ones(1)}, file, {"format": "pt"})
    with caplog.at_level(logging.WARNING), Engine.from_pretrained(folder):
        assert "has weights for which LlamaForCausalLM has no place: model.more.weight" in caplog.text
    assert "LOAD REPORT" not in caplog.text


def test_the_base_of_an_adapter_lacks_nothing_either(saved: Any, tmp_path: Path) -> None:
    base = saved("llama")
    adapter(tmp_path, tiny("llama"), ("q_proj",), base_model_name_or_path=str(base))
    with Engine.from_pretrained(tmp_path) as engine:
        assert engine.pipeline.model.identity.lora != "none"
    file = base / "model.safetensors"
    kept = {name: each for name, each in load_file(file).items() if "layers.0.mlp.up_proj" not in name}
    save_file(kept, file, {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"lacks weights .* model.layers.0.mlp.up_proj.weight"):
        Engine.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["voxtral", "qwen2_audio", "blip-2", "audioflamingo3", "granite_speech"])
def test_any_checkpoint_of_several_parts_can_be_asked(kind: str) -> None:
    found = language_model(AutoConfig.for_model(kind))
    assert found is None or isinstance(found, PreTrainedConfig)


def test_a_plain_checkpoint_lacks_nothing_either(saved: Any) -> None:
    folder = saved("llama")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"lacks weights that LlamaForCausalLM needs: model.norm.weight"):
        Engine.from_pretrained(folder)


def test_what_is_no_part_of_something_is_left_as_it_is() -> None:
    assert language_model(AutoConfig.for_model("llama")) is None
    assert language_model(AutoConfig.for_model("qwen3_5")) is None, "transformers takes its language model by itself"
    with pytest.raises(UnsupportedModel, match="attend to those behind them"):
        language_model(AutoConfig.for_model("paligemma"))
    config = settings("mistral small")
    config.auto_map = {"AutoModelForCausalLM": "own.Model"}
    assert language_model(config) is None, "code of its own says what it is"


def test_what_the_whole_is_asked_with_goes_along() -> None:
    config = settings("gemma 3")
    skipped = ["model.language_model.layers.0.mlp", "lm_head", "language_model.lm_head", "model.vision_tower"]
    config.quantization_config = {"quant_method": "fp8", "modules_to_not_convert": skipped}
    config._commit_hash, config.eos_token_id = "abc", [1, 106]
    found = language_model(config)
    assert found is not None
    assert (found.quantization_config["quant_method"], found._commit_hash, found.eos_token_id) == (
        "fp8",
        "abc",
        [1, 106],
    )
    named = found.quantization_config["modules_to_not_convert"]
    assert named == ["model.layers.0.mlp", "lm_head", "lm_head", "model.vision_tower"]
    assert config.quantization_config["modules_to_not_convert"] is skipped, "the whole's own stay as they are"
    assert json.loads(found.to_json_string())["model_type"] == "gemma3_text"


@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json"])
def test_a_template_that_only_the_processor_has_is_read(tmp_path: Path, tokenizer: Any, file: str) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    bare.save_pretrained(tmp_path)
    assert tokenizer_on(str(tmp_path), trust_remote_code=False).chat_template is None
    (tmp_path / file).write_text(json.dumps({"chat_template": tokenizer.chat_template}))
    assert tokenizer_on(str(tmp_path), trust_remote_code=False).chat_template == tokenizer.chat_template
    (tmp_path / file).write_text(json.dumps({"chat_template": {"default": tokenizer.chat_template, "tool_use": "x"}}))
    found = tokenizer_on(str(tmp_path), trust_remote_code=False).chat_template
    assert found == {"default": tokenizer.chat_template, "tool_use": "x"}
    listed = [{"name": "default", "template": tokenizer.chat_template}]
    (tmp_path / file).write_text(json.dumps({"chat_template": listed}))
    found = tokenizer_on(str(tmp_path), trust_remote_code=False).chat_template
    assert found == {"default": tokenizer.chat_template}
    (tmp_path / file).write_text("<html>")
    with pytest.raises(ValueError, match=f"{file} is no JSON"):
        tokenizer_on(str(tmp_path), trust_remote_code=False)
    (tmp_path / file).write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(ValueError, match=f"the chat_template in {file} is of type int; expected a text"):
        tokenizer_on(str(tmp_path), trust_remote_code=False)


def test_a_template_of_the_tokenizer_goes_first(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "another"}))
    assert tokenizer_on(str(tmp_path), trust_remote_code=False).chat_template == tokenizer.chat_template
