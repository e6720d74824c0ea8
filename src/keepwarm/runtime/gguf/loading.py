"""Loads a model from a GGUF file, and leaves its weights in the file's blocks (`native.blocks`).

transformers' tables say what the configuration and the tensors are called (`header`). It would also reorder
some weights' rows and subtract one from some norms. This module does the same to blocks without decoding them, because
a row consists of whole blocks. A file without blocks becomes a model in the engine's dtype.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from keepwarm.core.identity import json_digest
from keepwarm.errors import ConfigError, KeepwarmError, UnsupportedModel
from keepwarm.runtime.filling import empty, fill, keep_maps
from keepwarm.runtime.gguf.architectures import ARCHITECTURES
from keepwarm.runtime.gguf.delta_nets import order_heads
from keepwarm.runtime.gguf.file import File
from keepwarm.runtime.gguf.header import read_tokenizer
from keepwarm.runtime.gguf.tensors import tensors_of
from keepwarm.runtime.native.blocks import can_compute
from keepwarm.runtime.recommended import recommended_in

_ENDS = ("eos", "eot", "eom")  # tokens that end an answer


def load_gguf(path: Path, device: torch.device, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """Return the model and tokenizer of a GGUF file.

    `dtype` is that of keys and values. If steps run through transformers, it is also that of everything between
    products. Raises UnsupportedModel, with what was found and what is expected; and ConfigError for a device or dtype
    that these weights do not support.
    """
    check_gguf(device, dtype)
    file = File.open(path)
    try:
        model = _model(file, dtype)
        tokenizer = read_tokenizer(file.path, model.config)
    except KeepwarmError:
        raise
    except Exception as error:  # damaged values reach transformers and tokenizers, which raise errors of many kinds
        raise UnsupportedModel(f"{path} does not load: {type(error).__name__}: {error}") from error
    keep_maps(model, file.reader.maps)
    return model, tokenizer


def check_gguf(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError if GGUF files do not run so; UnsupportedModel if there is no compiler for the kernels."""
    if device.type != "cpu":
        raise ConfigError(f"GGUF files run on the CPU, got {device}: leave the device out, or pass the model's folder")
    if dtype not in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"a GGUF file takes bfloat16 or float32, got {name}: leave dtype out")
    if not can_compute():
        raise UnsupportedModel("GGUF files need a C++ compiler (install g++): their weights stay in their blocks")


def _model(file: File, dtype: torch.dtype) -> PreTrainedModel:
    config = file.config()
    config.name_or_path = str(file.path.parent)
    model = empty(config, dtype)
    fill(file.path, model, tensors_of(file.path, file.reader, model), dtype)
    if ARCHITECTURES[file.architecture].has_nets:
        order_heads(model)
    types = {each.name: each.tensor_type.name for each in file.reader.tensors}
    model.config.quantization_config = {
        "quant_method": "gguf",
        "tensors": dict(sorted(Counter(types.values()).items())),
        # Equal bytes mean different weights in different types. The number counts ways to read a file, such as orders
        # of rows: what was stored under another one is not found.
        "types": json_digest("keepwarm gguf types 1", types),
    }
    ends = [file.reader.value(f"tokenizer.ggml.{name}_token_id") for name in _ENDS]
    if model.generation_config is not None:
        model.generation_config.eos_token_id = sorted({each for each in ends if each is not None}) or None
        for name, value in recommended_in(file.reader).items():
            setattr(model.generation_config, name, value)
    return model
