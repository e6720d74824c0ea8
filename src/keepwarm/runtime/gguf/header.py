"""A GGUF file's configuration and tokenizer, as transformers has them.

transformers reads both, but parses a file three times with gguf's reader (`reader`). Here transformers' own tables say
what the values mean to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerFast
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING
from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

from keepwarm.runtime.gguf.architectures import alike, architecture_of
from keepwarm.runtime.gguf.reader import Reader

_BASE = 1e4  # of the rotary embedding, in files that do not name one


def read_config(reader: Reader) -> PreTrainedConfig:
    """The configuration that a file's metadata makes. Raises errors of many kinds, KeyError for what is not there."""
    own, name = architecture_of(reader), reader.value("general.architecture")
    told: dict[str, Any] = {"tie_word_embeddings": "output.weight" not in reader.names}
    table = own.names or name
    told |= GGUF_CONFIG_DEFAULTS_MAPPING.get(table) or {}
    told["rope_theta"] = _BASE
    for group, of in ((name, table), ("tokenizer", "tokenizer"), ("general", "general")):
        named = {renamed: reader.value(f"{group}.{key}") for key, renamed in _renamed(of)}
        told |= {renamed: value for renamed, value in named.items() if value is not None}
    if (words := reader.length("tokenizer.ggml.tokens")) is not None:
        told.setdefault("vocab_size", words)
    if (heads := alike(reader, f"{name}.attention.head_count_kv")) is not None:
        told["num_key_value_heads"] = heads
    reader.needed(f"{name}.attention.layer_norm_rms_epsilon")
    told |= {"model_type": own.model_type or name} | own.told(reader)
    if "rope_parameters" in told:
        del told["rope_theta"]
    made: PreTrainedConfig = CONFIG_MAPPING[told["model_type"]].from_dict(told)
    width = reader.value(f"{name}.attention.key_length")
    if width is not None and "head_dim" not in told and hasattr(made, "head_dim"):
        made.head_dim = int(width)  # transformers does not read it for Qwen 3
    return made


def _renamed(table: str) -> list[tuple[str, str]]:
    """The names of metadata in a table of transformers, with what its configurations call them."""
    names: dict[str, dict[str, Any]] = GGUF_TO_TRANSFORMERS_MAPPING["config"]  # type: ignore[assignment]
    return [(key, renamed) for key, renamed in names.get(table, {}).items() if isinstance(renamed, str)]


def read_tokenizer(path: Path, config: PreTrainedConfig) -> Any:
    """The file's own tokenizer, of the class that transformers has for the configuration."""
    kind: Any = TOKENIZER_MAPPING.get(type(config), PreTrainedTokenizerFast)
    if kind.__name__ == "MistralCommonBackend":  # where mistral_common is installed; it reads no GGUF file
        kind = PreTrainedTokenizerFast
    return kind.from_pretrained(path.parent, gguf_file=path.name)
