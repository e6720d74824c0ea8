"""Models of random weights and a tokenizer of bytes: a GPU machine may have no network, and room for little."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_SPECIAL = ("<|start|>", "<|end|>", "<|pad|>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)

_SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}

# Class names and settings. All are small: what must be equal is a matter of order and places, not of size.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dense": ("Qwen3Config", "Qwen3ForCausalLM", _SMALL),
    "windowed": ("Gemma2Config", "Gemma2ForCausalLM", _SMALL | {"sliding_window": 96}),
    "experts": ("MixtralConfig", "MixtralForCausalLM", _SMALL | {"num_local_experts": 4, "sliding_window": None}),
    "hybrid": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {key: value for key, value in _SMALL.items() if key != "head_dim"}
        | {"layer_types": ["conv", "full_attention"]},
    ),
}

ON_TRITON = ("dense", "windowed", "experts")  # the families that the kernels for GPUs run

# The shapes of models that people run. Weights are random: times do not depend on them.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": _SMALL | {"max_position_embeddings": 40_960},
    "0.6b": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
    },
    "8b": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
    },
}


def byte_tokenizer() -> Any:
    """A tokenizer with one token for each byte, and a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate((*letters, *_SPECIAL))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", chat_template=_TEMPLATE
    )


def small(family: str, dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    """Return a small model of a family and its tokenizer; in every process the same."""
    config_class, model_class, settings = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings))
    with torch.no_grad():
        for parameter in model.parameters():  # larger than usual, so that logits differ and attention matters
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.to(device, dtype).eval(), byte_tokenizer()


def shaped(size: str, device: str) -> tuple[Any, Any]:
    """Return a Qwen 3 of a given size with random weights in bfloat16, made on the device, and its tokenizer. As in
    trained models, layers add little to what they get: otherwise each amplifies the rounding of those before."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES[size]))
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for layer in model.model.layers:
            for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
                last.weight /= (2 * len(model.model.layers)) ** 0.5
    return model.eval(), byte_tokenizer()


def token_ids(count: int, seed: int = 0) -> list[int]:
    """Return `count` ids that every model here has."""
    return [(seed * 131 + n * 7919 + n * n) % 251 for n in range(count)]
