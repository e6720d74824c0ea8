"""Tiny GGUF files with random weights, of four kinds: keys and values alone, windows, states, and both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

WIDTH, HEADS, KV_HEADS, HEAD, FEED = 128, 4, 2, 32, 192
WORDS = 259  # the first token behind the special ones and all bytes
VOCABULARY = WORDS + 200
WINDOW = 24
CONTEXT = 1024

_Shapes = dict[str, tuple[int, ...]]


def write(path: Path, kind: str = "llama", seed: int = 0, context: int = CONTEXT) -> Path:
    """Write a model of a `kind`: llama, gemma3, mamba or lfm2. Another `seed` gives other weights."""
    random = np.random.default_rng(seed)
    writer = GGUFWriter(path, kind)
    writer.add_uint32(f"{kind}.context_length", context)
    writer.add_uint32(f"{kind}.embedding_length", WIDTH)
    writer.add_uint32(f"{kind}.feed_forward_length", 0 if kind == "mamba" else FEED)
    writer.add_float32(f"{kind}.attention.layer_norm_rms_epsilon", 1e-5)
    settings, layers = {"llama": _llama, "gemma3": _gemma3, "mamba": _mamba, "lfm2": _lfm2}[kind]()
    writer.add_uint32(f"{kind}.block_count", len(layers))
    for name, value in settings.items():
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        add(f"{kind}.{name}", value)
    _tokenizer(writer)
    shapes: _Shapes = {
        "token_embd.weight": (VOCABULARY, WIDTH),
        "output.weight": (VOCABULARY, WIDTH),
        _NORMS.get(kind, "output_norm.weight"): (WIDTH,),
    }
    for at, layer in enumerate(layers):
        shapes |= {f"blk.{at}.{name}": shape for name, shape in layer.items()}
    for name, shape in shapes.items():
        wide = 0.05 if "attn_q" in name or "attn_k" in name else 0.3  # attention spreads over many tokens
        values = random.normal(0, wide, shape) if "norm" not in name else random.uniform(0.5, 1.5, shape)
        if name.endswith("ssm_a"):
            values = -np.abs(values)
        if name == "output.weight":
            values[:WORDS] = 0  # no bytes: the library waits for those that complete a character, beyond `max_tokens`
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_NORMS = {"lfm2": "token_embd_norm.weight"}


def _attention(heads: int = HEADS, kv: int = KV_HEADS) -> _Shapes:
    return {
        "attn_norm.weight": (WIDTH,),
        "attn_q.weight": (heads * HEAD, WIDTH),
        "attn_k.weight": (kv * HEAD, WIDTH),
        "attn_v.weight": (kv * HEAD, WIDTH),
        "attn_output.weight": (WIDTH, heads * HEAD),
    }


def _feed() -> _Shapes:
    return {
        "ffn_norm.weight": (WIDTH,),
        "ffn_gate.weight": (FEED, WIDTH),
        "ffn_up.weight": (FEED, WIDTH),
        "ffn_down.weight": (WIDTH, FEED),
    }


_QK: _Shapes = {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}


def _llama() -> tuple[Mapping[str, Any], list[_Shapes]]:
    settings = {
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": HEAD,
        "vocab_size": VOCABULARY,
    }
    return settings, [_attention() | _feed() for _ in range(3)]


def _gemma3() -> tuple[Mapping[str, Any], list[_Shapes]]:
    settings = {
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.sliding_window": WINDOW,
    }
    behind: _Shapes = {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)}
    return settings, [_attention() | _QK | behind | _feed() for _ in range(6)]


def _mamba() -> tuple[Mapping[str, Any], list[_Shapes]]:
    inner, state, rank, kernel = 2 * WIDTH, 16, 4, 4
    settings = {
        "attention.head_count": 0,
        "ssm.conv_kernel": kernel,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": rank,
    }
    layer: _Shapes = {
        "attn_norm.weight": (WIDTH,),
        "ssm_in.weight": (2 * inner, WIDTH),
        "ssm_conv1d.weight": (inner, kernel),
        "ssm_conv1d.bias": (inner,),
        "ssm_x.weight": (rank + 2 * state, inner),
        "ssm_dt.weight": (inner, rank),
        "ssm_dt.bias": (inner,),
        "ssm_a": (inner, state),
        "ssm_d": (inner,),
        "ssm_out.weight": (WIDTH, inner),
    }
    return settings, [layer, layer]


def _lfm2() -> tuple[Mapping[str, Any], list[_Shapes]]:
    settings = {
        "attention.head_count": HEADS,
        "attention.head_count_kv": [0, KV_HEADS, 0],
        "shortconv.l_cache": 3,
        "vocab_size": VOCABULARY,
    }
    convolution: _Shapes = {
        "attn_norm.weight": (WIDTH,),
        "shortconv.conv.weight": (WIDTH, 3),
        "shortconv.in_proj.weight": (3 * WIDTH, WIDTH),
        "shortconv.out_proj.weight": (WIDTH, WIDTH),
    }
    return settings, [convolution | _feed(), _attention() | _QK | _feed(), convolution | _feed()]


def _tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    words = [f"w{number}" for number in range(VOCABULARY - WORDS)]
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words])
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(words)])  # unknown, control, bytes, normal
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
