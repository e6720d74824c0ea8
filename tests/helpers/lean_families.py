"""Tiny random-weight models of every family that the compiled kernels run."""

from __future__ import annotations

from typing import Any

import torch
from tests.helpers.models import FAMILIES, made

WINDOW = 70  # more than a unit of the kernels, and no multiple of it
_PLAIN = FAMILIES["llama"][2] | {"num_hidden_layers": 3, "vocab_size": 640}
_WIDE = {name: value for name, value in _PLAIN.items() if name != "head_dim"}  # as wide as hidden size and heads say
_WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_FACTORS = {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logits_scaling": 4.0, "attention_multiplier": 0.1}
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
_FEW = {"moe_intermediate_size": 32, "num_experts_per_tok": 4, "decoder_sparse_step": 1}
_FAR = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000042.0}}
_PART = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}

_QUARTER = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_n_groups": 2, "mamba_expand": 2}
_GRANITE = _MAMBA | {"layers_block_type": ["mamba", "attention", "mamba"], "shared_intermediate_size": 64}

_GEMMA4 = {
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
    "sliding_window": WINDOW,
    "head_dim": 32,
    "global_head_dim": 64,
    "vocab_size_per_layer_input": 640,
}

_EXPERTS4 = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}

LEAN: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("Arcee", _PLAIN),
    "bamba": ("Bamba", _PLAIN | _MAMBA | {"attn_layer_indices": [1], "mamba_conv_bias": True}),
    "biased": ("Llama", _PLAIN | {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "cohere": ("Cohere", _WIDE),
    "cohere2": ("Cohere2", _WIDE | _WINDOWS),
    "cwm": ("Cwm", _PLAIN | _WINDOWS),
    "ernie4.5": ("Ernie4_5", _PLAIN | {"use_bias": True}),
    "exaone4": ("Exaone4", _WIDE | _WINDOWS),
    "falcon3": ("Llama", _PLAIN | _FAR | {"head_dim": 256}),
    "flex-olmo": ("FlexOlmo", _WIDE | {"num_experts": 7, "num_experts_per_tok": 5}),
    "gemma": ("Gemma", _PLAIN | {"head_dim": 32}),
    "gemma2": ("Gemma2", _PLAIN | _WINDOWS),
    "gemma3": ("Gemma3", _PLAIN | _WINDOWS | {"head_dim": 256}),
    "gemma4": (
        "Gemma4",
        _PLAIN | _GEMMA4 | {"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "gemma4-dense": (
        "Gemma4",
        _PLAIN
        | _GEMMA4
        | {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4-moe": (
        "Gemma4",
        _PLAIN
        | _GEMMA4
        | _EXPERTS4
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4-unified": ("Gemma4Unified", _PLAIN | _GEMMA4 | {"attention_k_eq_v": True, "num_kv_shared_layers": 2}),
    "glm": ("Glm", _PLAIN),
    "glm4": ("Glm4", _PLAIN),
    "glm4-moe": (
        "Glm4Moe",
        _PLAIN
        | _PART
        | _FEW
        | {"n_routed_experts": 8, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "use_qk_norm": True},
    ),
    "gpt-oss": ("GptOss", _PLAIN | _WINDOWS | _EXPERTS | {"swiglu_limit": 1.5}),
    "granite": ("Granite", _WIDE | _FACTORS),
    "granite-moe": ("GraniteMoe", _WIDE | _FACTORS | _EXPERTS),
    "granite-moe-shared": ("GraniteMoeShared", _WIDE | _FACTORS | _EXPERTS | {"shared_intermediate_size": 64}),
    "granite4": ("GraniteMoeHybrid", _WIDE | _FACTORS | _GRANITE | {"num_local_experts": 0}),
    "granite4-moe": ("GraniteMoeHybrid", _WIDE | _FACTORS | _GRANITE | _EXPERTS | {"position_embedding_type": "rope"}),
    "granite4-dense": (
        "GraniteMoeHybrid",
        _WIDE
        | _FACTORS
        | {
            "layers_block_type": ["attention"] * 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
        },
    ),
    "granite-swa": ("GraniteSWA", _WIDE | _FACTORS | _WINDOWS | {"layer_rope_theta": [1e4, 0, 1e6]}),
    "granite-moe-swa": ("GraniteMoeSWA", _WIDE | _FACTORS | _WINDOWS | _EXPERTS | {"shared_intermediate_size": 64}),
    "helium": ("Helium", _PLAIN),
    "hyperclova": ("HyperCLOVAX", _PLAIN | _FACTORS),
    "jais2": ("Jais2", _PLAIN),
    "lfm2": (
        "Lfm2",
        _WIDE
        | {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False, "conv_bias": True},
    ),
    "lfm2-last": ("Lfm2", _WIDE | {"layer_types": ["conv", "conv", "full_attention"], "conv_L_cache": 4}),
    "lfm2-moe": (
        "Lfm2Moe",
        _WIDE
        | _FEW
        | {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_experts": 8,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "lfm3": (
        "Lfm3",
        _PLAIN
        | {
            "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "use_attention_gate": True,
            "use_sandwich_norm": True,
        },
    ),
    "ministral": ("Ministral", _PLAIN | _WINDOWS),
    "ministral3": (
        "Ministral3",
        _PLAIN
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "llama_4_scaling_beta": 0.5,
                "original_max_position_embeddings": 100,
            }
        },
    ),
    "mistral-windowed": ("Mistral", _PLAIN | {"sliding_window": WINDOW}),
    "mixtral": ("Mixtral", _PLAIN | _EXPERTS),
    "nemotron": ("Nemotron", _PLAIN | _PART),
    "olmo2": ("Olmo2", _WIDE),
    "olmo3": ("Olmo3", _WIDE | _WINDOWS),
    "olmoe": ("Olmoe", _WIDE | {"num_experts": 16, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "phi3": ("Phi3", _WIDE),
    "phi4": ("Phi3", _WIDE | _PART),
    "qwen2-moe": (
        "Qwen2Moe",
        _WIDE | _FEW | {"num_experts": 6, "shared_expert_intermediate_size": 64, "mlp_only_layers": [1]},
    ),
    "qwen3-moe": ("Qwen3Moe", _PLAIN | _FEW | {"num_experts": 40, "norm_topk_prob": True}),
    "qwen3.5": ("Qwen3_5", _PLAIN | _DELTA | _QUARTER),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        _PLAIN | _DELTA | _QUARTER | _FEW | {"num_experts": 8, "shared_expert_intermediate_size": 64},
    ),
    "qwen3-next": (
        "Qwen3Next",
        _PLAIN | _DELTA | _QUARTER | _FEW | {"num_experts": 8, "shared_expert_intermediate_size": 64},
    ),
    "seed-oss": ("SeedOss", _PLAIN | {"attention_out_bias": True}),
    "smollm3": ("SmolLM3", _WIDE | {"no_rope_layer_interval": 2}),
    "starcoder2": ("Starcoder2", _WIDE | {"sliding_window": None}),
    "vaultgemma": ("VaultGemma", _PLAIN | _WINDOWS | {"head_dim": 32}),
}


def lean_family(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """One of them, whose norms and biases tell their parts apart."""
    family, settings = LEAN[name]
    config = (
        f"{family}TextConfig"
        if family in ("Gemma3", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe")
        else f"{family}Config"
    )
    return unlike(made(config, f"{family}ForCausalLM", settings | changes, dtype))


def unlike(model: Any) -> Any:
    """The model with norms and biases that are not all one or zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += (0.2 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
        for name, buffer in model.named_buffers():
            if name.endswith(("bias", "layer_scalar")):  # a router's correction; Gemma 4's factor of a layer
                buffer += 0.2 * torch.randn(buffer.shape, generator=generator)
    return model
