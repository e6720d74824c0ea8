"""Tiny GGUF files: random blocks of any kind in a model of two layers, with a tokenizer of single bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, ExpertGatingFuncType, GGMLQuantizationType, GGUFWriter

from keepwarm.runtime.native.blocks import KINDS

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 256, 512, 4, 2, 2
DIM, INPUTS = HIDDEN // HEADS, 3
_ATTENTION = (
    ("attn_q", HEADS * DIM, HIDDEN),
    ("attn_k", KV_HEADS * DIM, HIDDEN),
    ("attn_v", KV_HEADS * DIM, HIDDEN),
    ("attn_output", HIDDEN, HEADS * DIM),
)
_FUSED = (("attn_qkv", (HEADS + 2 * KV_HEADS) * DIM, HIDDEN), _ATTENTION[3])
_CONVOLUTION = (("shortconv.in_proj", 3 * HIDDEN, HIDDEN), ("shortconv.out_proj", HIDDEN, HIDDEN))
_MLP = (("ffn_gate", INNER, HIDDEN), ("ffn_up", INNER, HIDDEN), ("ffn_down", HIDDEN, INNER))
_WIDER = tuple((n, 2 * a if a == INNER else a, 2 * b if b == INNER else b) for n, a, b in _MLP)
_FUSED_MLP = (("ffn_up", 2 * INNER, HIDDEN), _MLP[2])
_SHARED = tuple((f"{name}_shexp", rows, columns) for name, rows, columns in _MLP)
EXPERTS, CHOSEN, EXPERT, WINDOW = 6, 2, 256, 96
_EXPERTS = (("ffn_gate_exps", EXPERT, HIDDEN), ("ffn_up_exps", EXPERT, HIDDEN), ("ffn_down_exps", HIDDEN, EXPERT))
_WIDE_EXPERTS = tuple((f"{name}_exps", rows, columns) for name, rows, columns in _MLP)
_SHARING = ("qwen2moe", "qwen35moe", "granitehybrid-moe", "granitemoe-shared")
_WIDELY = ("mixtral", "granitemoe", "granitemoe-shared", "granitehybrid-moe")  # their experts are as wide as an MLP
_GRANITE4 = ("granitehybrid-moe", "granitehybrid-still")
_FILES = {"mixtral": "llama", "gemma4-moe": "gemma4"}
_FILES |= {name: name.rpartition("-")[0] for name in (*_GRANITE4, "granitemoe-shared")}
_GEMMA = ("gemma2", "gemma3", "gemma4", "gemma4-moe")
_GEMMA4 = ("gemma4", "gemma4-moe")
PER_LAYER, SHARING = 256, 2  # of Gemma 4: the width of per-layer embeddings, and layers that share keys and values
_BIASED = ("qwen2", "qwen2vl", "qwen2moe", "gpt-oss", "seed_oss")  # queries, keys and values
_NETS = ("qwen35", "qwen35moe")
KEYS, VALUES, KEY_DIM, VALUE_DIM, KERNEL = 8, 16, 32, 32, 4  # of delta nets: heads, their widths, and a convolution's
_CHANNELS = 2 * KEYS * KEY_DIM + VALUES * VALUE_DIM
_NET = (
    ("attn_qkv", _CHANNELS, HIDDEN),
    ("attn_gate", VALUES * VALUE_DIM, HIDDEN),
    ("ssm_beta", VALUES, HIDDEN),
    ("ssm_alpha", VALUES, HIDDEN),
    ("ssm_out", HIDDEN, VALUES * VALUE_DIM),
)
_GATED = (("attn_q", 2 * HEADS * DIM, HIDDEN), *_ATTENTION[1:])
_LFM = ("lfm2", "lfm2moe")
MAMBA_HEADS, MAMBA_GROUPS, MAMBA_STATE, MAMBA_INNER = 32, 2, 64, 2 * HIDDEN
_MAMBA_CHANNELS = MAMBA_INNER + 2 * MAMBA_GROUPS * MAMBA_STATE
_MAMBA = (("ssm_in", MAMBA_INNER + _MAMBA_CHANNELS + MAMBA_HEADS, HIDDEN), ("ssm_out", HIDDEN, MAMBA_INNER))
_UNGATED = ("arcee",)
_MIXTURES = ("mixtral", "qwen2moe", "qwen3moe", "gpt-oss", "qwen35moe", "granitemoe", "lfm2moe")
_MIXTURES += ("granitehybrid-moe", "granitemoe-shared", "gemma4-moe")
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}<s>assistant: "
_HALVES = {  # where a block has its factors: of scales; of least values, and what they are in units of the scale's
    "Q4_0": (0, None, 0.0),
    "Q4_1": (0, 2, -7.5),
    "Q5_0": (0, None, 0.0),
    "Q5_1": (0, 2, -15.5),
    "Q8_0": (0, None, 0.0),
    "Q4_K": (0, 2, 7.5),
    "Q5_K": (0, 2, 15.5),
    "Q6_K": (208, None, 0.0),
    "Q2_K": (80, 82, 1.5),
    "Q3_K": (108, None, 0.0),
    "IQ4_NL": (0, None, 0.0),
    "IQ4_XS": (0, None, 0.0),
}
_SPREAD = {
    "Q4_0": 4.6,
    "Q4_1": 4.6,
    "Q5_0": 9.2,
    "Q5_1": 9.2,
    "Q8_0": 74.0,
    "Q4_K": 165.0,
    "Q5_K": 330.0,
    "Q6_K": 1370.0,
    "Q2_K": 15.0,
    "Q3_K": 42.0,
    "IQ4_NL": 74.0,
    "IQ4_XS": 1370.0,
}
FLOATS = ("F16", "BF16", "F32")
_ADDS: dict[type, Any] = {str: GGUFWriter.add_string, int: GGUFWriter.add_uint32, bool: GGUFWriter.add_bool}
MIXTURE = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K", "": "Q4_K"}  # as Q4_K_M has them


def blocks(kind: str, rows: int, columns: int, seed: int) -> npt.NDArray[np.uint8]:
    """Random blocks of a kind, `[rows, bytes of a row]`; the weights' spread is about that of a trained model."""
    random = np.random.default_rng(seed)
    if kind in FLOATS:
        return _floats(0.06 * random.standard_normal((rows, columns)), kind)
    size, length = GGML_QUANT_SIZES[GGMLQuantizationType(KINDS[kind])]
    made = random.integers(0, 256, (rows, columns // size, length), dtype=np.uint8)
    if kind == "MXFP4":
        made[:, :, 0] = random.integers(120, 124, made.shape[:2])
        return made.reshape(rows, -1)
    scale, least, units = _HALVES[kind]
    factor = random.uniform(0.5, 1.5, made.shape[:2]) * 0.06 / _SPREAD[kind]
    made[:, :, scale : scale + 2] = _half(factor)
    if least is not None:
        made[:, :, least : least + 2] = _half(factor * units)
    return made.reshape(rows, -1)


def _floats(values: npt.NDArray[np.float64], kind: str) -> npt.NDArray[np.uint8]:
    if kind != "BF16":
        return values.astype({"F16": np.float16, "F32": np.float32}[kind]).view(np.uint8)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def _half(values: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    return values.astype(np.float16)[..., None].view(np.uint8)


def write(
    path: Path,
    kinds: Mapping[str, str] | None = None,
    *,
    architecture: str = "qwen2",
    is_tied: bool = False,
    seed: int = 0,
    has_tokenizer: bool = True,
    left_out: str = "",
    others: Mapping[str, Any] | None = None,
    heads_of_keys: list[int] | None = None,
    fused: bool = False,
    lacking: str = "",
    each: int = 0,
) -> Path:
    """Write a file. `kinds` gives a weight's kind by the beginning of its name; `left_out` is a tensor that is not
    written, `others` are more pieces of metadata, and tensors where the value is `(array, type)`. With `fused`, gates
    and ups of experts are one tensor. `lacking` is how metadata end that are not written. With `each`, the model is
    split into files of so many tensors, as llama.cpp's own tool does, and the first one is returned."""
    kinds = MIXTURE if kinds is None else kinds
    random = np.random.default_rng(seed)
    writer = GGUFWriter(path, _FILES.get(architecture, architecture), split_max_tensors=each)
    is_lfm2, is_granite4 = architecture in _LFM, architecture.startswith("granitehybrid")
    by_layer = is_lfm2 or is_granite4
    _metadata(writer, has_tokenizer=has_tokenizer, heads=heads_of_keys or ([0, KV_HEADS] if by_layer else KV_HEADS))
    if architecture in _GEMMA or architecture == "gpt-oss":
        writer.add_sliding_window(WINDOW)
    if architecture in _GEMMA4:
        _gemma4(writer, with_experts=architecture != "gemma4")
    if architecture in ("qwen2vl", "qwen3vl"):
        writer.add_rope_dimension_sections([12, 10, 10, 0])
    if architecture in _NETS:
        writer.add_ssm_conv_kernel(KERNEL)
        writer.add_ssm_state_size(KEY_DIM)
        writer.add_ssm_group_count(KEYS)
        writer.add_ssm_time_step_rank(VALUES)
        writer.add_ssm_inner_size(VALUES * VALUE_DIM)
        writer.add_full_attention_interval(LAYERS)
        writer.add_rope_dimension_sections([6, 5, 5, 0])
    if is_granite4:
        writer.add_ssm_conv_kernel(KERNEL)
        writer.add_ssm_state_size(MAMBA_STATE)
        writer.add_ssm_group_count(MAMBA_GROUPS)
        writer.add_ssm_time_step_rank(MAMBA_HEADS)
        writer.add_ssm_inner_size(MAMBA_INNER)
    if architecture in _MIXTURES:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(CHOSEN)
        if architecture not in _WIDELY:
            writer.add_expert_feed_forward_length(EXPERT)
        gates = ExpertGatingFuncType.SIGMOID if architecture == "lfm2moe" else ExpertGatingFuncType.SOFTMAX
        writer.add_expert_gating_func(gates)
        writer.add_leading_dense_block_count(0)
        if architecture in _SHARING:
            writer.add_expert_shared_feed_forward_length(INNER)
    vocabulary = len(_tokens())

    def put(name: str, rows: int, columns: int, many: int = 0, *, write: bool = True) -> npt.NDArray[np.uint8]:
        kind = next(
            kind for begin, kind in kinds.items() if name.removeprefix("blk.").lstrip("0123456789.").startswith(begin)
        )
        raw = blocks(kind, max(many, 1) * rows, columns, int(random.integers(1 << 30)))
        raw = raw.reshape(many, rows, -1) if many else raw
        if write and name + ".weight" != left_out:
            writer.add_tensor(name + ".weight", raw, raw_dtype=GGMLQuantizationType[kind])
        return raw

    def floats(name: str, size: int | tuple[int, ...], around: float) -> None:
        if name != left_out:
            writer.add_tensor(name, (around + 0.1 * random.standard_normal(size)).astype(np.float32))

    put("token_embd", vocabulary, HIDDEN)
    if not is_tied:
        put("output", vocabulary, HIDDEN)
    floats("token_embd_norm.weight" if is_lfm2 else "output_norm.weight", HIDDEN, 1.0)
    if architecture == "gemma4":
        put("per_layer_token_embd", vocabulary, 2 * LAYERS * PER_LAYER)
        put("per_layer_model_proj", 2 * LAYERS * PER_LAYER, HIDDEN)
        floats("per_layer_proj_norm.weight", PER_LAYER, 1.0)
    for layer in range(2 * LAYERS if architecture == "gemma4" else LAYERS):
        at = f"blk.{layer}."
        is_convolution = is_lfm2 and not layer
        is_net = architecture in _NETS and not layer
        is_mamba = is_granite4 and not layer
        mixer = _mixer(architecture, layer)
        mlp = _FUSED_MLP if architecture == "phi3" else () if architecture in _MIXTURES else _MLP
        mlp = mlp[1:] if architecture in _UNGATED else mlp
        if architecture in _GEMMA4:
            mlp = _MLP if layer < LAYERS else _WIDER
        for name, rows, columns in (*mixer, *mlp, *(_SHARED if architecture in _SHARING else ())):
            put(at + name, rows, columns)
            is_biased = name in ("attn_q", "attn_k", "attn_v") and architecture in _BIASED
            if is_biased or (name, architecture) == ("attn_output", "gpt-oss"):
                floats(f"{at}{name}.bias", rows, 0.0)
        if is_convolution:
            kernel = 0.3 * random.standard_normal((HIDDEN, INPUTS))
            writer.add_tensor(f"{at}shortconv.conv.weight", kernel.astype(np.float32))
        elif is_net:
            floats(at + "ssm_conv1d.weight", (_CHANNELS, KERNEL), 0.3)
            floats(at + "ssm_a", VALUES, -1.0)
            floats(at + "ssm_dt.bias", VALUES, 0.0)
            floats(at + "ssm_norm.weight", VALUE_DIM, 1.0)
        elif is_mamba:
            floats(at + "ssm_conv1d.weight", (_MAMBA_CHANNELS, KERNEL), 0.3)
            floats(at + "ssm_conv1d.bias", _MAMBA_CHANNELS, 0.1)
            floats(at + "ssm_a", (MAMBA_HEADS, 1), -1.0)
            floats(at + "ssm_d", (MAMBA_HEADS, 1), 1.0)
            floats(at + "ssm_dt.bias", MAMBA_HEADS, 0.0)
            floats(at + "ssm_norm.weight", (MAMBA_GROUPS, MAMBA_INNER // MAMBA_GROUPS), 1.0)
        elif architecture in ("qwen3", "qwen3vl", "qwen3moe", "gemma3", *_GEMMA4, *_LFM, *_NETS):
            dim = 2 * DIM if architecture in _GEMMA4 and layer % 2 else DIM
            floats(at + "attn_q_norm.weight", dim, 1.0)
            if layer < LAYERS:
                floats(at + "attn_k_norm.weight", dim, 1.0)
        if architecture in _GEMMA4:
            floats(at + "layer_output_scale.weight", 1, 0.8)
        if architecture == "gemma4":
            put(at + "inp_gate", PER_LAYER, HIDDEN)
            put(at + "proj", HIDDEN, PER_LAYER)
            floats(at + "post_norm.weight", HIDDEN, 1.0)
        if architecture == "olmo2":
            floats(at + "attn_q_norm.weight", HEADS * DIM, 1.0)
            floats(at + "attn_k_norm.weight", KV_HEADS * DIM, 1.0)
        else:
            floats(at + "attn_norm.weight", HIDDEN, 1.0)
        is_behind = architecture in ("gpt-oss", "seed_oss", *_NETS)
        if architecture != "olmo2":
            floats(at + ("post_attention_norm.weight" if is_behind else "ffn_norm.weight"), HIDDEN, 1.0)
        if architecture in (*_GEMMA, "olmo2"):
            floats(at + "post_attention_norm.weight", HIDDEN, 1.0)
            floats(at + "post_ffw_norm.weight", HIDDEN, 1.0)
        if architecture in _MIXTURES:
            gates_and_ups: list[npt.NDArray[np.uint8]] = []
            floats(at + "ffn_gate_inp.weight", (EXPERTS, HIDDEN), 0.0)
            for name, rows, columns in _WIDE_EXPERTS if architecture in _WIDELY else _EXPERTS:
                if fused and "down" not in name:
                    gates_and_ups.append(put(at + name, rows, columns, EXPERTS, write=False))
                    continue
                put(at + name, rows, columns, EXPERTS)
                if architecture == "gpt-oss":
                    floats(f"{at}{name}.bias", (EXPERTS, rows), 0.0)
            if gates_and_ups:
                both = np.concatenate(gates_and_ups, axis=1)
                writer.add_tensor(f"{at}ffn_gate_up_exps.weight", both, raw_dtype=GGMLQuantizationType[kinds[""]])
        if architecture == "gemma4-moe":
            floats(at + "ffn_gate_inp.scale", HIDDEN, 1.0)
            floats(at + "ffn_down_exps.scale", EXPERTS, 1.0)
            for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
                floats(f"{at}{name}.weight", HIDDEN, 1.0)
        if architecture == "lfm2moe":
            floats(at + "exp_probs_b.bias", EXPERTS, 0.0)
        if architecture in ("qwen2moe", "qwen35moe"):
            floats(at + "ffn_gate_inp_shexp.weight", HIDDEN, 0.0)
        if architecture == "gpt-oss":
            floats(at + "ffn_gate_inp.bias", EXPERTS, 0.0)
            floats(at + "attn_sinks.weight", HEADS, 0.0)
    for name, value in (others or {}).items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
            continue
        writer.kv_data[0].pop(name, None)
        add = _ADDS.get(type(value), GGUFWriter.add_float32)
        add(writer, name, value)
    for name in [name for name in writer.kv_data[0] if lacking and name.endswith(lacking)]:
        del writer.kv_data[0][name]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(iter(sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))), path) if each else path


def _gemma4(writer: GGUFWriter, *, with_experts: bool) -> None:
    """The metadata of a model whose layers have a window in turn. Without experts, it has as many layers again, which
    share keys and values; with them, keys of full layers are their values, too."""
    layers = LAYERS if with_experts else 2 * LAYERS
    metadata = writer.kv_data[0]
    for name in ("block_count", "feed_forward_length", "attention.head_count_kv", "attention.key_length"):
        del metadata[f"gemma4.{name}"]
    for name in ("attention.value_length", "rope.dimension_count"):
        del metadata[f"gemma4.{name}"]
    writer.add_block_count(layers)
    writer.add_feed_forward_length([INNER * (1 if layer < LAYERS else 2) for layer in range(layers)])
    writer.add_head_count_kv([KV_HEADS, KV_HEADS // 2 if with_experts else KV_HEADS] * (layers // 2))
    writer.add_key_length(2 * DIM)
    writer.add_value_length(2 * DIM)
    writer.add_key_length_swa(DIM)
    writer.add_value_length_swa(DIM)
    writer.add_rope_dimension_count(2 * DIM)
    writer.add_rope_dimension_count_swa(DIM)
    writer.add_rope_freq_base_swa(20000.0)
    writer.add_sliding_window_pattern([layer % 2 == 0 for layer in range(layers)])
    writer.add_shared_kv_layers(0 if with_experts else SHARING)
    writer.add_embedding_length_per_layer_input(0 if with_experts else PER_LAYER)
    writer.add_final_logit_softcapping(20.0)
    factors = np.array([1.0] * (DIM // 4) + [1e30] * (DIM - DIM // 4), dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", factors)


def _mixer(architecture: str, layer: int) -> tuple[tuple[str, int, int], ...]:
    """The weights of a layer's first part."""
    if architecture in _GEMMA4 and layer % 2:
        return _full(architecture, layer)
    if architecture in _GEMMA4 and layer >= LAYERS:
        return _ATTENTION[0], _ATTENTION[3]
    first = {**dict.fromkeys(_LFM, _CONVOLUTION), **dict.fromkeys(_NETS, _NET)}
    first |= dict.fromkeys(("granitehybrid", *_GRANITE4), _MAMBA)
    if not layer and architecture in first:
        return first[architecture]
    return {"phi3": _FUSED, **dict.fromkeys(_NETS, _GATED)}.get(architecture, _ATTENTION)


def _full(architecture: str, layer: int) -> tuple[tuple[str, int, int], ...]:
    """Gemma 4's attention to all positions, with heads that are twice as wide. Layers that share have only queries."""
    keys = 2 * DIM * (KV_HEADS if architecture == "gemma4" else KV_HEADS // 2)
    values = (("attn_v", keys, HIDDEN),) if architecture == "gemma4" else ()
    own = (("attn_k", keys, HIDDEN), *values) if layer < LAYERS else ()
    return ("attn_q", 2 * HEADS * DIM, HIDDEN), *own, ("attn_output", HIDDEN, 2 * HEADS * DIM)


def _tokens() -> list[str]:
    """The 256 bytes as byte-level BPE writes them, a merged pair and two special tokens: no multiple of 16."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in plain)
    }
    return [*(letters[byte] for byte in range(256)), "ab", "<s>", "</s>"]


def _metadata(writer: GGUFWriter, *, has_tokenizer: bool, heads: int | list[int]) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_shortconv_l_cache(INPUTS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(DIM // 2 if writer.arch in _NETS else DIM)
    writer.add_key_length(DIM)
    writer.add_value_length(DIM)
    if not has_tokenizer:
        return
    tokens = _tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(258)
    writer.add_chat_template(TEMPLATE)
