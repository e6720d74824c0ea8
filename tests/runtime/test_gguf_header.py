"""What is read of a GGUF file's header is what transformers reads of it, in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.gguf_files import write
from transformers import AutoConfig, AutoTokenizer

from keepwarm.runtime.demo_model import demo_file
from keepwarm.runtime.gguf.architectures import ARCHITECTURES
from keepwarm.runtime.gguf.header import read_config, read_tokenizer
from keepwarm.runtime.gguf.reader import Reader


def same(path: Path) -> None:
    """Compare with transformers' own readings."""
    config = read_config(Reader(path))
    theirs = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    assert type(config) is type(theirs)
    more = {"lfm2": ["architectures", "rms_norm_eps", "norm_eps"], "qwen3": ["head_dim"]}  # transformers reads others
    others = {"_name_or_path", *more.get(config.model_type, [])}
    without = [{k: v for k, v in each.to_dict().items() if k not in others} for each in (config, theirs)]
    assert without[0] == without[1]
    tokenizer: Any = read_tokenizer(path, config)
    other: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert type(tokenizer) is type(other)
    assert tokenizer.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
    assert tokenizer.chat_template == other.chat_template
    assert tokenizer.special_tokens_map == other.special_tokens_map


@pytest.mark.parametrize("architecture", ["lfm2", "llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_configuration_and_the_tokenizer_are_those_of_transformers(
    tmp_path: Path, architecture: str, is_tied: bool
) -> None:
    same(write(tmp_path / "m.gguf", architecture=architecture, is_tied=is_tied))


@pytest.mark.slow
def test_so_are_those_of_the_embedded_models_file() -> None:
    same(demo_file())


def test_a_name_of_mistral_is_taken_as_transformers_takes_it(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", architecture="llama", others={"general.name": "mistral"})
    same(path)
    assert read_config(Reader(path)).model_type == "mistral"


def test_arrays_are_stepped_over_and_counted(tmp_path: Path) -> None:
    reader = Reader(write(tmp_path / "m.gguf"))
    words = reader.length("tokenizer.ggml.tokens")
    assert words is not None
    assert words > 1
    assert reader.value("tokenizer.ggml.tokens") is None
    assert reader.length("general.architecture") is None
    assert reader.value("general.architecture") == "qwen2"
    assert sum(len(field.parts) for field in reader.fields.values()) < 10 * len(reader.fields)


def test_a_file_that_ends_in_an_array_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    whole = path.read_bytes()
    at = whole.index(b"tokenizer.ggml.tokens")
    for length in range(at + 20, at + 400, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError):  # noqa: PT011 (numpy's and gguf's own texts, too)
            Reader(path)


@dataclass(frozen=True)
class Said:
    """Metadata that a test made up."""

    told: dict[str, Any]
    names: tuple[str, ...] = ()

    def value(self, name: str) -> Any:
        return self.told.get(name)

    def needed(self, name: str) -> Any:
        return self.told[name]

    def numbers(self, name: str) -> list[int]:
        return list(self.told[name])

    def everything(self) -> dict[str, Any]:
        return self.told


def said(name: str, **others: Any) -> dict[str, Any]:
    """What a file of this architecture says in other ways. Dots are written as two underscores."""
    more = {f"{name}.{key.replace('__', '.')}": value for key, value in others.items()}
    return ARCHITECTURES[name].told(Said({"general.architecture": name, **more}))


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_scores_of_gemma_have_the_scale_of_a_heads_width_but_for_the_largest(name: str, layers: int) -> None:
    usual = {"attention__head_count": 32, "attention__key_length": 128, "embedding_length": 5376}
    usual["attention__sliding_window"] = 1024
    assert said(name, **usual, block_count=26)["query_pre_attn_scalar"] == 128
    assert said(name, **usual, block_count=layers)["query_pre_attn_scalar"] == 168
    assert said(name, **usual, block_count=26, final_logit_softcapping=30.0)["final_logit_softcapping"] == 30


def test_layers_of_gemma_3_rotate_by_two_bases() -> None:
    usual = {"attention__head_count": 4, "attention__key_length": 256, "block_count": 18, "rope__freq_base": 1e6}
    usual["attention__sliding_window"] = 512
    plain = said("gemma3", **usual)["rope_parameters"]
    assert plain["full_attention"] == {"rope_type": "default", "rope_theta": 1e6}
    assert plain["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    scaled = said("gemma3", **usual, rope__scaling__type="linear", rope__scaling__factor=8.0, rope__freq_base_swa=2e4)
    assert scaled["rope_parameters"]["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert scaled["rope_parameters"]["sliding_attention"]["rope_theta"] == 2e4


def test_gpt_oss_scales_as_its_own_configuration_does() -> None:
    """`openai/gpt-oss-20b` has these numbers in its config.json."""
    scaling = {"rope__scaling__type": "yarn", "rope__scaling__factor": 32.0}
    sizes = {"expert_count": 32, "expert_used_count": 4, "expert_feed_forward_length": 2880}
    widths = {"attention__key_length": 64, "attention__sliding_window": 128, "rope__freq_base": 150000.0}
    told = said("gpt-oss", rope__scaling__original_context_length=4096, **scaling, **sizes, **widths)
    assert told["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }


def test_phi_3_may_rotate_a_part_of_a_head_and_have_a_window() -> None:
    usual = {"embedding_length": 3072, "attention__head_count": 24, "context_length": 4096}
    assert said("phi3", **usual)["partial_rotary_factor"] == 1
    told = said("phi3", **usual, rope__dimension_count=96, attention__sliding_window=2047)
    assert (told["partial_rotary_factor"], told["sliding_window"]) == (0.75, 2047)


def test_granite_without_a_scale_of_scores_has_that_of_a_heads_width() -> None:
    usual = {"embedding_length": 2048, "attention__head_count": 32}
    assert said("granite", **usual) == {"attention_multiplier": 64**-0.5}
    assert said("granite", **usual, attention__scale=0.015625)["attention_multiplier"] == 0.015625
    with pytest.raises(ValueError, match="not rotated"):
        said("granite", **usual, rope__scaling__finetuned=False)


def test_windows_of_olmo_are_refused() -> None:
    with pytest.raises(ValueError, match="OLMo 3"):
        said("olmo2", attention__sliding_window=4096)


@pytest.mark.parametrize("used", [0, 7])
def test_a_row_uses_some_of_the_experts(used: int) -> None:
    with pytest.raises(ValueError, match=f"{used} of 6 experts"):
        said("qwen3moe", expert_count=6, expert_used_count=used, expert_feed_forward_length=256)
