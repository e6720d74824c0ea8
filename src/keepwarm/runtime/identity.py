"""Identity of loaded models: tensors hashed, adapters and buffers included."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from keepwarm.core.identity import ModelIdentity, as_json, canonical_json, digest, json_digest
from keepwarm.errors import ModelNotFound
from keepwarm.runtime.dispatch import brought

_WEIGHTS = "keepwarm weights 2"  # which tensors are hashed and how; kept digests of another way are not used
_FILES = "keepwarm weight files 1"
_AT_ONCE = 64  # tensors that are hashed together
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
_AS_CONFIGURED = 1e-5  # relative: what machines and devices make of one formula differs by less
# configuration keys that do not shape KV: bookkeeping, generation defaults, and what has a field of its own
_CONFIG_NOISE = {
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "quantization_config",
    "_attn_implementation",
    "attn_implementation",
    "_commit_hash",
    "return_dict",
    "output_hidden_states",
    "output_attentions",
    "id2label",
    "label2id",
    "problem_type",
    "is_encoder_decoder",
    "tie_word_embeddings",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
}


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes; order-free. Tensors are hashed in parallel."""

    def one(item: tuple[str, torch.Tensor]) -> tuple[str, str]:
        name, tensor = item
        plain = tensor.detach().contiguous().cpu().flatten().view(torch.uint8)
        head = f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode()
        hasher = hashlib.sha256(head)
        hasher.update(plain.numpy().data)
        return name, hasher.hexdigest()

    found: list[tuple[str, str]] = []
    rest = iter(tensors)
    with ThreadPoolExecutor() as workers:
        while some := list(islice(rest, _AT_ONCE)):  # not all: some are read from files for this
            found += workers.map(one, some)
    return json_digest(_WEIGHTS, sorted(found))


def model_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that hold what was learnt: parameters, persistent buffers, and the scales of quantized parameters.

    Not `state_dict()`: bitsandbytes converts its weights when asked for one, and computes differently afterwards.
    """
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":  # see `runtime.dispatch`
            continue
        yield name, parameter
        scales = getattr(parameter, "quant_state", None)
        extra = scales.as_dict() if scales is not None else {"SCB": getattr(parameter, "SCB", None)}
        for key, value in extra.items():
            if isinstance(value, torch.Tensor):
                yield f"{name}.{key}", value
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and buffer.device.type != "meta":
                yield f"{prefix}.{name}", buffer


def computed_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """A module's own buffers that no file holds (rotary frequencies, scales, masks) and that it leaves as they are."""
    computed = module._non_persistent_buffers_set - replaced_buffers(module)
    return [(name, buffer) for name, buffer in module.named_buffers(recurse=False) if name in computed]


def replaced_buffers(module: torch.nn.Module) -> set[str]:
    """Names of the buffers that a module exchanges while it runs: rotary frequencies that follow the sequence's length.
    Those they begin with have another name."""
    kinds = getattr(module, "rope_type", "")
    by_name = (
        {f"{layer}_inv_freq": kind for layer, kind in kinds.items()} if isinstance(kinds, dict) else {"inv_freq": kinds}
    )
    return {name for name, kind in by_name.items() if "dynamic" in str(kind) or kind == "longrope"}


class Buffers(NamedTuple):
    """Digests of a model's computed buffers: what its configuration does not account for is part of the model, the last
    bits of the rest are part of the arithmetic."""

    model: str  # "none" when the configuration accounts for all
    arithmetic: str


def buffers_of(model: torch.nn.Module) -> Buffers:
    """Hash what no file and no configuration holds, such as rotary frequencies that were scaled by hand."""
    others: list[tuple[str, torch.Tensor]] = []
    configured: list[tuple[str, torch.Tensor]] = []
    for prefix, module in model.named_modules():
        if found := computed_buffers(module):
            told = configured if _is_as_configured(module, found) else others
            told += [(f"{prefix}.{name}", buffer) for name, buffer in found]
    return Buffers(tensors_digest(others) if others else "none", tensors_digest(configured))


def _is_as_configured(module: torch.nn.Module, buffers: Sequence[tuple[str, torch.Tensor]]) -> bool:
    """Whether these are, but for rounding, what the module's class makes of its configuration alone."""
    config = getattr(module, "config", None)
    if config is None or next(module.parameters(), None) is not None:
        return False
    kind: Any = type(module)
    try:
        with torch.random.fork_rng(devices=[]):
            made = dict(kind(config).named_buffers(recurse=False))
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError):
        return False  # a class that is made otherwise: its buffers' bytes tell
    return all(
        name in made
        and (made[name].shape, made[name].dtype) == (buffer.shape, buffer.dtype)
        and torch.allclose(made[name].cpu().double(), buffer.detach().cpu().double(), rtol=_AS_CONFIGURED, atol=0.0)
        for name, buffer in buffers
    )


def weights_digest(model: PreTrainedModel, folder: Path | None = None, cache: Path | None = None) -> str:
    """Digest of a model's tensors. With `folder` (where it was loaded from) the digest is kept in the file `cache`.

    The kept digest is valid for the same weight files (path, size, modification time, inode), dtype and quantization.
    """
    # adapters come from other files than the folder's: with any, the tensors themselves are hashed
    key = _files_key(model, folder) if folder is not None and lora_state(model) == "none" else None
    if cache is not None and key is not None and (known := read_cache(cache).get(key)):
        return str(known)
    value = tensors_digest(chain(model_tensors(model), brought(model)))
    if cache is not None and key is not None:
        write_cache(cache, key, value)
    return value


def files_digest(folder: Path, cache: Path) -> str:
    """Digest of the bytes of a folder's weight files, for who does not load them with transformers.

    Kept in the file `cache` for the same files (path, size, modification time, inode). Raises ModelNotFound when there
    are none, and OSError.
    """
    files = _weight_files(folder)
    if not files:
        raise ModelNotFound(f"{folder} holds no weights; expected one of {', '.join(_WEIGHT_FILES)}")
    key = json_digest(_FILES, _stats(files))
    if known := read_cache(cache).get(key):
        return str(known)

    def one(path: Path) -> tuple[str, str]:
        with path.open("rb") as file:
            return path.name, hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor() as workers:
        value = json_digest(_FILES, sorted(workers.map(one, files)))
    write_cache(cache, key, value)
    return value


def _files_key(model: PreTrainedModel, folder: Path) -> str | None:
    files = _weight_files(folder)
    how = [str(model.dtype), quantization_of(model)]
    return json_digest(_WEIGHTS, [_stats(files), how]) if files else None


def _weight_files(folder: Path) -> list[Path]:
    return sorted({path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)})


def _stats(files: Sequence[Path]) -> list[tuple[str, int, int, int]]:
    return [(str(f.resolve()), s.st_size, s.st_mtime_ns, s.st_ino) for f in files for s in (f.stat(),)]


def read_cache(cache: Path) -> dict[str, str]:
    """What was found out about models before, by digest; nothing where the file is missing or damaged."""
    try:
        known = json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def write_cache(cache: Path, key: str, value: str) -> None:
    """Note one thing more, whole or not at all."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        partial = cache.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps(read_cache(cache) | {key: value}))
        partial.replace(cache)
    except OSError:
        pass  # a read-only cache folder only costs finding it out again


def quantization_of(model: PreTrainedModel) -> str:
    """Canonical text of the weights' quantization settings, "none" without."""
    settings = getattr(model.config, "quantization_config", None)
    if settings is None:
        return "none"
    described = settings if isinstance(settings, dict) else settings.to_dict()
    return canonical_json(as_json(described))


def lora_state(model: torch.nn.Module) -> str:
    """Which adapters act, at which scale; "none" without any. Their tensors are part of the weights' digest."""
    state = [
        (
            name,
            sorted(module.active_adapters),
            bool(module.disable_adapters),
            bool(getattr(module, "merged", False)),
            sorted((k, float(v)) for k, v in getattr(module, "scaling", {}).items() if isinstance(v, int | float)),
        )
        for name, module in model.named_modules()
        if type(module).__module__.startswith("peft.tuners")
        and hasattr(module, "active_adapters")
        and hasattr(module, "disable_adapters")
    ]
    return json_digest("keepwarm lora 1", state) if state else "none"


def rope_of(config: Any) -> str:
    """Rotary parameters as canonical JSON, "none" for models without."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    settings = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    theta = getattr(text, "rope_theta", None)
    if settings is None and theta is None:
        return "none"
    return canonical_json(as_json({"parameters": settings, "theta": theta}))


def config_digest(model: PreTrainedModel) -> str:
    """Digest of what shapes KV beside weights, rope, dtype and quantization: the class and its configuration.

    Code that came with the model (`trust_remote_code`) is part of it.
    """
    described = {k: v for k, v in model.config.to_dict().items() if k not in _CONFIG_NOISE}
    kind = type(model)
    described["class"] = kind.__qualname__
    if kind.__module__.startswith("transformers_modules"):
        described["code"] = json_digest("code", inspect.getsource(sys.modules[kind.__module__]))
    return json_digest("keepwarm config 1", as_json(described))


def model_identity(
    model: PreTrainedModel, weights: str, buffers: str, tokenizer: str, codec: str = "raw"
) -> ModelIdentity:
    return ModelIdentity(
        weights=weights,
        config=config_digest(model),
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=quantization_of(model),
        rope=rope_of(model.config),
        tokenizer=tokenizer,
        buffers=buffers,
        lora=lora_state(model),
        codec=codec,
    )


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of a tokenizer's behaviour: vocabulary, merges, normaliser, special tokens; not of its padding state."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        described = json.loads(backend.to_str())
        described.pop("padding", None)
        described.pop("truncation", None)
        body = json_digest("tokenizer", described)
    else:
        body = json_digest("tokenizer", sorted(tokenizer.get_vocab().items()))
    return digest("keepwarm tokenizer 1", body, json_digest("special", tokenizer.special_tokens_map)).hex()
