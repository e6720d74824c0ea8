"""The connector's settings: vLLM's `kv_connector_extra_config`, checked once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from keepwarm.config import parse_bytes
from keepwarm.errors import ConfigError


class ConnectorSettings(BaseModel):
    """Sizes are bytes or texts such as "4GiB"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: Path = Field(description="folder of the store, shared with other instances on this machine")
    max_disk: int = Field(20 << 30, description="byte cap of the store on disk, over all processes")
    max_ram: int = Field(1 << 30, description="byte cap of KV held in RAM, per worker")
    store_key_file: Path | None = Field(None, description="file with the store's key; else $KEEPWARM_STORE_KEY")
    disk_policy: Literal["lru", "lfu", "s3fifo"] = "s3fifo"
    admit: Literal["always", "second_use"] = "always"
    min_store_tokens: int = Field(0, ge=0, description="shorter prefixes are not stored")
    save_generated: bool = Field(True, description="store answers too, when a request ends")
    load_timeout: float = Field(10.0, gt=0, description="seconds that a step waits for a load before it is given up")

    @field_validator("max_ram", "max_disk", mode="before")
    @classmethod
    def _size(cls, value: int | str) -> int:
        return parse_bytes(value)

    @field_validator("store", "store_key_file")
    @classmethod
    def _home(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser()

    @classmethod
    def of(cls, transfer: Any) -> ConnectorSettings:
        """From vLLM's `KVTransferConfig`. Raises ConfigError naming the setting, or the policy that loses requests."""
        try:
            settings = cls(**transfer.kv_connector_extra_config)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            raise ConfigError(
                f"kv_connector_extra_config: {name!r}: {first['msg']}; known are {', '.join(cls.model_fields)}"
            ) from None
        if transfer.kv_load_failure_policy != "recompute":
            raise ConfigError(
                f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}, which ends a request whose KV cannot "
                "be read: set it to 'recompute'"
            )
        return settings
