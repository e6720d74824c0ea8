"""The tensors of a GGUF file by their names in the model: weights in blocks, everything else in floats."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from keepwarm.errors import UnsupportedModel
from keepwarm.runtime.filling import Experts, Joined
from keepwarm.runtime.gguf import delta_nets, mamba
from keepwarm.runtime.gguf.architectures import ARCHITECTURES
from keepwarm.runtime.gguf.file import FLOATS
from keepwarm.runtime.gguf.reader import Reader
from keepwarm.runtime.native.block_experts import Stack, Stacked
from keepwarm.runtime.native.blocks import KINDS, Blocks, raw_bytes

# Matrices that are floats.
_KEPT = re.compile(r"(ffn_gate_inp|ffn_gate_inp_shexp|shortconv\.conv|ssm_conv1d|ssm_norm)\.weight$|ssm_[ad]$")
_LLAMAS = ("arcee", "granite", "granitemoe", "mistral3", "smollm3")
_LIKE = {**dict.fromkeys(_LLAMAS, "llama"), "lfm2moe": "lfm2"}  # rows are ordered as there
_FACTORS = "rope_freqs.weight"  # rotary frequencies are divided by it
_OTHERS = {  # names that gguf's table does not have, by how the model's end
    ".dt_bias": "ssm_dt.bias",
    ".expert_bias": "exp_probs_b.bias",
    ".block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    ".router.scale": "ffn_gate_inp.scale",
    ".router.per_expert_scale": "ffn_down_exps.scale",
}
_PARTS = ("gate", "up", "down")
_JOINED = ".shared_mlp.input_linear.weight"  # a model's product of a gate and an up, which are two in a file
_JOINED_BACK = ".shared_mlp.output_linear.weight"
_SHARED = ("", "_shexp")  # how files name such an MLP: without experts, and beside them
_EXPERTS = re.compile(r"blk\.\d+\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)$")

Found = Blocks | torch.Tensor | Experts | Joined


def _is_matrix(tensor: Any) -> bool:
    return len(tensor.shape) > 1 and not _KEPT.search(tensor.name) and not tensor.name.endswith("_exps.bias")


def _in_blocks(tensors: Any, has_nets: bool) -> bool:
    """Whether matrices stay as the file has them. Those of a file that nobody quantized become the model's own, unless
    it has experts or delta nets, which are made of other parts than the model's."""
    return has_nets or any(each.tensor_type.name in KINDS or _EXPERTS.match(each.name) for each in tensors)


def tensors_of(path: Path, reader: Reader, model: PreTrainedModel) -> dict[str, Found]:
    """Return the file's tensors by their names in the model."""
    architecture = str(reader.value("general.architecture"))
    processor, names = processor_of(model, architecture), tensor_names(model, architecture)
    stay = _in_blocks(reader.tensors, ARCHITECTURES[architecture].has_nets)
    layers, more = model.config.num_hidden_layers, reader.value(f"{architecture}.nextn_predict_layers") or 0
    # Layers that predict further tokens are left out.
    behind = tuple(f"blk.{layer}." for layer in range(layers, layers + min(more, layers)))
    found: dict[str, Found] = {}
    parts: dict[str, dict[str, Any]] = defaultdict(dict)  # of experts, and of joined products
    for each in reader.tensors:
        if each.name == _FACTORS:
            if each.tensor_type is not GGMLQuantizationType.F32:
                raise UnsupportedModel(f"{path}: {_FACTORS} is {each.tensor_type.name}, F32 is expected")
            _divide_frequencies(model, each.data)
            continue
        if each.name.startswith(behind):
            continue
        if each.name not in names:
            raise UnsupportedModel(f"{path} has a tensor {each.name}, for which {type(model).__name__} has no place")
        if piece := _EXPERTS.fullmatch(each.name):
            parts[names[each.name]] |= _of_experts(each, *piece.groups())
        elif names[each.name].endswith(_JOINED):
            if (part := _part(each.name)) in parts[names[each.name]]:
                raise UnsupportedModel(f"{path} has the {part} of {names[each.name]} twice")
            parts[names[each.name]][part] = _values(each, processor, stay)
        elif names[each.name] in found:
            raise UnsupportedModel(f"{path} has {names[each.name]} twice, the other one as {each.name}")
        else:
            found[names[each.name]] = _values(each, processor, stay)
    if missing := [theirs for theirs, name in names.items() if name.endswith(".expert_bias") and name not in found]:
        raise UnsupportedModel(f"{path} lacks {missing[0]}")  # it is a buffer of the model, which has numbers already
    for module, pieces in parts.items():
        if module.endswith(_JOINED):
            if lacking := {"gate", "up"} - pieces.keys():
                raise UnsupportedModel(f"{path} lacks the {lacking.pop()} of {module}")
            found |= _joined(module, (pieces["gate"], pieces["up"]))
            continue
        if lacking := {f"{name}_weight" for name in _PARTS} - pieces.keys():
            raise UnsupportedModel(f"{path} lacks {', '.join(sorted(lacking))} of {module}")
        found[module] = Experts(*(Stack(pieces[f"{name}_weight"], pieces.get(f"{name}_bias")) for name in _PARTS))
    return found


def _joined(name: str, parts: tuple[Any, ...]) -> dict[str, Found]:
    """Return the tensors of a product whose parts are several in a file."""
    if all(isinstance(part, torch.Tensor) for part in parts):
        return {name: torch.cat(parts)}
    return {name.removesuffix(".weight"): Joined(parts)}


def _values(tensor: Any, processor: Any, stay: bool) -> Blocks | torch.Tensor:
    """Return a tensor as the model has it. A matrix in floats is a weight in blocks, too, if others are (`stay`)."""
    values: npt.NDArray[Any] = tensor.data
    kind, is_matrix = tensor.tensor_type, _is_matrix(tensor)
    if kind in FLOATS and not (stay and is_matrix):
        floats = _floats(tensor)
        made = torch.from_numpy(np.ascontiguousarray(processor.process(weights=floats, name=tensor.name).weights))
        return made if kind is GGMLQuantizationType.F32 or not is_matrix else made.to(FLOATS[kind])
    if kind in FLOATS:  # a processor reorders rows
        values = values.view(np.uint8).reshape(len(values), -1)
    values = processor.process(weights=values, name=tensor.name).weights
    return Blocks(raw_bytes(values), int(kind), int(tensor.shape[0]))


def _of_experts(tensor: Any, part: str, what: str) -> dict[str, Stacked | torch.Tensor]:
    """Return the weights or biases of a layer's experts by the part's name. Some files have two parts in one tensor."""
    if what == "bias":
        return {f"{part}_bias": torch.from_numpy(np.ascontiguousarray(_floats(tensor)))}
    if len(tensor.shape) != 3:
        raise ValueError(f"{tensor.name} has {len(tensor.shape)} dimensions; experts have 3")
    columns, rows, experts = (int(size) for size in tensor.shape)
    raw = raw_bytes(tensor.data).reshape(experts, rows, -1)
    if part != "gate_up":
        return {f"{part}_weight": Stacked(raw, int(tensor.tensor_type), columns)}
    halves = zip(("gate", "up"), raw.chunk(2, dim=1), strict=True)
    return {f"{name}_weight": Stacked(half, int(tensor.tensor_type), columns) for name, half in halves}


def _floats(tensor: Any) -> npt.NDArray[np.float32]:
    """Return a tensor of floats in float32, `[..., columns]`."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    raw = torch.from_numpy(np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1))
    return raw.view(FLOATS[tensor.tensor_type]).reshape(shape).float().numpy()


def processor_of(model: PreTrainedModel, architecture: str) -> Any:
    """Return what transformers does to the values of a file's tensors."""
    like = _LIKE.get(architecture, architecture)
    own = ARCHITECTURES[architecture]
    known: Any = TENSOR_PROCESSORS.get(like)
    if own.has_nets or own.has_mamba:
        known = delta_nets.Processor if own.has_nets else mamba.Processor
    return (known or TensorProcessor)(config=model.config.to_dict())


def tensor_names(model: PreTrainedModel, architecture: str) -> dict[str, str]:
    """Return the model's name of each tensor that a file may have. That of experts is their module's. transformers has
    a function for it, which makes its table of names anew for every module."""
    key = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(key, model.config.num_hidden_layers)
    found: dict[str, str] = {}
    for name in model.state_dict():
        module, _, own = name.rpartition(".")
        if module.endswith(".experts"):
            parts = (f"{_layer(name)}ffn_{part}_exps" for part in (*_PARTS, "gate_up"))
            found |= {f"{part}.{of}": module for part in parts for of in ("weight", "bias")}
        elif other := next((theirs for end, theirs in _OTHERS.items() if name.endswith(end)), ""):
            found[_layer(name) + other] = name
        elif name.endswith(_JOINED):
            found |= {f"{_layer(name)}ffn_{part}{shared}.weight": name for part in ("gate", "up") for shared in _SHARED}
        elif name.endswith(_JOINED_BACK):
            found |= {f"{_layer(name)}ffn_down{shared}.weight": name for shared in _SHARED}
        elif (theirs := table.get_name(name, (".weight", ".bias"))) is not None:
            found[theirs if own in ("weight", "bias", "A_log", "D") else f"{theirs}.weight"] = name
    return found


def _part(name: str) -> str:
    """Whether a tensor is the gate or the up of a layer's MLP."""
    return "gate" if ".ffn_gate" in name else "up"


def _layer(name: str) -> str:
    """How a file's names begin for the layer of a parameter."""
    return f"blk.{next(part for part in name.split('.') if part.isdigit())}."


def _divide_frequencies(model: PreTrainedModel, factors: npt.NDArray[Any]) -> None:
    rotary: Any = model.get_decoder().rotary_emb
    divisors = torch.from_numpy(np.array(factors, dtype=np.float32))
    full = "full_attention_" if hasattr(rotary, "full_attention_inv_freq") else ""  # where types of layers differ
    tables = [getattr(rotary, full + name, None) for name in ("inv_freq", "original_inv_freq")]
    if tables[0] is None or any(table is not None and table.shape != divisors.shape for table in tables):
        raise ValueError(f"{_FACTORS} has {len(divisors)} factors, which do not fit the model's rotary embedding")
    for table in tables:
        if table is not None:
            table.div_(divisors)
