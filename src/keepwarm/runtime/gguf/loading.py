"""Loads a model from a GGUF file, and leaves its weights in the file's blocks (`native.blocks`).

transformers' tables say what the configuration and the tensors are called (`header`). It would also reorder
some weights' rows and subtract one from some norms. This module does the same to blocks without decoding them, because
a row consists of whole blocks. A file without blocks becomes a model in the engine's dtype.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from keepwarm.core.identity import json_digest
from keepwarm.errors import ConfigError, KeepwarmError, UnsupportedModel
from keepwarm.runtime.filling import empty, fill, keep_maps
from keepwarm.runtime.gguf.architectures import ARCHITECTURES, architecture_of
from keepwarm.runtime.gguf.delta_nets import order_heads
from keepwarm.runtime.gguf.header import Reader, read_config, read_tokenizer
from keepwarm.runtime.gguf.tensors import check_types, tensors_of
from keepwarm.runtime.native.blocks import can_compute

_ROTARY = (
    *("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "rope.dimension_count"),
    *("attention.key_length", "attention.head_count", "embedding_length"),
)
_BY_LENGTH = "rope_factors_long.weight"  # a tensor: rotary frequencies change with the sequence's length
_ENDS = ("eos", "eot", "eom")  # tokens that end an answer
_DAMAGE = (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError, TypeError, MemoryError, RuntimeError)


@dataclass(frozen=True)
class _File:
    """An open GGUF file. Its tensors are parts of a memory map of it."""

    path: Path
    reader: Reader

    @classmethod
    def open(cls, path: Path) -> _File:
        """Open a file. Raises UnsupportedModel if it is no GGUF file, or not complete."""
        try:
            found = cls(path, Reader(path, "c"))
            found._check()
        except UnsupportedModel:
            raise
        except _DAMAGE as error:
            raise UnsupportedModel(
                f"{path} is not a whole GGUF file ({error}): fetch it again, and compare its checksum"
            ) from error
        return found

    @property
    def architecture(self) -> str:
        return str(self.reader.value("general.architecture"))

    def _check(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{self.path} holds a model of the architecture {self.architecture!r}; Keepwarm runs GGUF files of "
                f"{', '.join(ARCHITECTURES)}. Pass the model's folder with safetensors"
            )
        if self.reader.byte_order != "I":
            raise UnsupportedModel(f"{self.path} has another byte order than this machine: convert it")
        if (self.reader.value("split.count") or 1) > 1:
            raise UnsupportedModel(f"{self.path} is one of several parts; join them (llama-gguf-split --merge)")
        self._check_rotary()
        if self.reader.length("tokenizer.ggml.tokens") is None:
            raise UnsupportedModel(f"{self.path} holds no tokenizer; expected tokenizer.ggml.* in its metadata")
        check_types(self.path, self.reader.tensors)

    def _check_rotary(self) -> None:
        told = {name: self.reader.value(f"{self.architecture}.{name}") for name in _ROTARY}
        known = architecture_of(self.reader)
        kind = told["rope.scaling.type"]
        scaled = kind not in (None, "none") or any(
            told[name] not in (None, 0, 1) for name in ("rope.scaling.factor", "rope.scale_linear")
        )
        heads, rotated = told["attention.head_count"], told["rope.dimension_count"]
        width = told["attention.key_length"] or (told["embedding_length"] or 0) // (heads or 1)
        if (
            (scaled and kind not in known.scaled)
            or (rotated not in (None, width) and not known.partial)
            or any(each.name == _BY_LENGTH for each in self.reader.tensors)
        ):
            raise UnsupportedModel(
                f"{self.path} scales its rotary embedding or applies it to a part of each head ({told}), which is not "
                "read from GGUF files; pass the model's folder with safetensors"
            )


def load_gguf(path: Path, device: torch.device, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """Return the model and tokenizer of a GGUF file.

    `dtype` is that of keys and values. If steps run through transformers, it is also that of everything between
    products. Raises UnsupportedModel, with what was found and what is expected; and ConfigError for a device or dtype
    that these weights do not support.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(
            f"GGUF files are run on the CPU, in bfloat16 or float32; got {device} and {dtype}. Pass device='cpu', or "
            "the model's folder with safetensors"
        )
    if not can_compute():
        raise UnsupportedModel(f"{path} needs a C++ compiler (install g++): its weights stay in their blocks")
    file = _File.open(path)
    try:
        model = _model(file, dtype)
        tokenizer = read_tokenizer(path, model.config)
    except KeepwarmError:
        raise
    except Exception as error:  # damaged values reach transformers and tokenizers, which raise errors of many kinds
        raise UnsupportedModel(f"{path} does not load: {type(error).__name__}: {error}") from error
    keep_maps(model, [file.reader.map])
    return model, tokenizer


def _model(file: _File, dtype: torch.dtype) -> PreTrainedModel:
    config = read_config(file.reader)
    config.name_or_path = str(file.path.parent)
    width = file.reader.value(f"{file.architecture}.attention.key_length")
    if width is not None and hasattr(config, "head_dim"):
        config.head_dim = int(width)  # transformers does not read it for Qwen 3
    model = empty(config, dtype)
    fill(file.path, model, tensors_of(file.path, file.reader, model), dtype)
    if ARCHITECTURES[file.architecture].has_nets:
        order_heads(model)
    types = {each.name: each.tensor_type.name for each in file.reader.tensors}
    model.config.quantization_config = {
        "quant_method": "gguf",
        "tensors": dict(sorted(Counter(types.values()).items())),
        "types": json_digest("keepwarm gguf types 1", types),  # equal bytes mean different weights in different types
    }
    ends = [file.reader.value(f"tokenizer.ggml.{name}_token_id") for name in _ENDS]
    if model.generation_config is not None:
        model.generation_config.eos_token_id = sorted({each for each in ends if each is not None}) or None
    return model
