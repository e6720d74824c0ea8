"""Loads a model from a folder with weights of 4 bits, and leaves them as the files have them (`native.grouped`).

transformers reads the configuration and makes the empty model; its own code for these formats, which needs packages of
theirs, is not used.
"""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from keepwarm.core.identity import json_digest
from keepwarm.errors import UnsupportedModel
from keepwarm.runtime.checkpoint import generation_on, language_model
from keepwarm.runtime.filling import Experts, empty, fill, keep_maps, shapes_of
from keepwarm.runtime.int4.formats import Format, format_of
from keepwarm.runtime.native.block_experts import Several, Stack
from keepwarm.runtime.native.blocks import COLUMNS, FLOATS, Blocks, can_compute
from keepwarm.runtime.native.description import NotCovered
from keepwarm.runtime.native.families import COVERED, described
from keepwarm.runtime.native.grouped import Grouped, NotMapped
from keepwarm.runtime.tensor_files import COMPUTED, Tensors, has_own_head, named_as_in_model

log = logging.getLogger(__name__)

_EXPERT = re.compile(r"(.+\.experts)\.(0|[1-9][0-9]*)\.(gate_proj|up_proj|down_proj|w1|w2|w3)")
_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_Products = dict[str, dict[int, Grouped]]  # of a layer's experts: by part and number


def settings_of(folder: Path) -> dict[str, Any]:
    """Return how a folder's weights are quantized, as its configuration says; empty if they are not."""
    try:
        found = json.loads((folder / "config.json").read_bytes()).get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return {}  # whoever loads it next says so
    return found if isinstance(found, dict) else {}


def kept_int4(
    folder: Path, device: torch.device, dtype: torch.dtype, *, trust: bool
) -> tuple[PreTrainedModel | None, str]:
    """Return the model of a folder with weights of 4 bits; or None, and a sentence that says why the kernels do not run
    it. The sentence is empty for a folder without such weights.

    `dtype` is that of keys and values, `trust` whether code in the folder may run. Raises UnsupportedModel for files
    that are damaged.
    """
    try:
        return _model(folder, device, dtype, trust=trust), ""
    except NotMapped as reason:
        log.info("%s runs through transformers: %s", folder, reason)
        return None, f". Its 4-bit weights do not run on the compiled kernels: {reason}"


def _model(folder: Path, device: torch.device, dtype: torch.dtype, *, trust: bool) -> PreTrainedModel | None:
    settings = settings_of(folder)
    form = format_of(settings)
    if form is None:
        return None
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        raise NotMapped(f"the kernels run on the CPU, in bfloat16 or float32; this is {device} and {dtype}")
    if not can_compute():
        raise NotMapped("the kernels need a C++ compiler (install g++)")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    if not type(config).__module__.startswith("transformers.models."):
        raise NotMapped("the kernels run models of transformers' own classes")
    text = language_model(config)
    config = config if text is None else text
    del config.quantization_config
    tensors = Tensors.of(folder)
    named = named_as_in_model(folder, tensors.found, is_part=text is not None)
    config.tie_word_embeddings = config.tie_word_embeddings and not has_own_head(named)
    model = empty(config, dtype)
    if type(model).__name__ not in COVERED:
        raise NotMapped(f"the kernels do not have {type(model).__name__}")
    fill(folder, model, dict(_tensors(folder, model, form, named)), dtype)
    _check(model)
    keep_maps(model, tensors.maps)
    types = {name: str(tensor.dtype) for name, tensor in tensors.found.items()}
    # Equal bytes mean different weights in different types. Other ways to run the folder have other tensors.
    kept = {"kept": "as in the file", "types": json_digest("keepwarm int4 types 1", types)}
    model.config.quantization_config = settings | {"keepwarm": kept}
    model.generation_config = generation_on(folder)
    return model


def _tensors(
    folder: Path, model: PreTrainedModel, form: Format, found: Mapping[str, tuple[str, torch.Tensor]]
) -> Iterator[Any]:
    """Yield names of weights and biases with their tensors, as `filling.fill` takes them."""
    modules = dict(model.named_modules())
    parts: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    told: dict[str, str] = {}  # what the folder calls a module
    for name, (theirs, tensor) in found.items():
        if module := form.module_of(name):
            told[module] = theirs.rpartition(".")[0]
            parts[module][name.rpartition(".")[2]] = tensor
        elif not name.endswith(COMPUTED) and not (name == "lm_head.weight" and model.config.tie_word_embeddings):
            yield from _plain(name, tensor, modules, theirs)
    experts: dict[str, _Products] = defaultdict(lambda: defaultdict(dict))
    theirs_of: dict[str, str] = {}  # what the folder calls experts
    for module, tensors in parts.items():
        try:
            if (expert := _EXPERT.fullmatch(module)) is not None:
                owner, part, number = modules.get(expert[1]), _PARTS[expert[3]], int(expert[2])
                if not hasattr(owner, "num_experts"):
                    raise NotMapped(f"{told[module]}, which is no expert of {type(model).__name__}")
                theirs_of[expert[1]] = told[module].rsplit(".", 2)[0]
                if number in experts[expert[1]][part]:
                    raise ValueError(f"the {part} of an expert that is there under another name")
                experts[expert[1]][part][number] = form.weight(shapes_of(owner)[part][1:], tensors)
                continue
            linear = modules.get(module)
            if type(linear) is not nn.Linear:
                raise NotMapped(f"{told[module]}, which is no linear layer of {type(model).__name__}")
            yield f"{module}.weight", form.weight((linear.out_features, linear.in_features), tensors)
        except ValueError as error:
            raise UnsupportedModel(f"{folder}: {told[module]} has {error}. Fetch the folder again") from error
    for module, products in experts.items():
        yield module, _stacked(folder, theirs_of[module], modules[module], products)


def _stacked(folder: Path, name: str, module: Any, products: _Products) -> Experts:
    """Return the experts of a layer from each one's weights, by the part and the expert's number."""
    numbers = set(range(int(module.num_experts)))
    for part in shapes_of(module):
        if wrong := sorted(numbers ^ set(products[part])):
            raise UnsupportedModel(
                f"{folder}: {name} has {len(products[part])} weights of its experts' {part}; expected {len(numbers)}. "
                f"Expert {wrong[0]} is {'missing' if wrong[0] in numbers else 'one too many'}. Fetch the folder again"
            )
    return Experts(**{part: Stack(Several.of([each[at] for at in sorted(each)])) for part, each in products.items()})


def _plain(name: str, tensor: torch.Tensor, modules: Mapping[str, nn.Module], theirs: str) -> Iterator[Any]:
    """Yield a tensor that nobody quantized, `theirs` in the folder: a weight in blocks if it is one of a product, else
    floats."""
    module, _, last = name.rpartition(".")
    owner: Any = modules.get(module)
    alone = last not in ("weight", "bias")
    if owner is not None and (last in owner._buffers or (alone and last in owner._parameters)):
        yield name, tensor.float()  # what a router adds to its scores, or the decay of a head
        return
    if last == "bias" and not tensor.any() and (_EXPERT.fullmatch(module) or getattr(owner, last, tensor) is None):
        return  # some tools write a bias of zeros for every module
    if owner is None or alone:
        raise NotMapped(f"a tensor {theirs}")
    if getattr(owner, last, None) is None:
        raise NotMapped(f"a tensor {theirs}, for which the model has no place")
    is_gate = isinstance(owner, nn.Linear) and owner.out_features == 1  # of a shared expert
    if last == "bias" or is_gate or not isinstance(owner, nn.Linear | nn.Embedding):
        yield name, tensor.float()
        return
    if tensor.dtype not in FLOATS:
        raise NotMapped(f"{theirs} in {tensor.dtype}, beside weights of 4 bits")
    if tensor.dim() != 2 or tensor.shape[1] % COLUMNS:
        raise NotMapped(f"{theirs} of the shape {list(tensor.shape)}")
    yield name, Blocks(tensor.view(torch.uint8), FLOATS[tensor.dtype], tensor.shape[1])


def _check(model: PreTrainedModel) -> None:
    """Raise NotMapped if the kernels do not run the model: without them it would be slow, and take more memory."""
    try:
        described(model)
    except NotCovered as reason:
        raise NotMapped(str(reason)) from reason
