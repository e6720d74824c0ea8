"""Tiny random-weight models of real hybrid classes: some layers keep KV, others a recurrent state."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tests.helpers.models import VOCABULARY

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


# Qwen3.5: three layers with a state, then one with KV. Falcon-H1: both in every layer. Granite 4: Mamba-2 and experts.
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "falcon_h1": {
        "num_hidden_layers": 2,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
}


def hybrid(family: str = "qwen3_5_text", dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A random-weight hybrid; the same seed gives the same weights."""
    config = transformers.AutoConfig.for_model(family, **(_SHAPE | HYBRIDS[family] | changes))
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():  # larger than the usual start, so that logits differ and the state matters
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    finally:
        torch.random.set_rng_state(state)
    return model.to(dtype).eval()


SYSTEM = "You are the clerk of a small harbour. " + " ".join(
    f"Pier {n} takes boats up to {n * 7 % 40} metres, its keeper is number {n * 37 % 1009}." for n in range(60)
)


def asked(question: str, answer: str = "", then: str = "") -> list[dict[str, str]]:
    """A chat that ends with a question; with an answer to it, with the one after it."""
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return [*chat, {"role": "assistant", "content": answer}, {"role": "user", "content": then}] if answer else chat
