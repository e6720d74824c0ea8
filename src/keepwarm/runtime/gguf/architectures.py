"""The architectures of GGUF files that run here, and what transformers does not read of them by itself.

transformers' tables rename the metadata that most architectures have. What else a file says, or what llama.cpp's own
code says of an architecture (`src/llama-model.cpp` there), is here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

_NONE = "none"  # no table of transformers


class Metadata(Protocol):
    """What a file says before its weights."""

    def value(self, name: str) -> Any:
        """A number or a text; None if it is not there, or an array."""
        ...

    def needed(self, name: str) -> Any:
        """A number or a text. Raises KeyError, which names it, if it is not there."""
        ...

    def length(self, name: str) -> int | None:
        """How many values an array has; None if it is not there."""
        ...

    def numbers(self, name: str) -> list[int]:
        """Whole numbers. Raises KeyError if the array is not there, ValueError if it holds others."""
        ...

    def everything(self) -> dict[str, Any]:
        """All of it, with the lengths of arrays of texts and of fractions instead of these."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its tensors."""
        ...


@dataclass(frozen=True)
class Architecture:
    """How a value of `general.architecture` is read. `model_type` is transformers' name of the model, and `names` that
    of its table of metadata; both default to the architecture's own name. `told` gives more of the configuration. A
    file may rotate a part of a head's dims if `partial`, and scale its rotary embedding in the ways `scaled`. It may
    have gated delta nets, `has_nets` (`delta_nets`), or Mamba-2, `has_mamba` (`mamba`)."""

    model_type: str = ""
    names: str = ""
    told: Callable[[Metadata], dict[str, Any]] = lambda _: {}
    partial: bool = False
    scaled: tuple[str, ...] = ()
    has_nets: bool = False
    has_mamba: bool = False


def alike(file: Metadata, name: str) -> Any:
    """Return a value that some files list for each layer, if all layers have the same; None if they have not, or if it
    is not there."""
    if file.length(name) is None:
        return file.value(name)
    found = set(file.numbers(name))
    return found.pop() if len(found) == 1 else None


def _yarn(file: Metadata, architecture: str) -> dict[str, Any]:
    """The rotary embedding, which a file may scale by YaRN."""
    at = f"{architecture}.rope"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": file.value(f"{at}.freq_base") or 1e4}
    if file.value(f"{at}.scaling.type") != "yarn":
        return rope
    return rope | {
        "rope_type": "yarn",
        "factor": file.needed(f"{at}.scaling.factor"),
        "original_max_position_embeddings": _original(file, architecture),
        "beta_fast": file.value(f"{at}.scaling.yarn_beta_fast") or 32.0,
        "beta_slow": file.value(f"{at}.scaling.yarn_beta_slow") or 1.0,
    }


def _original(file: Metadata, architecture: str) -> int:
    """The length that a model was first trained with."""
    found = file.value(f"{architecture}.rope.scaling.original_context_length")
    return int(found or file.needed(f"{architecture}.context_length"))


def _arcee(file: Metadata) -> dict[str, Any]:
    return {"rope_parameters": _yarn(file, "arcee")}


def _lfm2(file: Metadata, architecture: str = "lfm2") -> dict[str, Any]:
    """A layer without heads of keys is a short convolution."""
    heads = file.numbers(f"{architecture}.attention.head_count_kv")
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "block_auto_adjust_ff_dim": False,
        "norm_eps": float(file.needed(f"{architecture}.attention.layer_norm_rms_epsilon")),  # read under another name
    }


def _experts(file: Metadata, architecture: str, count: str = "num_experts") -> dict[str, Any]:
    """How many experts a layer has and a row uses. `count` is what the configuration calls the first."""
    found, used = (file.needed(f"{architecture}.{name}") for name in ("expert_count", "expert_used_count"))
    if not 0 < used <= found:
        raise ValueError(f"it says that each row uses {used} of {found} experts")
    return {count: found, "num_experts_per_tok": used}


def _lfm2moe(file: Metadata) -> dict[str, Any]:
    return {
        **_lfm2(file, "lfm2moe"),
        **_experts(file, "lfm2moe"),
        "moe_intermediate_size": file.needed("lfm2moe.expert_feed_forward_length"),
        "num_dense_layers": file.value("lfm2moe.leading_dense_block_count") or 0,
    }


def _granite(file: Metadata, architecture: str = "granite") -> dict[str, Any]:
    if file.value(f"{architecture}.rope.scaling.finetuned") is False:
        raise ValueError("it says that positions are not rotated (rope.scaling.finetuned)")
    return _factors(file, architecture)


def _factors(file: Metadata, architecture: str) -> dict[str, Any]:
    """A file without a scale of scores has that of a head's width."""
    factors = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    found = {name: file.value(f"{architecture}.{tag}") for name, tag in factors.items()}
    width = file.value(f"{architecture}.attention.key_length") or _width(file, architecture)
    found["attention_multiplier"] = file.value(f"{architecture}.attention.scale") or width**-0.5
    return {name: value for name, value in found.items() if value}


def _width(file: Metadata, architecture: str) -> int:
    """A head's width, of a file that does not say it."""
    return int(file.needed(f"{architecture}.embedding_length") // file.needed(f"{architecture}.attention.head_count"))


def _granitemoe(file: Metadata) -> dict[str, Any]:
    found = _granite(file, "granitemoe") | _experts(file, "granitemoe", "num_local_experts")
    if shared := file.value("granitemoe.expert_shared_feed_forward_length"):
        found |= {"model_type": "granitemoeshared", "shared_intermediate_size": shared}
    return found


def _granitehybrid(file: Metadata) -> dict[str, Any]:
    """A layer without heads of keys is Mamba-2. Without experts, what is called a shared one is the layer's MLP."""
    own = "granitehybrid"
    heads, inner = file.numbers(f"{own}.attention.head_count_kv"), file.needed(f"{own}.ssm.inner_size")
    count, hidden = file.needed(f"{own}.ssm.time_step_rank"), file.needed(f"{own}.embedding_length")
    if inner % hidden or inner % count:
        raise ValueError(f"it has states of {inner} columns, {count} heads and rows of {hidden}")
    rotates = file.value(f"{own}.rope.scaling.finetuned") is not False
    width = file.value(f"{own}.expert_shared_feed_forward_length") or alike(file, f"{own}.feed_forward_length")
    experts = {"num_local_experts": 0}
    if file.value(f"{own}.expert_count"):
        experts = _experts(file, own, "num_local_experts")
    return {
        **_factors(file, own),
        **experts,
        "num_key_value_heads": max(heads),
        "layers_block_type": ["attention" if count else "mamba" for count in heads],
        "position_embedding_type": "rope" if rotates else None,
        "shared_intermediate_size": width,
        "mamba_d_conv": file.needed(f"{own}.ssm.conv_kernel"),
        "mamba_d_state": file.needed(f"{own}.ssm.state_size"),
        "mamba_n_groups": file.needed(f"{own}.ssm.group_count"),
        "mamba_n_heads": count,
        "mamba_d_head": inner // count,
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in file.names),
    }


def _mistral3(file: Metadata) -> dict[str, Any]:
    """If YaRN's magnitude has a factor, transformers divides by it what it has without one."""
    rope = _yarn(file, "mistral3")
    rope |= {
        "original_max_position_embeddings": _original(file, "mistral3"),
        "llama_4_scaling_beta": file.value("mistral3.attention.temperature_scale") or 0.0,
    }
    if rope["rope_type"] == "yarn":
        magnitude = file.value("mistral3.rope.scaling.yarn_log_multiplier") or 0.0
        rope |= {"mscale": 1.0, "mscale_all_dim": magnitude}
    return {"sliding_window": None, "rope_parameters": rope}


def _wide(file: Metadata, architecture: str) -> dict[str, Any]:
    """A head's width where a file does not say it, and transformers does not take it from that of rows."""
    return {"head_dim": file.value(f"{architecture}.attention.key_length") or _width(file, architecture)}


def _ernie(file: Metadata) -> dict[str, Any]:
    return _wide(file, "ernie4_5") | {"use_bias": False}


def _seed_oss(file: Metadata) -> dict[str, Any]:
    return _wide(file, "seed_oss") | {"attention_bias": "blk.0.attn_q.bias" in file.names, "attention_out_bias": False}


def _gemma(file: Metadata, architecture: str, layers_of_27b: int) -> dict[str, Any]:
    """Scores have the scale of a head's width. Those of the model of 27 B have another one, which no file names."""
    told = {name: file.value(f"{architecture}.{name}") for name in _CAPS}
    if file.value(f"{architecture}.block_count") == layers_of_27b:
        told["query_pre_attn_scalar"] = _width(file, architecture)
    else:
        told["query_pre_attn_scalar"] = file.needed(f"{architecture}.attention.key_length")
    told["sliding_window"] = file.needed(f"{architecture}.attention.sliding_window")
    return {name: value for name, value in told.items() if value is not None}


_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def _gemma2(file: Metadata) -> dict[str, Any]:
    return _gemma(file, "gemma2", 46)


def _gemma3(file: Metadata) -> dict[str, Any]:
    """Layers with a window rotate by a base that older files do not name. The others may be scaled."""
    whole: dict[str, Any] = {"rope_type": "default", "rope_theta": file.value("gemma3.rope.freq_base") or 1e6}
    if file.value("gemma3.rope.scaling.type") == "linear":
        whole |= {"rope_type": "linear", "factor": file.needed("gemma3.rope.scaling.factor")}
    local = {"rope_type": "default", "rope_theta": file.value("gemma3.rope.freq_base_swa") or 1e4}
    return _gemma(file, "gemma3", 62) | {"rope_parameters": {"full_attention": whole, "sliding_attention": local}}


def _gemma4(file: Metadata) -> dict[str, Any]:
    """Full layers have heads of another width, and of another number where their keys are their values, too. Layers
    that share keys and values may have a wider MLP. The tensor `rope_freqs` says which dims of full layers rotate."""
    own, layers = "gemma4", int(file.needed("gemma4.block_count"))
    windowed = file.numbers(f"{own}.attention.sliding_window_pattern")
    widths, keys = (_each(file, f"{own}.{name}", layers) for name in ("feed_forward_length", "attention.head_count_kv"))
    if "rope_freqs.weight" not in file.names:
        raise ValueError("it lacks rope_freqs.weight, which says which dims of full layers are rotated")
    if file.value(f"{own}.rope.dimension_count_swa") not in (None, file.needed(f"{own}.attention.key_length_swa")):
        raise ValueError("it rotates a part of the heads of layers with a window")
    local, whole = windowed.index(1), windowed.index(0)
    same = f"blk.{whole}.attn_v.weight" not in file.names
    found: dict[str, Any] = {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed],
        "sliding_window": file.needed(f"{own}.attention.sliding_window"),
        "head_dim": file.needed(f"{own}.attention.key_length_swa"),
        "global_head_dim": file.needed(f"{own}.attention.key_length"),
        "num_key_value_heads": keys[local],
        "num_global_key_value_heads": keys[whole],
        "attention_k_eq_v": same,
        "num_kv_shared_layers": file.value(f"{own}.attention.shared_kv_layers") or 0,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "hidden_size_per_layer_input": file.value(f"{own}.embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": file.length("tokenizer.ggml.tokens"),
        "final_logit_softcapping": file.value(f"{own}.final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": file.needed(f"{own}.rope.freq_base")},
            "sliding_attention": {"rope_type": "default", "rope_theta": file.needed(f"{own}.rope.freq_base_swa")},
        },
    }
    if file.value(f"{own}.expert_count"):
        experts = _experts(file, own)
        found |= {
            "enable_moe_block": True,
            "num_experts": experts["num_experts"],
            "top_k_experts": experts["num_experts_per_tok"],
            "moe_intermediate_size": file.needed(f"{own}.expert_feed_forward_length"),
        }
    return found


def _each(file: Metadata, name: str, layers: int) -> list[int]:
    """A number of each layer, which a file may say once for all."""
    return [int(file.needed(name))] * layers if file.length(name) is None else file.numbers(name)


def _olmo2(file: Metadata) -> dict[str, Any]:
    if file.value("olmo2.attention.sliding_window"):
        raise ValueError("it has windows, as OLMo 3 does, which is not read from GGUF files")
    return {}


def _phi3(file: Metadata) -> dict[str, Any]:
    width = _width(file, "phi3")
    return {
        "sliding_window": file.value("phi3.attention.sliding_window") or None,  # llama.cpp ignores it
        "partial_rotary_factor": (file.value("phi3.rope.dimension_count") or width) / width,
        "original_max_position_embeddings": file.needed("phi3.context_length"),
    }


def _qwen2moe(file: Metadata) -> dict[str, Any]:
    return {
        **_experts(file, "qwen2moe"),
        "moe_intermediate_size": file.needed("qwen2moe.expert_feed_forward_length"),
        "shared_expert_intermediate_size": file.needed("qwen2moe.expert_shared_feed_forward_length"),
    }


def _qwen3moe(file: Metadata) -> dict[str, Any]:
    inner = file.needed("qwen3moe.expert_feed_forward_length")
    return _experts(file, "qwen3moe") | {"moe_intermediate_size": inner}


def _mixtral(file: Metadata) -> dict[str, Any]:
    return _experts(file, "llama", "num_local_experts") | {"sliding_window": None}


def _gpt_oss(file: Metadata) -> dict[str, Any]:
    """The range of frequencies that are scaled is that of the model's own configuration; no file names it."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": file.needed("gpt-oss.rope.freq_base")}
    if file.value("gpt-oss.rope.scaling.type") == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": file.needed("gpt-oss.rope.scaling.factor"),
            "original_max_position_embeddings": file.value("gpt-oss.rope.scaling.original_context_length")
            or file.needed("gpt-oss.context_length"),
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        }
    return {
        **_experts(file, "gpt-oss", "num_local_experts"),
        "intermediate_size": file.needed("gpt-oss.expert_feed_forward_length"),
        "head_dim": file.needed("gpt-oss.attention.key_length"),
        "sliding_window": file.needed("gpt-oss.attention.sliding_window"),
        "rope_parameters": rope,
    }


def _qwen35(file: Metadata) -> dict[str, Any]:
    from transformers.integrations.gguf.gguf_config_mapping import get_gguf_config  # takes seconds

    return dict(get_gguf_config(file.everything(), file.names))


def _qwen35moe(file: Metadata) -> dict[str, Any]:
    return _qwen35(file) | _experts(file, "qwen35moe")


_MIXTRAL = Architecture("mixtral", "llama", told=_mixtral)  # `llama` with experts
_MISTRAL = Architecture("mistral", "mistral")

ARCHITECTURES = {  # by values of general.architecture
    "arcee": Architecture(names="llama", told=_arcee, scaled=("yarn",)),
    "ernie4_5": Architecture(names="llama", told=_ernie),
    "gemma2": Architecture(told=_gemma2),
    "gemma3": Architecture("gemma3_text", told=_gemma3, scaled=("linear",)),
    "gemma4": Architecture("gemma4_text", told=_gemma4),
    "gpt-oss": Architecture("gpt_oss", "gpt_oss", told=_gpt_oss, scaled=("yarn",)),
    "granite": Architecture(names="llama", told=_granite),
    "granitehybrid": Architecture("granitemoehybrid", "llama", told=_granitehybrid, has_mamba=True),
    "granitemoe": Architecture(names="llama", told=_granitemoe),
    "lfm2": Architecture(told=_lfm2),
    "lfm2moe": Architecture("lfm2_moe", "lfm2", told=_lfm2moe),
    "llama": Architecture(),
    "mistral3": Architecture("ministral3", "mistral", told=_mistral3, scaled=("yarn",)),
    "olmo2": Architecture(names="qwen3", told=_olmo2),
    "phi3": Architecture(told=_phi3, partial=True),
    "qwen2": Architecture(),
    "qwen2vl": Architecture("qwen2", "qwen2"),
    "qwen2moe": Architecture("qwen2_moe", "qwen2_moe", told=_qwen2moe),
    "qwen3": Architecture(),
    "qwen35": Architecture("qwen3_5_text", _NONE, told=_qwen35, partial=True, has_nets=True),
    "qwen35moe": Architecture("qwen3_5_moe_text", _NONE, told=_qwen35moe, partial=True, has_nets=True),
    "qwen3moe": Architecture("qwen3_moe", "qwen3_moe", told=_qwen3moe),
    "qwen3vl": Architecture("qwen3", "qwen3"),
    "seed_oss": Architecture(names="llama", told=_seed_oss),
    "smollm3": Architecture(names="llama"),
}


def architecture_of(file: Metadata) -> Architecture:
    """Raises KeyError for one that does not run here."""
    name = file.value("general.architecture")
    found = ARCHITECTURES[name]
    if name == "llama" and file.value("llama.expert_count"):
        found = _MIXTRAL
    elif name == "llama" and file.value("general.name") == "mistral":  # as transformers takes it
        found = _MISTRAL
    return found
