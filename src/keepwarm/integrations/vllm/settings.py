"""The connector's settings: vLLM's `kv_connector_extra_config`, checked once."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from keepwarm.config import parse_bytes
from keepwarm.errors import ConfigError
from keepwarm.integrations.settings import StoreSettings


class TierSettings(StoreSettings):
    """The settings of a tier of vLLM's own offloading, which vLLM tells the model's name and nothing else. All but the
    store's are filled in by `offloading.KeepwarmOffloadingConnector`."""

    revision: str | None = Field(None, description="vLLM's --revision, if one is given: it is part of the names of KV")
    hf_overrides: dict[str, Any] = Field(
        default_factory=dict, description="vLLM's --hf-overrides, such as another RoPE: part of the names of KV"
    )
    max_model_len: int | None = Field(
        None, description="vLLM's --max-model-len, by which LongRoPE is chosen: part of the names of KV"
    )
    hf_config_path: str | None = Field(
        None, description="vLLM's --hf-config-path, a folder whose config.json is part of the names of KV"
    )
    quantization: str | None = Field(
        None, description="vLLM's --quantization, by which weights are quantized on loading: part of the names of KV"
    )
    quantization_config: Any = Field(None, description="vLLM's --quantization-config: part of the names of KV")


class ConnectorSettings(StoreSettings):
    """The store's settings, and how vLLM's pages are moved."""

    max_ram: int = Field(1 << 30, description="byte cap of KV held in RAM, per worker")
    save_generated: bool = Field(True, description="store answers too, when a request ends")
    load_timeout: float = Field(10.0, gt=0, description="seconds that a step waits for a load before it is abandoned")

    @field_validator("max_ram", mode="before")
    @classmethod
    def _ram(cls, value: int | str) -> int:
        return parse_bytes(value)

    @classmethod
    def of_transfer(cls, transfer: Any) -> ConnectorSettings:
        """Read the settings from vLLM's `KVTransferConfig`. Raises ConfigError naming the setting, or a policy that
        loses requests."""
        settings = cls.of(transfer.kv_connector_extra_config, "kv_connector_extra_config")
        if transfer.kv_load_failure_policy != "recompute":
            raise ConfigError(
                f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}, which ends a request whose KV cannot "
                "be read: set it to 'recompute'"
            )
        return settings
