"""LoRA adapters with random weights, as PEFT saves them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from keepwarm.core.lora import Lora
from keepwarm.runtime.adapters.peft_folder import read
from keepwarm.runtime.native.families import described
from keepwarm.runtime.native.low_rank import PackedLora, Places

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
EVERY = (*ATTENTION, *MLP)


def adapter(
    folder: Path,
    model: nn.Module,
    targets: Sequence[str] = EVERY,
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    size: float = 0.2,
    **settings: Any,
) -> Path:
    """Save an adapter of a model's modules whose names end in `targets`. Its weights have a deviation of `size`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets:
            out, width = (getattr(module, size, 0) for size in ("out_features", "in_features"))
            a, b = (torch.randn(shape, generator=generator) * size for shape in ((rank, width), (out, rank)))
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    return saved(folder, tensors, r=rank, lora_alpha=alpha, target_modules=[*targets], **settings)


def saved(folder: Path, tensors: dict[str, torch.Tensor], **settings: Any) -> Path:
    """Save tensors and settings as an adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8} | settings))
    return folder


def loaded(folder: Path, model: Any) -> Lora:
    """An adapter, packed for a model's kernels without any check."""
    changes = read(folder)
    return Lora(folder.name, folder.name, PackedLora(changes, Places(model, described(model))))


def merged(folder: Path, model: Any) -> Any:
    """A model in float64 whose weights have an adapter in them."""
    made = type(model)(model.config).double().eval()
    made.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
    made.config._attn_implementation = made.config._experts_implementation = "eager"
    modules = dict(made.named_modules())
    with torch.no_grad():
        for name, low in read(folder).items():
            modules[name].weight += low.scale * (low.b.double() @ low.a.double())
    return made
