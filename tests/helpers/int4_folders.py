"""Tiny folders of 4-bit weights, quantized here as each format is defined, with the weights that they mean.

GPTQ and AWQ store `[in, out]`, compressed-tensors `[out, in]`. A word of 32 bits holds eight codes: GPTQ's along `in`,
AWQ's along `out` in the order 0, 2, 4, 6, 1, 3, 5, 7, compressed-tensors' along `in`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from tests.helpers.lean_families import lean_family
from tests.helpers.models import FAMILIES, tiny

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLAIN = tuple(range(8))
_PRODUCT = re.compile(r"_proj(_qkvz?|_z)?\.weight$")  # other weights stay in floats
SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}<s>assistant: "


@dataclass(frozen=True)
class How:
    """How a weight is quantized. `group` is None for one scale per output."""

    method: str  # gptq, gptq_v2, awq, compressed-tensors
    group: int | None = 128
    symmetric: bool = True
    dtype: torch.dtype = torch.float16


@dataclass
class Quantized:
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    meant: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # float64 [out, in], what the codes mean


def packed(codes: npt.NDArray[Any], axis: int, order: Sequence[int] = _PLAIN) -> torch.Tensor:
    """Pack eight codes to a word along an axis."""
    codes = np.moveaxis(codes, axis, -1).astype(np.uint32)
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % 8)])
    eights = codes.reshape(*codes.shape[:-1], -1, 8)
    words = np.zeros(eights.shape[:-1], np.uint32)
    for place, which in enumerate(order):
        words |= eights[..., which] << np.uint32(4 * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32))


def quantized(weight: torch.Tensor, how: How) -> Quantized:
    """Quantize `[out, in]`, rounding to the nearest code."""
    out, width = weight.shape
    group = how.group or width
    parts = weight.double().reshape(out, -1, group)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scales = parts.abs().amax(-1) / 7 if how.symmetric else (high - low) / 15
    scales = scales.clamp(min=1e-4).to(how.dtype)
    wide = scales.double()
    zeros = torch.full_like(wide, 8) if how.symmetric else (-low / wide).round().clamp(1, 15)
    codes = ((parts / wide[..., None]).round() + zeros[..., None]).clamp(0, 15)
    meant = (wide[..., None] * (codes - zeros[..., None])).reshape(out, width)
    return Quantized(_stored(how, codes.reshape(out, width).numpy(), scales, zeros.numpy()), meant)


def _stored(
    how: How, codes: npt.NDArray[Any], scales: torch.Tensor, zeros: npt.NDArray[Any]
) -> dict[str, torch.Tensor]:
    out, width = codes.shape
    if how.method == "compressed-tensors":
        found = {"weight_packed": packed(codes, 1), "weight_scale": scales, "weight_shape": torch.tensor([out, width])}
        return found if how.symmetric else found | {"weight_zero_point": packed(zeros, 0)}
    if how.method == "awq":
        return {
            "qweight": packed(codes.T, 1, _AWQ_ORDER),
            "qzeros": packed(zeros.T, 1, _AWQ_ORDER),
            "scales": scales.T.contiguous(),
        }
    return {
        "qweight": packed(codes.T, 0),
        "qzeros": packed(zeros.T - (how.method == "gptq"), 1),
        "scales": scales.T.contiguous(),
        "g_idx": torch.arange(width, dtype=torch.int32) // (how.group or width),
    }


def settings(how: How) -> dict[str, Any]:
    """The `quantization_config` that the format's own tools write."""
    group = how.group or -1
    if how.method == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": None,
        }
    if how.method != "compressed-tensors":
        return {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": group,
            "desc_act": False,
            "sym": how.symmetric,
            "true_sequential": True,
            "checkpoint_format": how.method,
        }
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": how.symmetric,
        "strategy": "group" if how.group else "channel",
        "group_size": how.group,
        "actorder": None,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
            }
        },
    }


@dataclass(frozen=True)
class Folder:
    path: Path
    model: Any  # transformers' own, in float64, with the weights that the folder's codes mean


def write(
    path: Path,
    how: How,
    tokenizer: Any,
    *,
    family: str = "qwen2",
    seed: int = 0,
    changed: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
    config: Mapping[str, Any] | None = None,
    quantization: Mapping[str, Any] | None = None,
    shards: int = 1,
) -> Folder:
    """Write a folder. `changed` may spoil its tensors; `config` and `quantization` add to its configuration."""
    shape = SHAPE | {"vocab_size": len(tokenizer)} | dict(config or {})
    known = family in FAMILIES
    model = tiny(family, torch.float32, seed, **shape) if known else lean_family(family, torch.float32, **shape)
    tensors: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        value = (parameter if parameter.dim() > 1 else _unlike(parameter, len(tensors))).to(how.dtype)
        if value.dim() == 3 and ".experts." in name:
            made, meant[name] = _experts(name, value * 0.3, how, model.config.model_type == "mixtral")
            tensors |= made
        elif _PRODUCT.search(name):
            made = quantized(value * 0.3, how)
            tensors |= {f"{name.removesuffix('weight')}{part}": each for part, each in made.tensors.items()}
            meant[name] = made.meant
        else:
            tensors[name], meant[name] = value, value.double()
    changed(tensors)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(path)
    told = model.config.to_dict() | {"quantization_config": settings(how) | dict(quantization or {})}
    told["architectures"], told["dtype"] = [type(model).__name__], str(how.dtype).removeprefix("torch.")
    (path / "config.json").write_text(json.dumps(told))
    _save(path, tensors, shards)
    exact = model.double()
    exact.config._experts_implementation = "eager"  # others have no float64
    exact.load_state_dict(meant, strict=False)
    return Folder(path, exact.eval())


def _experts(
    name: str, value: torch.Tensor, how: How, is_mixtral: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors of each expert's products as the formats' own tools write them, and what all mean together."""
    tensors: dict[str, torch.Tensor] = {}
    every = []
    parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
    other = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for number, weight in enumerate(value):
        means = []
        for part, each in zip(parts, weight.chunk(len(parts)), strict=True):
            made = quantized(each, how)
            module = f"{name.rpartition('.')[0]}.{number}.{other[part] if is_mixtral else part}"
            module = module.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else module
            tensors |= {f"{module}.{last}": tensor for last, tensor in made.tensors.items()}
            means.append(made.meant)
        every.append(torch.cat(means))
    return tensors, torch.stack(every)


def _unlike(parameter: torch.Tensor, seed: int) -> torch.Tensor:
    """Norms and biases that are not all one or zero."""
    more = 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return parameter + more


def _save(path: Path, tensors: Mapping[str, torch.Tensor], shards: int) -> None:
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(whole, path / "model.safetensors", {"format": "pt"})
        return
    places = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(whole)}
    for file in set(places.values()):
        save_file({name: whole[name] for name, at in places.items() if at == file}, path / file, {"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
