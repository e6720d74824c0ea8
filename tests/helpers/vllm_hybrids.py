"""Tiny random-weight models of the real classes of which vLLM keeps several groups of KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tests.helpers.models import VOCABULARY

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}
_SLIDING = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_LINEAR = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
HYBRIDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", {"sliding_window": 64, "layer_types": _SLIDING}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": 64, "layer_types": _SLIDING}),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "sliding_window": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 64}),
    "granite": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        _MAMBA
        | {
            "layer_types": ["mamba", "mamba", "mamba", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 192,
            "position_embedding_type": "nope",
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 32,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 128,  # this and what follows: asked by vLLM of configurations as Liquid publishes them
            "conv_dim_out": 128,
            "conv_L_cache": 3,
            "block_dim": 128,
            "block_ff_dim": 192,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.0,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {"attention_chunk_size": 128, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 192},
    ),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM", _MAMBA | {"mamba_d_ssm": 256}),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": _LINEAR,
        },
    ),
}


def save_hybrid(family: str, folder: Path, seed: int = 0) -> Path:
    """Weights larger than the usual start, so that what is far away matters for the answer."""
    config_class, model_class, settings = HYBRIDS[family]
    config = getattr(transformers, config_class)(**(_SHAPE | settings))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "conv" not in name:
                torch.nn.init.normal_(parameter, std=0.1)
    model.float().save_pretrained(folder)
    return folder
