"""vLLM's own offloading, which tells Keepwarm's tiers how the model is loaded.

    "kv_connector": "KeepwarmOffloadingConnector", "kv_connector_module_path": "keepwarm.integrations.vllm.offloading",
    "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "KeepwarmTier",
        "module_path": "keepwarm.integrations.vllm.tiering", "store": "/var/lib/keepwarm"}]}

vLLM tells a tier the model's name alone. What else decides about its KV is a setting of the tier, and this connector
fills it in. Everything else is vLLM's `OffloadingConnector`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from keepwarm.core.identity import as_json
from keepwarm.errors import ConfigError
from keepwarm.integrations.vllm.identity import as_loaded, asked_quantization, config_folder, has_long_rope

_TIER = "KeepwarmTier"


class KeepwarmOffloadingConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM has no types here
    """Raises ConfigError at the start where no tier is Keepwarm's, and where one was told otherwise than vLLM."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        transfer.kv_connector_extra_config = told(transfer.kv_connector_extra_config, vllm_config.model_config)
        super().__init__(vllm_config, role, kv_cache_config)


def told(settings: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return the connector's settings with what Keepwarm's tiers must know. `model` is vLLM's `ModelConfig`."""
    tiers = list(settings.get("secondary_tiers") or ())
    if not any(tier.get("type") == _TIER for tier in tiers):
        raise ConfigError(f"secondary_tiers has no tier of type {_TIER}: add one, or take vLLM's OffloadingConnector")
    facts = _facts(model)
    tiers = [_with(tier, facts) if tier.get("type") == _TIER else tier for tier in tiers]
    return {**settings, "secondary_tiers": tiers}


def _facts(model: Any) -> dict[str, Any]:
    loaded = as_loaded(model)
    facts = {
        "revision": model.revision,
        "hf_overrides": as_json(model.hf_overrides) if model.hf_overrides else None,
        "max_model_len": None,
        "hf_config_path": str(config_folder(model)) if model.hf_config_path not in (None, model.model) else None,
        "quantization": model.quantization,
        "quantization_config": asked_quantization(model),
    }
    if has_long_rope(loaded, model):  # at -1 layers were built for the model's own length, whatever fits into memory
        facts["max_model_len"] = -1 if model.original_max_model_len == -1 else model.max_model_len
    return facts


def _with(tier: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in facts.items():
        if tier.get(name) and tier[name] != value:
            raise ConfigError(
                f"secondary_tiers: {name!r} is {tier[name]!r}, and vLLM was started with {value!r}: leave it out"
            )
    return {**tier, **{name: value for name, value in facts.items() if value is not None}}
