"""Settings of the store under another engine, passed through that engine's configuration and checked once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from keepwarm.config import default_remotes, parse_bytes, store_key
from keepwarm.errors import ConfigError
from keepwarm.store.archive import Archive
from keepwarm.store.remote.limits import Limits
from keepwarm.store.retention import Rules


class StoreSettings(BaseModel):
    """The store's settings. Sizes are bytes or texts such as "4GiB"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: Path | None = Field(None, description="folder of the store, shared with other instances on this machine")
    max_disk: int = Field(20 << 30, description="byte cap of the store on disk, over all processes")
    store_key_file: Path | None = Field(None, description="file with the store's key; else $KEEPWARM_STORE_KEY")
    disk_policy: Literal["lru", "lfu", "s3fifo"] = "s3fifo"
    admit: Literal["always", "second_use"] = "always"
    min_store_tokens: int = Field(0, ge=0, description="shorter prefixes are not stored")
    remote: tuple[SecretStr, ...] = Field(
        default_factory=lambda: tuple(map(SecretStr, default_remotes())),
        description="URLs of remote tiers below the disk; else $KEEPWARM_REMOTE, where URLs with passwords belong",
    )
    remote_timeout: float = Field(0.5, gt=0, allow_inf_nan=False, description="seconds a remote lookup may take")
    remote_load_timeout: float = Field(5.0, gt=0, allow_inf_nan=False, description="seconds loading a run may take")
    max_remote: int | None = Field(None, description="byte cap of each remote tier, over all replicas")
    store_ttl: float | None = Field(None, gt=0, allow_inf_nan=False, description="seconds a block is kept unused")

    @field_validator("max_disk", "max_remote", mode="before")
    @classmethod
    def _size(cls, value: int | str | None) -> int | None:
        return None if value is None else parse_bytes(value)

    @field_validator("store", "store_key_file")
    @classmethod
    def _home(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser()

    @field_validator("remote", mode="before")
    @classmethod
    def _urls(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else () if value is None else value

    @classmethod
    def of(cls, settings: dict[str, Any], where: str) -> Self:
        """Check settings; errors say `where` they were given. Raises ConfigError naming the setting."""
        try:
            checked = cls(**settings)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"{where}: {name!r}: {first['msg']}; known are {', '.join(cls.model_fields)}") from None
        if checked.store is None and not checked.remote:
            raise ConfigError(f"{where}: expected a folder ('store'), a remote tier ('remote') or both, got neither")
        return checked

    def open(self, max_ram: int) -> Archive:
        """Open the archive over these tiers, with `max_ram` bytes in RAM. Raises ConfigError and StoreError."""
        return Archive.open(
            self.store,
            max_ram=max_ram,
            max_disk=self.max_disk,
            key=store_key(self.store_key_file),
            rules=Rules(
                disk_policy=self.disk_policy, admit=self.admit, min_tokens=self.min_store_tokens, ttl=self.store_ttl
            ),
            remotes=tuple(url.get_secret_value() for url in self.remote),
            limits=Limits(
                timeout=self.remote_timeout,
                load_timeout=self.remote_load_timeout,
                cap=self.max_remote,
                ttl=self.store_ttl,
            ),
        )
