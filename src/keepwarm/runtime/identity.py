"""The identity of loaded models: hashes of their tensors, adapters and buffers."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from keepwarm.core.identity import ModelIdentity, as_json, canonical_json, digest, json_digest
from keepwarm.models.weight_files import file_stats, read_cache, weight_files, write_cache
from keepwarm.runtime.dispatch import brought
from keepwarm.runtime.native.narrow import narrow_tensors

_WEIGHTS = "keepwarm weights 2"  # which tensors are hashed and how; digests cached under another name are not used
_TOKENIZER = "keepwarm tokenizer text 1"  # how a tokenizer's text becomes a digest; see `_WEIGHTS`
_AT_ONCE = 64  # tensors hashed together
_PINNED = 16 << 20  # bytes
_WIDENED = 1 << 18  # numbers
_AS_CONFIGURED = 1e-5  # relative; results of one formula on different machines and devices differ by less
# configuration keys that do not affect KV: bookkeeping, generation defaults, and what has its own identity field
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


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]], narrow: Container[str] = ()) -> str:
    """Return a SHA-256 over names, dtypes, shapes and bytes, in any order. Tensors are hashed in parallel. The `narrow`
    ones are in bfloat16, and hashed as the float32 that they stand for."""

    def one(item: tuple[str, torch.Tensor]) -> tuple[str, str]:
        name, tensor = item
        plain = tensor.detach().contiguous().flatten()
        dtype = torch.float32 if name in narrow else tensor.dtype
        head = f"{name}|{dtype}|{tuple(tensor.shape)}|".encode()
        hasher = hashlib.sha256(head)
        for part in _widened(plain) if name in narrow else _parts_on_host(plain.view(torch.uint8)):
            hasher.update(part.data)
        return name, hasher.hexdigest()

    found: list[tuple[str, str]] = []
    rest = iter(tensors)
    with ThreadPoolExecutor() as workers:
        while some := list(islice(rest, _AT_ONCE)):  # not all at once: some are read from files for this
            found += workers.map(one, some)
    return json_digest(_WEIGHTS, sorted(found))


def _widened(plain: torch.Tensor) -> Iterator[npt.NDArray[np.uint32]]:
    """Yield the bits of a tensor in bfloat16 as float32. torch's own threads would be in the way of these here."""
    for part in plain.view(torch.int16).split(_WIDENED):
        yield part.numpy().view(np.uint16).astype(np.uint32) << 16


def _parts_on_host(plain: torch.Tensor) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the bytes of a tensor in the host's memory; each part is there until the next one. From CUDA they come
    through pinned memory, which is faster."""
    if plain.device.type != "cuda":
        yield plain.cpu().numpy()
        return
    with torch.cuda.device(plain.device):
        held = torch.empty(min(len(plain), _PINNED), dtype=torch.uint8, pin_memory=True)
        for part in plain.split(_PINNED):
            yield held[: len(part)].copy_(part).numpy()


def model_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the learnt tensors: parameters, persistent buffers, and the scales of quantized parameters.

    This avoids `state_dict()`, in which bitsandbytes converts its weights and then computes differently.
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
    """Return a module's own buffers that no file holds (rotary frequencies, scales, masks) and that it keeps."""
    computed = module._non_persistent_buffers_set - replaced_buffers(module)
    return [(name, buffer) for name, buffer in module.named_buffers(recurse=False) if name in computed]


def replaced_buffers(module: torch.nn.Module) -> set[str]:
    """Return the names of buffers that a module replaces while it runs: rotary frequencies that depend on the
    sequence's length. Their initial values have another name."""
    kinds = getattr(module, "rope_type", "")
    by_name = (
        {f"{layer}_inv_freq": kind for layer, kind in kinds.items()} if isinstance(kinds, dict) else {"inv_freq": kinds}
    )
    return {name for name, kind in by_name.items() if "dynamic" in str(kind) or kind == "longrope"}


class Buffers(NamedTuple):
    """Digests of a model's computed buffers. Those that its configuration does not determine are part of the model; the
    last bits of the others are part of the arithmetic."""

    model: str  # "none" when the configuration determines all
    arithmetic: str


def buffers_of(model: torch.nn.Module) -> Buffers:
    """Hash computed buffers. Some follow from no file and no configuration, such as manually scaled frequencies."""
    others: list[tuple[str, torch.Tensor]] = []
    configured: list[tuple[str, torch.Tensor]] = []
    for prefix, module in model.named_modules():
        if found := computed_buffers(module):
            told = configured if _is_as_configured(module, found) else others
            told += [(f"{prefix}.{name}", buffer) for name, buffer in found]
    return Buffers(tensors_digest(others) if others else "none", tensors_digest(configured))


def _is_as_configured(module: torch.nn.Module, buffers: Sequence[tuple[str, torch.Tensor]]) -> bool:
    """Whether these buffers equal, except for rounding, those that the module's class makes from its configuration."""
    config = getattr(module, "config", None)
    if config is None or next(module.parameters(), None) is not None:
        return False
    kind: Any = type(module)
    try:
        with torch.random.fork_rng(devices=[]):
            made = dict(kind(config).named_buffers(recurse=False))
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError):
        return False  # the class needs other arguments, so its buffers' bytes count
    return all(
        name in made
        and (made[name].shape, made[name].dtype) == (buffer.shape, buffer.dtype)
        and torch.allclose(made[name].cpu().double(), buffer.detach().cpu().double(), rtol=_AS_CONFIGURED, atol=0.0)
        for name, buffer in buffers
    )


def weights_digest(model: PreTrainedModel, folder: Path | None = None, cache: Path | None = None) -> str:
    """Return a digest of a model's tensors. With `folder` (where it was loaded from), cache it in the file `cache`.

    A cached digest is valid for the same weight files (path, size, modification time, inode), dtype, quantization and
    class.
    """
    # Adapters are not in the folder's files: with any, the tensors themselves are hashed.
    key = _files_key(model, folder) if folder is not None and lora_state(model) == "none" else None
    if cache is not None and key is not None and (known := read_cache(cache).get(key)):
        return str(known)
    value = tensors_digest(chain(model_tensors(model), brought(model)), narrow_tensors(model))
    if cache is not None and key is not None:
        write_cache(cache, key, value)
    return value


def _files_key(model: PreTrainedModel, folder: Path) -> str | None:
    files = weight_files(folder)
    how = [str(model.dtype), quantization_of(model), type(model).__name__]  # of some files only a part is loaded
    return json_digest(_WEIGHTS, [file_stats(files), how]) if files else None


def quantization_of(model: PreTrainedModel) -> str:
    """Return the weights' quantization settings as canonical text; "none" without any."""
    settings = getattr(model.config, "quantization_config", None)
    if settings is None:
        return "none"
    described = settings if isinstance(settings, dict) else settings.to_dict()
    return canonical_json(as_json(described))


def lora_state(model: torch.nn.Module) -> str:
    """Return which adapters are active, and their scales; "none" without any. Their tensors are part of the weights'
    digest."""
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
    """Return the rotary parameters as canonical JSON; "none" for models without."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    settings = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    theta = getattr(text, "rope_theta", None)
    if settings is None and theta is None:
        return "none"
    return canonical_json(as_json({"parameters": settings, "theta": theta}))


def config_digest(model: PreTrainedModel) -> str:
    """Return a digest of what affects KV besides weights, rope, dtype and quantization: class and configuration.

    It includes code that came with the model (`trust_remote_code`).
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


def tokenizer_digest(tokenizer: Any, cache: Path | None = None) -> str:
    """Return a digest of a tokenizer's behaviour: vocabulary, merges, normaliser, special tokens; not padding state.

    It is cached in the file `cache`, by the tokenizer's own text: bringing a large vocabulary into canonical form
    takes longer than anything else about it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        body = _described_digest(backend.to_str(), cache)
    else:
        body = json_digest("tokenizer", sorted(tokenizer.get_vocab().items()))
    return digest("keepwarm tokenizer 1", body, json_digest("special", tokenizer.special_tokens_map)).hex()


def _described_digest(text: str, cache: Path | None) -> str:
    """Return the digest of a tokenizer's description, a JSON text."""
    key = digest(_TOKENIZER, text).hex()
    if cache is not None and (known := read_cache(cache).get(key)):
        return str(known)
    described = json.loads(text)
    described.pop("padding", None)
    described.pop("truncation", None)
    value = json_digest("tokenizer", described)
    if cache is not None:
        write_cache(cache, key, value)
    return value
