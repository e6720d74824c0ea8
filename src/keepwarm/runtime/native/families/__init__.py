"""The families of models that the lean decoder runs. Each has a small file that describes its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from keepwarm.runtime.native.block_experts import BlockExperts, BlockStack, LinearStack
from keepwarm.runtime.native.blocks import BlockEmbedding, BlockLinear, BlockLinears
from keepwarm.runtime.native.description import Description, NotCovered
from keepwarm.runtime.native.families import (
    cohere,
    exaone,
    gemma,
    gemma4,
    glm,
    gpt_oss,
    granite,
    lfm2,
    llama,
    mamba,
    ministral,
    mixtral,
    nemotron,
    olmo,
    olmoe,
    phi,
    qwen_hybrid,
    starcoder,
    windows,
)
from keepwarm.runtime.native.families.checks import check
from keepwarm.runtime.native.narrow import NarrowEmbedding, NarrowLinear, TiedHead

_FAMILIES: dict[str, tuple[Callable[[Any], Description], Callable[[Any], windows.Windows]]] = {
    "ArceeForCausalLM": (llama.describe, windows.none),
    "BambaForCausalLM": (mamba.describe, windows.none),
    "Cohere2ForCausalLM": (cohere.describe, windows.by_type),
    "CohereForCausalLM": (cohere.describe, windows.none),
    "CwmForCausalLM": (llama.describe, windows.by_type),
    "Ernie4_5ForCausalLM": (llama.describe_interleaved, windows.none),
    "Exaone4ForCausalLM": (exaone.describe, windows.by_type),
    "FlexOlmoForCausalLM": (olmoe.describe_flex, windows.none),
    "Gemma2ForCausalLM": (gemma.describe_second, windows.by_type),
    "Gemma3ForCausalLM": (gemma.describe, windows.by_type),
    "Gemma4ForCausalLM": (gemma4.describe, windows.by_type),
    "Gemma4UnifiedForCausalLM": (gemma4.describe, windows.by_type),
    "GemmaForCausalLM": (gemma.describe_first, windows.none),
    "Glm4ForCausalLM": (glm.describe, windows.none),
    "Glm4MoeForCausalLM": (mixtral.describe, windows.none),
    "GlmForCausalLM": (glm.describe, windows.none),
    "GptOssForCausalLM": (gpt_oss.describe, windows.by_type),
    "GraniteForCausalLM": (granite.describe, windows.none),
    "GraniteMoeForCausalLM": (granite.describe_experts, windows.none),
    "GraniteMoeHybridForCausalLM": (granite.describe_hybrid, windows.none),
    "GraniteMoeSWAForCausalLM": (granite.describe_windows, windows.by_type),
    "GraniteMoeSharedForCausalLM": (granite.describe_experts, windows.none),
    "GraniteSWAForCausalLM": (granite.describe_windows, windows.by_type),
    "HeliumForCausalLM": (llama.describe_interleaved, windows.none),
    "HyperCLOVAXForCausalLM": (granite.describe_clova, windows.none),
    "Jais2ForCausalLM": (nemotron.describe_jais, windows.none),
    "Lfm2ForCausalLM": (lfm2.describe, windows.none),
    "Lfm2MoeForCausalLM": (lfm2.describe, windows.none),
    "Lfm3ForCausalLM": (lfm2.describe_third, windows.by_type),
    "LlamaForCausalLM": (llama.describe, windows.none),
    "MinistralForCausalLM": (llama.describe, windows.by_type),
    "Ministral3ForCausalLM": (ministral.describe, windows.in_all),
    "MistralForCausalLM": (llama.describe, windows.in_all),
    "MixtralForCausalLM": (mixtral.describe, windows.in_all),
    "NemotronForCausalLM": (nemotron.describe, windows.none),
    "Olmo2ForCausalLM": (olmo.describe, windows.none),
    "Olmo3ForCausalLM": (olmo.describe, windows.by_type),
    "OlmoeForCausalLM": (olmoe.describe, windows.none),
    "Phi3ForCausalLM": (phi.describe, windows.in_all),
    "Qwen2ForCausalLM": (llama.describe, windows.by_type),
    "Qwen2MoeForCausalLM": (mixtral.describe, windows.by_type),
    "Qwen3ForCausalLM": (llama.describe, windows.by_type),
    "Qwen3MoeForCausalLM": (mixtral.describe, windows.in_all),
    "Qwen3NextForCausalLM": (qwen_hybrid.describe, windows.none),
    "Qwen3_5ForCausalLM": (qwen_hybrid.describe, windows.none),
    "Qwen3_5MoeForCausalLM": (qwen_hybrid.describe, windows.none),
    "SeedOssForCausalLM": (llama.describe, windows.none),
    "SmolLM3ForCausalLM": (llama.describe, windows.by_type),
    "Starcoder2ForCausalLM": (starcoder.describe, windows.in_all),
    "VaultGemmaForCausalLM": (gemma.describe_vault, windows.by_type),
}
COVERED = tuple(sorted(_FAMILIES))  # classes of transformers
_UNUSUAL = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
_OURS = (
    *(BlockLinear, BlockLinears, BlockEmbedding, BlockExperts, BlockStack, LinearStack),
    *(NarrowLinear, NarrowEmbedding, TiedHead),
)
_OWN = ("torch.nn.modules.", "transformers.models.", "transformers.activations")


def described(model: Any, *, anywhere: bool = False) -> Description:
    """Describe a model on the processor, or on any one device if it may be `anywhere`. Raises NotCovered, with the
    reason, if the kernels cannot run it."""
    name = type(model).__name__
    if name not in _FAMILIES or not type(model).__module__.startswith("transformers.models."):
        raise NotCovered(f"{name} is not one of {', '.join(COVERED)}")
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        raise NotCovered("forward hooks")
    if other := next((module for module in model.modules() if not _is_plain(module)), None):
        raise NotCovered(f"modules that are not plain, quantized or with an adapter ({type(other).__name__})")
    config = model.config
    ahead = getattr(config, "use_bidirectional_attention", None)  # "vision": only tokens of pictures
    if ahead not in (None, False, "vision") or not getattr(config, "is_causal", True):
        raise NotCovered("attention to what follows")
    tensors = list(model.parameters())
    dtype, device = tensors[0].dtype, tensors[0].device
    if dtype not in (torch.float32, torch.bfloat16, *((torch.float16,) if anywhere else ())):
        raise NotCovered(f"dtype {dtype}")
    if (not anywhere and device.type != "cpu") or any(
        t.dtype is not dtype or t.device != device or not t.is_contiguous() for t in tensors
    ):
        raise NotCovered("weights of mixed dtype or device")
    try:
        describe, windows_of = _FAMILIES[name]
        found = replace(describe(model), windows=windows_of(model))
    except _UNUSUAL as error:  # a changed module, or another version of the class, has other parts
        raise NotCovered(f"its modules are not as usual ({error})") from error
    check(found, model.config.num_hidden_layers)
    return found


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module is of torch or of the model's own code. An adapter's wrapper has a `weight`, too, which
    does not tell what it computes."""
    if isinstance(module, _OURS):
        return True
    if isinstance(module, nn.Linear):
        return type(module) is nn.Linear
    return type(module).__module__.startswith(_OWN)
