"""What llama.cpp's KV depends on: the file's bytes, adapters, settings of the context, and the compiled library."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import llama_cpp

from keepwarm.config import cache_dir
from keepwarm.core.identity import ArithmeticIdentity, ModelIdentity, Namespace, as_json, canonical_json, json_digest
from keepwarm.errors import ConfigError
from keepwarm.integrations.llamacpp.form import Form
from keepwarm.models.weight_files import files_digest, weight_files

FORM = 1  # format of the bytes in the store
_ROPE = (
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)
_SWITCHES = re.compile(r"(GGML_|LLAMA_ATTN_|LLAMA_SET_ROWS|LLAMA_GRAPH_)")  # variables by which kernels are selected


def namespace_of(llm: llama_cpp.Llama, form: Form) -> Namespace:
    """Return the namespace of a model in a context. Raises ConfigError when a file cannot be read."""
    context, cache = llm.context_params, cache_dir() / "identity.json"
    try:
        weights = files_digest(weight_files(Path(llm.model_path)), cache, named=False)
        lora = _lora(llm, cache)
        libraries = {"llama-cpp-python": llama_cpp.__version__, "files": files_digest(_libraries(), cache)}
    except OSError as error:
        raise ConfigError(f"the model's files cannot be read to be identified: {error}") from None
    layout = {
        "form": FORM,
        "n_ctx": context.n_ctx,  # some models select their rotary factors by it
        "swa_full": bool(context.swa_full),
        "planes": json_digest("keepwarm llama.cpp planes 1", form.describe()),
    }
    model = ModelIdentity(
        weights=weights,
        config=json_digest(
            "keepwarm llama.cpp config 1",
            {"overrides": as_json(llm.kv_overrides or {}), "attention": context.attention_type},
        ),
        dtype=f"ggml:{context.type_k}/{context.type_v}",
        quantization="gguf",  # the digest of the file's bytes covers it
        rope=canonical_json({name: getattr(context, name) for name in _ROPE}),
        tokenizer="ids",  # KV belongs to token ids; their text is the library's concern
        lora=lora,
        kv_layout=canonical_json(layout),
    )
    return Namespace(model, _arithmetic(llm, canonical_json(libraries)))


def _arithmetic(llm: llama_cpp.Llama, libraries: str) -> ArithmeticIdentity:
    model, context = llm.model_params, llm.context_params
    device = {
        "gpu_layers": model.n_gpu_layers,
        "split_mode": model.split_mode,
        "main_gpu": model.main_gpu,
        "tensor_split": list(llm.tensor_split or ()),
        "offload_kqv": bool(context.offload_kqv),
        "op_offload": bool(context.op_offload),
    }
    return ArithmeticIdentity(
        torch="",
        device=canonical_json(device) if model.n_gpu_layers else "cpu",
        instruction_set=f"{platform.machine()} {llama_cpp.llama_print_system_info().decode().strip()}",
        threads=0,  # llama.cpp guarantees no bits, so the number of threads does not count
        attention=f"flash {context.flash_attn_type}",
        libraries=libraries,
        environment=canonical_json({k: v for k, v in sorted(os.environ.items()) if _SWITCHES.match(k)}),
        producer=f"llama.cpp, by llama-cpp-python {llama_cpp.__version__}",
    )


def _lora(llm: llama_cpp.Llama, cache: Path) -> str:
    if not llm.lora_path:
        return "none"
    told: list[Any] = [files_digest([Path(llm.lora_path)], cache, named=False), llm.lora_scale]
    return json_digest("keepwarm llama.cpp adapter 1", told)


def _libraries() -> list[Path]:
    """Return the shared libraries that were loaded: llama.cpp's own, and those of its kernels beside it."""
    loaded = Path(llama_cpp.llama_cpp._lib._name)
    return sorted({loaded, *(path for path in loaded.parent.iterdir() if re.match(r"(lib)?(ggml|llama)", path.name))})
