"""The identity of the KV in vLLM's pages: the namespace of one worker's shard, and the extra keys of one request.

KV is moved page by page in the layout of vLLM's attention backend, so only the same backend of the same vLLM can use
it. Backend and version are part of the model identity here, and this KV is never mixed with Keepwarm's own.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import envs
from vllm.config.quantization import resolve_quantization_config
from vllm.config.utils import normalize_value
from vllm.platforms import current_platform

from keepwarm.config import cache_dir
from keepwarm.core.identity import (
    ArithmeticIdentity,
    ModelIdentity,
    Namespace,
    as_json,
    canonical_json,
    digest,
    json_digest,
    salt_key,
)
from keepwarm.errors import ConfigError
from keepwarm.integrations.vllm import device_pages
from keepwarm.integrations.vllm.compilation import compilation_digest
from keepwarm.integrations.vllm.page_copies import FORM
from keepwarm.integrations.weights import weights_folder
from keepwarm.models.weight_files import folder_digest
from keepwarm.runtime.device import is_host
from keepwarm.store.archive import Archive

log = logging.getLogger(__name__)

_NOISE = ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype")


@dataclass(frozen=True)
class Facts:
    """What is known for certain only in one worker, once its model is loaded, and is part of the names of its KV."""

    attention: str  # vLLM's backends that compute the layers' attention
    device: str  # the device's name
    capability: str  # its compute capability; on the processor the set of instructions
    layout: str  # the order of the bytes in vLLM's pages
    batch_invariant: bool
    form: int  # of a page's bytes in the store
    compiled: str = ""  # digest of how kernels are chosen and compiled; in the batch-invariant mode alone
    drafter: str = ""  # what speculative decoding adds to pages, and in the batch-invariant mode that it is on

    @classmethod
    def of_worker(cls, config: Any) -> Facts:
        """Return the facts of this process; in the scheduler's, where no layer exists, without their backends."""
        kind = str(config.device_config.device_type)
        layers = config.compilation_config.static_forward_context.values()
        backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
        is_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        name, capability = _device(kind)
        return cls(
            attention=" ".join(sorted(backends)),
            device=name,
            capability=capability,
            layout=str(config.cache_config.kv_cache_layout or ""),
            batch_invariant=is_invariant,
            form=FORM if is_host(kind) else device_pages.FORM,
            compiled=compilation_digest(config) if is_invariant and backends else "",
            drafter=_drafter(config, batch_invariant=is_invariant),
        )

    def described(self) -> dict[str, Any]:
        """Return the facts that count in names. What is absent is not in them, so that older names stay."""
        return {name: value for name, value in asdict(self).items() if value or name not in ("compiled", "drafter")}


def _device(kind: str) -> tuple[str, str]:
    """Return the device's name and its capability. vLLM's platform knows them without beginning to use the device,
    which the scheduler's process must not."""
    if kind == "cpu":
        return kind, torch.backends.cpu.get_cpu_capability()
    number = torch.cuda.current_device() if kind == "cuda" and torch.cuda.is_initialized() else 0
    capability = current_platform.get_device_capability(number)
    return str(current_platform.get_device_name(number)), capability.as_version_str() if capability else ""


def _drafter(config: Any, *, batch_invariant: bool) -> str:
    """Return what speculative decoding brings into pages: a drafter's layers join those of the model and hold KV of its
    own weights. Without such layers KV is the model's own up to rounding, which counts where bits do."""
    told = config.speculative_config
    if told is None:
        return ""
    if not told.uses_draft_kv_cache():
        return canonical_json([told.method]) if batch_invariant else ""
    layers = config.compilation_config.static_forward_context.items()
    names = sorted(name for name, layer in layers if hasattr(layer, "get_attn_backend"))
    return json_digest("keepwarm vllm drafter 1", [told.method, names, *_draft_model(told)])


def _draft_model(told: Any) -> list[Any]:
    """Return what bears on the KV of a drafter's layers. `told` is vLLM's `SpeculativeConfig`."""
    model, parallel = told.draft_model_config, told.draft_parallel_config
    if model is None:
        return []
    weights = folder_digest(weights_folder(str(model.model), model.revision), cache_dir() / "identity.json")
    ranks = None if parallel is None else parallel.tensor_parallel_size
    return [weights, str(model.dtype), str(model.quantization), ranks]


def shard_namespaces(
    config: Any, page_size: int, facts: Sequence[Facts], *, replicated: bool = False
) -> list[Namespace]:
    """Return one namespace for each tensor and pipeline parallel rank, in the order `rank = pp * tp_size + tp`.

    `config` is vLLM's `VllmConfig`, `page_size` the number of tokens in its KV blocks. `facts` is what each rank knows
    about itself. `replicated`: all tensor parallel ranks hold the same KV, so their names are the same.
    """
    model, parallel = config.model_config, config.parallel_config
    loaded = as_loaded(model)
    described = {k: v for k, v in loaded.to_dict().items() if k not in _NOISE}
    described["class"] = sorted(getattr(model.hf_config, "architectures", None) or ())
    if model.hf_overrides:
        described["overrides"] = model.hf_overrides
    if (asked := asked_quantization(model)) is not None:
        described["asked_quantization"] = asked
    identity = ModelIdentity(
        weights=folder_digest(weights_folder(str(model.model), model.revision), cache_dir() / "identity.json"),
        config=json_digest("keepwarm vllm config 1", as_json(described)),
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=str(model.quantization or "none"),
        rope=canonical_json(_rope(loaded, model)),
        tokenizer="ids",  # KV belongs to token ids; their text is vLLM's concern
    )
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    layout = {
        "vllm": vllm.__version__,
        "page": page_size,
        "cache_dtype": str(config.cache_config.cache_dtype),
        **_state_dtypes(config.cache_config),
    }
    arithmetic = ArithmeticIdentity(
        torch=torch.__version__,
        device=str(config.device_config.device_type),
        instruction_set=platform.machine(),
        threads=0,  # vLLM guarantees no bits, so the number of threads does not count
        attention="",
        mode="eager" if model.enforce_eager else "compiled",
        producer=f"vllm {vllm.__version__}",
    )

    def shard(rank: int, of: Facts) -> Namespace:
        place = {"tp": ["all" if replicated else rank % tp, tp], "pp": [rank // tp, pp]}
        kept = replace(identity, kv_layout=canonical_json(layout | of.described() | place))
        return Namespace(kept, replace(arithmetic, attention=of.attention))

    return [shard(rank, of) for rank, of in enumerate(facts)]


def asked_quantization(model: Any) -> Any:
    """Return the user's own configuration of how weights are quantized while they are loaded; None where the method's
    name says all. `model` is vLLM's `ModelConfig`."""
    told = model.quantization_config
    if told is None or told == resolve_quantization_config(model.quantization, None):
        return None
    return as_json(normalize_value(told))


def _rope(loaded: Any, model: Any) -> Any:
    """Return what vLLM computes positions with. Under LongRoPE its layers choose between two sets of factors by the
    length that the model is given, as asked for or, if it was -1, as it fits into memory."""
    told = as_json(getattr(loaded.get_text_config(), "rope_parameters", None))
    if not has_long_rope(loaded, model):
        return told
    return [told, {"lengths": [model.original_max_model_len, model.max_model_len]}]


def has_long_rope(loaded: Any, model: Any) -> bool:
    """Whether a model, of which `loaded` is the configuration as in its files, has LongRoPE."""
    told = as_json(getattr(loaded.get_text_config(), "rope_parameters", None))
    return "longrope" in canonical_json([told, as_json(model.hf_overrides)])


def _state_dtypes(cache: Any) -> dict[str, str]:
    """Return how recurrent states are kept; nothing for models without any, so that their KV keeps its names."""
    if cache.mamba_cache_mode == "none":
        return {}
    return {
        "states": cache.mamba_cache_mode,
        "states_dtype": str(cache.mamba_cache_dtype),
        "ssm_dtype": str(cache.mamba_ssm_cache_dtype),
    }


def as_loaded(model: Any) -> Any:
    """Return a model's configuration as in its files. Some of vLLM's models change theirs when they are built, which
    happens only in the workers: their names would differ from those that the scheduler looks up. Raises ConfigError for
    overrides that are code, as no name covers what they do."""
    if callable(model.hf_overrides):
        raise ConfigError("hf_overrides is a function, which cannot be part of KV's names: give the fields in a dict")
    folder = config_folder(model)
    if not (folder / "config.json").exists():
        return model.hf_config
    return type(model.hf_config).from_pretrained(folder)


def config_folder(model: Any) -> Path:
    """Return the folder of a model's configuration, which may be in another repository than the weights, at a revision
    of its own."""
    found = getattr(model, "_hf_config_revision", None) if model.hf_config_path else model.revision
    return weights_folder(str(model.hf_config_path or model.model), None if found is None else str(found))


def tell_of_others(archive: Archive, namespaces: Sequence[Namespace]) -> None:
    """Log which KV of the same weights in the store this instance cannot use, so that an upgrade does not silently lose
    the cache. `namespaces` are all those that it uses."""
    own = [namespace.describe()["model"] for namespace in namespaces]
    for held in archive.namespaces().values():
        theirs = held.get("model", {})
        if theirs.get("weights") != own[0]["weights"]:
            continue
        differ = min((_differing(theirs, ours) for ours in own), key=len)
        if differ:
            log.warning(
                "the store holds KV of these weights that this vLLM cannot use, since %s differs (there %s); it "
                "counts as not stored",
                ", ".join(differ),
                {name: theirs.get(name) for name in differ},
            )


def _differing(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    return sorted(name for name, value in ours.items() if theirs.get(name) != value and name != "lora")


def request_keys(request: Any, page_size: int) -> tuple[str, dict[int, bytes]] | None:
    """Return a request's variant, and its extra keys by position: for its salt, and for other content than text on each
    page. None if its KV cannot be named: the prompt is given as embeddings, or the adapter's files cannot be found.

    A position has only one key, and a purge looks for the salt's. So anything else that affects the first page goes
    into the variant.
    """
    if getattr(request, "prompt_embeds", None) is not None:
        return None  # its token ids mean nothing
    try:
        lora = _lora_digest(request.lora_request)
    except (ConfigError, OSError) as error:
        log.warning("a request's KV is neither looked up nor stored: %s", error)
        return None
    on_page: dict[int, list[tuple[str, int]]] = {}
    for feature in request.mm_features or ():
        offset, length = feature.mm_position.offset, feature.mm_position.length
        for page in range(offset // page_size, -(-(offset + length) // page_size)):
            on_page.setdefault(page, []).append((feature.identifier, offset - page * page_size))
    first = [lora] if lora else [], on_page.pop(0, [])
    variant = json_digest("keepwarm vllm variant 1", first) if any(first) else "none"
    keys = {
        page * page_size: digest("keepwarm vllm page 1", json_digest("multimodal", found))
        for page, found in on_page.items()
    }
    if request.cache_salt:
        keys[0] = salt_key(request.cache_salt)
    return variant, keys


def _lora_digest(lora: Any) -> str | None:
    """Return a digest of an adapter's files, as another one may have the same name. Raises ConfigError and OSError."""
    return None if lora is None else folder_digest(weights_folder(lora.lora_path), cache_dir() / "identity.json")
