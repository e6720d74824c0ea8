"""How vLLM chooses and compiles its kernels: what bears on the bits beside the model, the backend and the device.

It counts only where bits are compared, in vLLM's batch-invariant mode. Elsewhere KV of differently compiled models is
shared, as `prefix`.
"""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from vllm import envs

from keepwarm.core.identity import as_json, json_digest

log = logging.getLogger(__name__)

_CONFIGS = ("compilation_config", "kernel_config", "attention_config", "parallel_config", "lora_config")
_PACKAGES = ("triton", "flashinfer-python", "deep-gemm", "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cutlass-dsl")
_OF_A_PLACE = ("_PORT", "_RANK", "_RANK_LOCAL", "_FRONTEND_PATH")  # ends of variables that differ among replicas


def compilation_digest(config: Any) -> str:
    """Return a digest of it, in a worker. `config` is vLLM's `VllmConfig`. Empty where vLLM cannot say what it consists
    of, as for a pass that is a function: then nothing may be called exact."""
    try:
        return json_digest("keepwarm vllm compilation 1", as_json(_described(config)))
    except Exception as error:
        log.warning("how vLLM compiles cannot be told, so KV from the store is not called exact: %s", error)
        return ""


def _described(config: Any) -> dict[str, Any]:
    configs = {name: getattr(config, name) for name in _CONFIGS}
    model = config.model_config
    return {
        "configs": {name: each.compute_hash() for name, each in configs.items() if each is not None},
        "environment": {k: v for k, v in envs.compile_factors().items() if not k.endswith(_OF_A_PLACE)},
        "model": [model.model_impl, model.model_class_overrides, model.code_revision],
        "packages": {name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
