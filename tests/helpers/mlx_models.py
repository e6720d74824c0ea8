"""Tiny model folders with random weights: keys and values alone, windows, states, both, layers with two caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import _get_classes
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

VOCABULARY = 300
WINDOW = 32
_TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} </s> {% endfor %}<assistant>"
_BASE = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 4096}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _BASE | _HEADS | {"intermediate_size": 128, "rms_norm_eps": 1e-5, "head_dim": 32},
    "gemma3_text": _BASE
    | _HEADS
    | {"intermediate_size": 128, "head_dim": 16, "sliding_window": WINDOW, "sliding_window_pattern": 3},
    "mamba": _BASE
    | {
        "intermediate_size": 128,
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "lfm2": _BASE
    | _HEADS
    | {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": 128,
        "full_attn_idxs": [1],
    },
    "deepseek_v32": _BASE
    | {
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "index_head_dim": 32,
        "index_n_heads": 2,
        "index_topk": 8,
        "kv_lora_rank": 16,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 3,
    },
}


def write(folder: Path, kind: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Write a model of a `kind`. Another `seed` gives other weights, `changes` are of the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[kind] | {"model_type": kind, "eos_token_id": 2} | changes
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    mx.random.seed(seed)
    weights = tree_map(_spread, model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(weights)))
    (folder / "config.json").write_text(json.dumps(config))
    _tokenizer(folder)
    return folder


def _spread(array: Any) -> Any:
    """Return random values in place of a layer's, so that every token changes the logits."""
    if array.ndim < 2:
        return array
    return mx.random.normal(array.shape) * (0.4 if array.shape[0] == VOCABULARY else 1.2 / array.shape[-1] ** 0.5)


def _tokenizer(folder: Path) -> None:
    special = ["<unk>", "<s>", "</s>", "<system>", "<user>", "<assistant>"]
    words = [*special, *(f"w{number}" for number in range(VOCABULARY - len(special)))]
    tokenizer = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
