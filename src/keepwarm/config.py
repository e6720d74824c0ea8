"""Settings of an engine: frozen, checked once at the edge. An unknown key or a bad value is a ConfigError."""

from __future__ import annotations

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from keepwarm.errors import ConfigError

DEFAULT_STEP = 2048  # docs/decisions/0004-step.md
DEFAULT_MIN_STEP = 128

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)


class Reuse(StrEnum):
    """The weakest label a request allows."""

    OFF = "off"
    EXACT = "exact"
    PREFIX = "prefix"
    CHUNKS = "chunks"

    @classmethod
    def parse(cls, value: str | Reuse) -> Reuse:
        """Raises ConfigError naming the modes, for an unknown one and for one that this version cannot do."""
        try:
            mode = cls(value)
        except ValueError:
            raise ConfigError(f"reuse must be one of 'off', 'exact', 'prefix', got {value!r}") from None
        if mode is cls.CHUNKS:
            raise ConfigError("reuse='chunks' is not available in this version; use 'prefix', 'exact' or 'off'")
        return mode


def parse_bytes(value: int | str) -> int:
    """Bytes from 4096, "512MiB", "4GiB", "20GB" or "0". Raises ConfigError."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ConfigError(f"a size cannot be negative, got {value}")
        return value
    match = _SIZE.match(value) if isinstance(value, str) else None
    if not match:
        raise ConfigError(f"a size looks like 4096, '512MiB' or '4GiB', got {value!r}")
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def cache_dir() -> Path:
    """Where Keepwarm keeps what it can make again: `$KEEPWARM_CACHE` or `~/.cache/keepwarm`."""
    return Path(os.environ.get("KEEPWARM_CACHE") or Path.home() / ".cache" / "keepwarm").expanduser()


class EngineConfig(BaseModel):
    """All settings of `Engine.from_pretrained` but the model. Sizes are bytes or texts such as "4GiB"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: Path | None = Field(None, description="folder of the disk tier; None keeps KV in this process only")
    reuse: Reuse = Field(Reuse.EXACT, description="weakest exactness allowed: exact, prefix or off")
    device: str | None = Field(None, description="cuda, mps or cpu; None chooses the first present")
    dtype: str | None = Field(None, description="float32, bfloat16 or float16; None chooses by device")
    kv_codec: Literal["raw"] = "raw"
    max_ram: int = Field(4 << 30, description="byte cap of the RAM tier, per process")
    max_pages: int = Field(1 << 30, description="byte cap of the KV pages that a batch decodes from, per Batcher")
    max_disk: int = Field(20 << 30, description="byte cap of the store on disk, over all processes")
    step: int = Field(DEFAULT_STEP, ge=1, description="G: tokens per prefill step")
    max_scratch: int = Field(1 << 30, description="bytes a prefill step may take beside KV: steps shrink to keep to it")
    min_step: int = Field(DEFAULT_MIN_STEP, ge=0, description="G_min: tokens before a message's end is a cut")
    tool_order: Literal["sorted", "as_sent"] = "sorted"
    template_args: dict[str, Any] = Field(default_factory=dict, description="extra variables for the chat template")
    trust_remote_code: bool = False
    attention: Literal["auto", "model"] = Field("auto", description="auto: prefix + step kernel where it is supported")

    @field_validator("max_ram", "max_pages", "max_disk", "max_scratch", mode="before")
    @classmethod
    def _size(cls, value: int | str) -> int:
        return parse_bytes(value)

    @field_validator("store", mode="before")
    @classmethod
    def _folder(cls, value: str | os.PathLike[str] | None) -> Path | None:
        if value is None:
            return None
        if not isinstance(value, str | os.PathLike):
            raise ConfigError("a store is a folder's path, or None")
        return Path(value).expanduser()

    @field_validator("reuse", mode="before")
    @classmethod
    def _reuse(cls, value: str | Reuse) -> Reuse:
        return Reuse.parse(value)

    @classmethod
    def build(cls, **settings: Any) -> EngineConfig:
        """Check and freeze settings. Raises ConfigError naming the setting, what was expected and what was seen."""
        if isinstance(step := settings.get("step"), int):
            settings.setdefault("min_step", min(DEFAULT_MIN_STEP, step))
        try:
            config = cls(**settings)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"]) or "settings"
            if first["type"] == "extra_forbidden":
                raise ConfigError(f"unknown setting {name!r}; known are {', '.join(cls.model_fields)}") from None
            raise ConfigError(f"setting {name!r}: {first['msg']}, got {first['input']!r}") from None
        if config.min_step > config.step:
            raise ConfigError(f"min_step ({config.min_step}) cannot exceed step ({config.step})")
        return config
