"""Puts a file's tensors into an empty model of transformers, and leaves weights in blocks as the file has them."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from keepwarm.errors import UnsupportedModel
from keepwarm.runtime.native.block_experts import BlockExperts, Stack
from keepwarm.runtime.native.blocks import COLUMNS, BlockEmbedding, BlockLinear, BlockLinears, Blocks


@dataclass(frozen=True)
class Experts:
    """The weights of one layer's experts."""

    gate: Stack
    up: Stack
    down: Stack


@dataclass(frozen=True)
class Joined:
    """Weights in blocks whose outputs are one module's, one after another."""

    parts: tuple[Blocks, ...]


Tensors = Mapping[str, Blocks | torch.Tensor | Experts | Joined]


def empty(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model without its weights. What it computes itself, such as rotary frequencies, is there."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def fill(path: Path, model: PreTrainedModel, found: Tensors, dtype: torch.dtype) -> None:
    """Replace an empty model's modules by such as use a file's tensors, by their names. Experts and joined weights have
    the name of their module. Raises UnsupportedModel, with what was found and what is expected."""
    plain = {name: value for name, value in found.items() if not isinstance(value, Experts | Joined)}
    for name in sorted({name.rpartition(".")[0] for name in plain if name.endswith((".weight", ".bias"))}):
        _put(path, model, name, plain.get(f"{name}.weight"), plain.get(f"{name}.bias"), dtype)
    for name, value in found.items():
        if isinstance(value, Experts):
            _put_experts(path, model, name, value)
        elif isinstance(value, Joined):
            _put_joined(path, model, name, value)
        elif not name.endswith((".weight", ".bias")):
            _put_alone(path, model, name, value, dtype)
    if model.config.tie_word_embeddings:
        table = model.get_input_embeddings()
        if isinstance(table, BlockEmbedding):
            model.set_output_embeddings(BlockLinear(table.blocks, None))
        else:
            model.get_output_embeddings().weight = table.weight
    missing = [name for name, each in model.named_parameters() if each.device.type == "meta"]
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise UnsupportedModel(f"{path} lacks {missing[0]}{more} of {type(model).__name__}. Fetch it again")


def packed(model: PreTrainedModel) -> bool:
    """Return whether a model's weights are in blocks."""
    return isinstance(model.get_output_embeddings(), BlockLinear)


def keep_maps(model: Any, maps: Sequence[mmap.mmap]) -> None:
    """Note which maps hold the tensors of a model's files, for `forget_files`."""
    model.weight_maps = list(maps)


def forget_files(model: PreTrainedModel) -> None:
    """Give back the memory that holds a model's files, if its tensors are in maps of them."""
    found = getattr(model, "weight_maps", None)
    if not isinstance(found, list):
        return
    if hasattr(mmap, "MADV_DONTNEED"):
        for each in found:
            each.madvise(mmap.MADV_DONTNEED)
    gc.collect()  # the reader of a file's metadata holds hundreds of MB in small pieces
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _put(
    path: Path,
    model: PreTrainedModel,
    name: str,
    weight: Blocks | torch.Tensor | None,
    bias: Blocks | torch.Tensor | None,
    dtype: torch.dtype,
) -> None:
    """Replace the tensors of one module of the empty model."""
    module: Any = model.get_submodule(name)
    if weight is None or isinstance(bias, Blocks):
        raise UnsupportedModel(f"{path} has for {name} a bias without a weight, or one in blocks")
    shape = tuple(weight.shape)
    if shape != tuple(module.weight.shape):
        raise UnsupportedModel(f"{path} has {name} of the shape {shape}; the model has {tuple(module.weight.shape)}")
    if bias is not None and bias.shape != shape[:1]:
        raise UnsupportedModel(f"{path} has a bias of {name} of the shape {tuple(bias.shape)}; expected {shape[:1]}")
    if isinstance(weight, Blocks):
        _check_width(path, name, weight)
        if isinstance(module, nn.Embedding):
            scale = getattr(module, "embed_scale", None)
            model.set_submodule(name, BlockEmbedding(weight, dtype, scale))
        elif type(module) is nn.Linear and (module.bias is None) == (bias is None):
            model.set_submodule(name, weight.linear(bias))
        else:
            raise UnsupportedModel(f"{path}: {name} ({type(module).__name__}) cannot stay in blocks, or lacks its bias")
        return
    if bias is not None:
        if module.bias is None:
            raise UnsupportedModel(f"{path} has a bias of {name}; the model has none")
        module.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
    module.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
    if not isinstance(module, nn.Embedding) and (type(module) is not nn.Linear or len(weight) == 1):
        module.register_buffer("exact_weight", weight.float())  # the file's own numbers, not rounded, for the kernels


def _put_joined(path: Path, model: PreTrainedModel, name: str, found: Joined) -> None:
    module: Any = model.get_submodule(name)
    shapes, expected = [tuple(part.shape) for part in found.parts], tuple(module.weight.shape)
    each = (expected[0] // len(shapes), expected[1])
    if getattr(module, "bias", None) is not None or type(module) is not nn.Linear or set(shapes) != {each}:
        raise UnsupportedModel(f"{path} has parts of {name} of the shapes {shapes}; expected {each} each")
    for part in found.parts:
        _check_width(path, name, part)
    model.set_submodule(name, BlockLinears(found.parts))


def _put_alone(path: Path, model: PreTrainedModel, name: str, value: Blocks | torch.Tensor, dtype: torch.dtype) -> None:
    """Replace a parameter or buffer that is neither a weight nor a bias."""
    module, _, own = name.rpartition(".")
    there = getattr(model.get_submodule(module), own)
    if isinstance(value, Blocks) or value.shape != there.shape:
        raise UnsupportedModel(
            f"{path} has {name} of the shape {tuple(value.shape)}; the model has {tuple(there.shape)}"
        )
    owner = model.get_submodule(module)
    if own in owner._buffers:
        owner.register_buffer(own, value.to(getattr(owner, own).dtype))
        return
    setattr(owner, own, nn.Parameter(value.to(dtype), requires_grad=False))
    owner.register_buffer(f"exact_{own}", value.float())


def _put_experts(path: Path, model: PreTrainedModel, name: str, found: Experts) -> None:
    module: Any = model.get_submodule(name)
    for part, shape in shapes_of(module).items():
        stack: Stack = getattr(found, part)
        if stack.weight.shape != shape:
            raise UnsupportedModel(f"{path} has {name}.{part} of the shape {stack.weight.shape}; the model has {shape}")
        if (stack.bias is None) != (getattr(module, "down_proj_bias", None) is None) or (
            stack.bias is not None and tuple(stack.bias.shape) != shape[:2]
        ):
            raise UnsupportedModel(f"{path} has other biases of {name}.{part} than the model")
        _check_width(path, f"{name}.{part}", stack.weight)
    model.set_submodule(name, BlockExperts(found.gate, found.up, found.down, module))


def shapes_of(module: Any) -> dict[str, tuple[int, int, int]]:
    """Return the shapes of experts' weights, `(experts, out, in)`, in a module of transformers."""
    count, hidden, inner = int(module.num_experts), *_widths(module)
    return {"gate": (count, inner, hidden), "up": (count, inner, hidden), "down": (count, hidden, inner)}


def _widths(module: Any) -> tuple[int, int]:
    """The widths of rows and of experts' inner values, in a module of transformers."""
    if hasattr(module, "act_fn"):
        return int(module.down_proj.shape[1]), int(module.down_proj.shape[2])
    return int(module.down_proj.shape[2]), int(module.down_proj.shape[1])  # gpt-oss


def _check_width(path: Path, name: str, weight: Blocks) -> None:
    if weight.columns % COLUMNS:
        raise UnsupportedModel(f"{path}: {name} is {weight.columns} wide, which is no multiple of {COLUMNS}")
