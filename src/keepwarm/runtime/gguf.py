"""Loads a model from a GGUF file, and leaves its weights in the file's blocks (`native.blocks`).

transformers' tables say what the configuration and the tensors are called (`gguf_header`). It would also reorder
some weights' rows and subtract one from some norms. This module does the same to blocks without decoding them, because
a row consists of whole blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from keepwarm.core.identity import json_digest
from keepwarm.errors import ConfigError, KeepwarmError, UnsupportedModel
from keepwarm.runtime.filling import empty, fill, keep_maps
from keepwarm.runtime.gguf_header import Reader, read_config, read_tokenizer
from keepwarm.runtime.native.blocks import KINDS, Blocks, can_compute, raw_bytes

ARCHITECTURES = ("lfm2", "llama", "qwen2", "qwen3")  # values of general.architecture; Mistral has "llama"
_FLOATS = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
_ROTARY = (
    *("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "rope.dimension_count"),
    *("attention.key_length", "attention.head_count", "embedding_length"),
)
_CONVOLUTION = ".shortconv.conv.weight"  # how the names of such weights end; they are floats
_FACTORS = "rope_freqs.weight"  # a tensor: rotary frequencies are divided by it
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
        _refuse_other_types(self.path, self.reader.tensors)

    def _check_rotary(self) -> None:
        told = {name: self.reader.value(f"{self.architecture}.{name}") for name in _ROTARY}
        scaled = told["rope.scaling.type"] not in (None, "none") or any(
            told[name] not in (None, 0, 1) for name in ("rope.scaling.factor", "rope.scale_linear")
        )
        heads, rotated = told["attention.head_count"], told["rope.dimension_count"]
        width = told["attention.key_length"] or (told["embedding_length"] or 0) // (heads or 1)
        if scaled or rotated not in (None, width):
            raise UnsupportedModel(
                f"{self.path} scales its rotary embedding or applies it to a part of each head ({told}), which is not "
                "read from GGUF files; pass the model's folder with safetensors"
            )


def _refuse_other_types(path: Path, tensors: Any) -> None:
    others = [
        each
        for each in tensors
        if each.tensor_type.name not in KINDS
        and not (each.tensor_type in _FLOATS and (len(each.shape) == 1 or each.name.endswith(_CONVOLUTION)))
    ]
    if others:
        kinds = ", ".join(sorted({each.tensor_type.name for each in others}))
        raise UnsupportedModel(
            f"{path} has weights of the type {kinds} ({others[0].name} and {len(others) - 1} more); the kernels have "
            f"{', '.join(KINDS)}. Quantize it to one of these (llama-quantize), or pass the model's folder with "
            "safetensors"
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
    fill(file.path, model, dict(_tensors(file, model)), dtype)
    types = {each.name: each.tensor_type.name for each in file.reader.tensors}
    model.config.quantization_config = {
        "quant_method": "gguf",
        "tensors": dict(sorted(Counter(types.values()).items())),
        "types": json_digest("keepwarm gguf types 1", types),  # equal bytes mean different weights in different types
    }
    return model


def _tensors(file: _File, model: PreTrainedModel) -> Iterator[tuple[str, Blocks | torch.Tensor]]:
    """Yield the file's tensors by their names in the model: weights in blocks, everything else in float32."""
    processor, names = processor_of(model, file.architecture), tensor_names(model, file.architecture)
    for each in file.reader.tensors:
        if each.name == _FACTORS:
            if each.tensor_type is not GGMLQuantizationType.F32:
                raise UnsupportedModel(f"{file.path}: {_FACTORS} is {each.tensor_type.name}, F32 is expected")
            _divide_frequencies(model, each.data)
            continue
        if each.name not in names:
            raise UnsupportedModel(
                f"{file.path} has a tensor {each.name}, for which {type(model).__name__} has no place"
            )
        values: npt.NDArray[Any] = each.data
        if each.tensor_type in _FLOATS:
            values = values.view(_FLOATS[each.tensor_type]).astype(np.float32)
        values = processor.process(weights=values, name=each.name).weights
        if each.tensor_type in _FLOATS:
            yield names[each.name], torch.from_numpy(np.ascontiguousarray(values))
        else:
            yield names[each.name], Blocks(raw_bytes(values), int(each.tensor_type), int(each.shape[0]))


def processor_of(model: PreTrainedModel, architecture: str) -> Any:
    """Return what transformers does to the values of a file's tensors."""
    made: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    return made(config=model.config.to_dict())


def tensor_names(model: PreTrainedModel, architecture: str) -> dict[str, str]:
    """Return the model's name of each tensor that a file may have. transformers has a function for it, which makes its
    table of names anew for every module."""
    key = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(key, model.config.num_hidden_layers)
    found = {table.get_name(name, (".weight", ".bias")): name for name in model.state_dict()}
    return {theirs: name for theirs, name in found.items() if theirs is not None}


def _divide_frequencies(model: PreTrainedModel, factors: npt.NDArray[Any]) -> None:
    rotary: Any = model.get_decoder().rotary_emb
    for name in ("inv_freq", "original_inv_freq"):
        if (table := getattr(rotary, name, None)) is not None:
            table.div_(torch.from_numpy(np.array(factors, dtype=np.float32)))
