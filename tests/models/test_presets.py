"""Published configurations: each gives a geometry, and the known sizes come out."""

from __future__ import annotations

import pytest

from keepwarm.core.geometry import geometry_of, naive_bytes_per_token
from keepwarm.errors import ModelNotFound
from keepwarm.models.presets import preset, preset_names

KIB = 1024

PER_TOKEN = {
    "deepseek-v3": 61 * (512 + 64) * 2,
    "falcon-7b": 8 * KIB,
    "gemma-3-270m": 18 * KIB,
    "gpt2": 72 * KIB,
    "llama-2-7b": 512 * KIB,
    "llama-3.1-8b": 128 * KIB,
    "llama-3.2-1b": 32 * KIB,
    "llama-3.3-70b": 320 * KIB,
    "mistral-7b-v0.1": 128 * KIB,
    "mistral-7b-v0.3": 128 * KIB,
    "mistral-nemo-12b": 160 * KIB,
    "qwen2.5-0.5b": 12 * KIB,
    "qwen2.5-7b": 56 * KIB,
    "qwen3-0.6b": 112 * KIB,
    "qwen3-14b": 160 * KIB,
    "qwen3-30b-a3b": 96 * KIB,
    "qwen3-32b": 256 * KIB,
    "qwen3-8b": 144 * KIB,
    "qwen3.6-27b": 64 * KIB,
    "smollm2-135m": 23_040,
}


def test_every_preset_has_a_known_size() -> None:
    assert {name: geometry_of(preset(name)).bytes_per_token for name in preset_names()} == PER_TOKEN
    assert preset_names() == tuple(sorted(PER_TOKEN))


@pytest.mark.parametrize("name", sorted(PER_TOKEN))
def test_the_short_formula_never_underestimates_these(name: str) -> None:
    config = preset(name)
    assert naive_bytes_per_token(config, config["dtype"]) >= PER_TOKEN[name]


def test_windows() -> None:
    assert geometry_of(preset("mistral-7b-v0.1")).bytes_for(32_768) == 4096 * 128 * KIB
    assert geometry_of(preset("mistral-7b-v0.3")).bytes_for(32_768) == 32_768 * 128 * KIB


def test_names_in_any_case_and_copies_of_their_own() -> None:
    config = preset("Qwen3-8B")
    config["num_hidden_layers"] = 1
    assert preset("qwen3-8b")["num_hidden_layers"] == 36


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ModelNotFound, match=r"'qwen3-8'.*qwen3-8b"):
        preset("qwen3-8")
    with pytest.raises(ModelNotFound, match="llama-2-7b.*qwen3-8b"):
        preset("zzzz")
