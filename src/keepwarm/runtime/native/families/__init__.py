"""The families of models that the lean decoder runs. Each has a small file that describes its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from keepwarm.runtime.native.blocks import COLUMNS, BlockEmbedding, BlockLinear, Blocks
from keepwarm.runtime.native.description import ACTIVATIONS, Description, NotCovered
from keepwarm.runtime.native.families import cohere, exaone, gemma, glm, granite, llama, olmo, phi, starcoder

_FAMILIES: dict[str, Callable[[Any], Description]] = {
    "Cohere2ForCausalLM": cohere.describe,
    "CohereForCausalLM": cohere.describe,
    "Exaone4ForCausalLM": exaone.describe,
    "Gemma2ForCausalLM": gemma.describe,
    "Gemma3ForCausalLM": gemma.describe,
    "GemmaForCausalLM": gemma.describe_first,
    "Glm4ForCausalLM": glm.describe,
    "GlmForCausalLM": glm.describe,
    "GraniteForCausalLM": granite.describe,
    "LlamaForCausalLM": llama.describe,
    "MinistralForCausalLM": llama.describe,
    "MistralForCausalLM": llama.describe,
    "Olmo2ForCausalLM": olmo.describe,
    "Olmo3ForCausalLM": olmo.describe,
    "Phi3ForCausalLM": phi.describe,
    "Qwen2ForCausalLM": llama.describe,
    "Qwen3ForCausalLM": llama.describe,
    "SmolLM3ForCausalLM": llama.describe,
    "Starcoder2ForCausalLM": starcoder.describe,
}
_DIMS = (16, 32, 64, 128, 256)
_LANES = 16
_OWN = ("torch.nn.modules.", "transformers.models.", "transformers.activations")


def described(model: Any) -> Description:
    """Describe a model. Raises NotCovered, with the reason, if the kernels cannot run it."""
    name = type(model).__name__
    if name not in _FAMILIES or not type(model).__module__.startswith("transformers.models."):
        raise NotCovered(f"{name} is not one of {', '.join(sorted(_FAMILIES))}")
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
    if isinstance(module, BlockLinear | BlockEmbedding):
        return True
    if isinstance(module, nn.Linear):
        return type(module) is nn.Linear
    return type(module).__module__.startswith(_OWN)


def _check(found: Description) -> None:
    if found.activation not in ACTIVATIONS:
        raise NotCovered(f"activation {found.activation!r}")
    products = [linear for layer in found.layers for linear in (layer.attention.o, layer.mlp.up, layer.mlp.down)]
    widths = {found.head.shape[1], *(linear.weight.shape[1] for linear in products)}
    if found.dim not in _DIMS or any(width % _LANES for width in widths):
        raise NotCovered("widths that are no multiple of 16, or an unusual head width")
    in_blocks = [isinstance(weight, Blocks) for weight in (found.head, found.embedding)]
    in_blocks += [isinstance(each.weight, Blocks) for layer in found.layers for each in layer.products]
    if any(in_blocks) and (not all(in_blocks) or found.dim % COLUMNS):
        raise NotCovered(f"weights of which only some are in blocks, or heads of {found.dim}")
    if found.rotary % 2 or found.rotary > found.dim:
        raise NotCovered(f"a rotary embedding of {found.rotary} dims")
