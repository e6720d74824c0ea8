"""The families of models that the lean decoder runs. Each has a small file that describes its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from keepwarm.runtime.native.description import ACTIVATIONS, Description, NotCovered
from keepwarm.runtime.native.families import (
    cohere,
    exaone,
    gemma,
    glm,
    gpt_oss,
    granite,
    llama,
    mixtral,
    olmo,
    olmoe,
    phi,
    starcoder,
)

_FAMILIES: dict[str, Callable[[Any], Description]] = {
    "Cohere2ForCausalLM": cohere.describe,
    "CohereForCausalLM": cohere.describe,
    "Exaone4ForCausalLM": exaone.describe,
    "FlexOlmoForCausalLM": olmoe.describe_flex,
    "Gemma2ForCausalLM": gemma.describe,
    "Gemma3ForCausalLM": gemma.describe,
    "GemmaForCausalLM": gemma.describe_first,
    "Glm4ForCausalLM": glm.describe,
    "GlmForCausalLM": glm.describe,
    "GptOssForCausalLM": gpt_oss.describe,
    "GraniteForCausalLM": granite.describe,
    "GraniteMoeForCausalLM": granite.describe_experts,
    "GraniteMoeSharedForCausalLM": granite.describe_experts,
    "LlamaForCausalLM": llama.describe,
    "MinistralForCausalLM": llama.describe,
    "MistralForCausalLM": llama.describe,
    "MixtralForCausalLM": mixtral.describe,
    "Olmo2ForCausalLM": olmo.describe,
    "Olmo3ForCausalLM": olmo.describe,
    "OlmoeForCausalLM": olmoe.describe,
    "Phi3ForCausalLM": phi.describe,
    "Qwen2ForCausalLM": llama.describe,
    "Qwen2MoeForCausalLM": mixtral.describe,
    "Qwen3ForCausalLM": llama.describe,
    "Qwen3MoeForCausalLM": mixtral.describe,
    "SmolLM3ForCausalLM": llama.describe,
    "Starcoder2ForCausalLM": starcoder.describe,
}
COVERED = tuple(sorted(_FAMILIES))  # classes of transformers
_DIMS = (16, 32, 64, 128, 256)
_LANES = 16
_DEEP = 32  # elements that the matrix units take in at once
_MOST_EXPERTS = 1024  # as in model.h
_OWN = ("torch.nn.modules.", "transformers.models.", "transformers.activations")


def described(model: Any) -> Description:
    """Describe a model. Raises NotCovered, with the reason, if the kernels cannot run it."""
    name = type(model).__name__
    if name not in _FAMILIES or not type(model).__module__.startswith("transformers.models."):
        raise NotCovered(f"{name} is not one of {', '.join(COVERED)}")
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        raise NotCovered("forward hooks")
    if other := next((module for module in model.modules() if not _is_plain(module)), None):
        raise NotCovered(f"modules that are not plain, quantized or with an adapter ({type(other).__name__})")
    tensors = list(model.parameters())
    dtype = tensors[0].dtype
    if dtype not in (torch.float32, torch.bfloat16):
        raise NotCovered(f"dtype {dtype}")
    if any(t.dtype is not dtype or t.device.type != "cpu" or not t.is_contiguous() for t in tensors):
        raise NotCovered("weights of mixed dtype or device")
    try:
        found = _FAMILIES[name](model)
    except AttributeError as error:  # a changed module, or another version of the class, has other parts
        raise NotCovered(f"its modules are not as usual ({error})") from error
    _check(found)
    return found


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module is of torch or of the model's own code. An adapter's wrapper has a `weight`, too, which
    does not tell what it computes."""
    if isinstance(module, nn.Linear):
        return type(module) is nn.Linear
    return type(module).__module__.startswith(_OWN)


def _check(found: Description) -> None:
    if found.activation not in ACTIVATIONS:
        raise NotCovered(f"activation {found.activation!r}")
    products = [layer.attention.o for layer in found.layers]
    products += [linear for mlp in found.mlps for linear in (mlp.up, mlp.down)]
    widths = {found.head.shape[1], *(linear.weight.shape[1] for linear in products)}
    if found.dim not in _DIMS or any(width % _LANES for width in widths):
        raise NotCovered("widths that are no multiple of 16, or an unusual head width")
    if found.rotary % 2 or found.rotary > found.dim:
        raise NotCovered(f"a rotary embedding of {found.rotary} dims")
    if found.experts:
        _check_experts(found)
    elif len({mlp.down.weight.shape[1] for mlp in found.mlps}) > 1:
        raise NotCovered("MLPs of different widths")


def _check_experts(found: Description) -> None:
    """Layers and experts of different widths share one room, where what fills up a last tile would not stay zero."""
    mlps = [*found.mlps, *(experts.all for experts in found.experts)]
    widths = {found.head.shape[1], *(mlp.down.weight.shape[-1] for mlp in mlps)}
    if any(width % _DEEP for width in widths):
        raise NotCovered("experts, and widths that are no multiple of 32")
    for layer in found.layers:
        if layer.experts is None:
            continue
        if found.parallel or layer.experts.all.gate is None or (layer.mlp and layer.mlp.down.bias is not None):
            raise NotCovered("experts of another shape")
        if not 0 < layer.experts.chosen <= len(layer.experts.router.weight) <= _MOST_EXPERTS:
            raise NotCovered(f"{layer.experts.chosen} of {len(layer.experts.router.weight)} experts")
