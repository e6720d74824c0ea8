"""Settings of an engine: frozen, checked once at the edge. An unknown key or a bad value is a ConfigError."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from keepwarm.errors import ConfigError

DEFAULT_STEP = 2048  # docs/decisions/0004-step.md
SNAPSHOT_BUDGET = 1.0  # docs/decisions/0100-snapshots.md
SCHEDULED_STEP = 1024  # the default where matches end at steps: docs/decisions/0091-a-finer-schedule.md
DEFAULT_MIN_STEP = 128
DRAFT_TOKENS = 7  # docs/decisions/0141-drafts.md
EXIT_SECONDS = 30.0
ENVIRONMENT = "KEEPWARM__"

ToolOrder = Literal["as_sent", "sorted"]

_KEY_BYTES = 32
_DEVICE = re.compile(r"^(cpu|mps|cuda(:\d+)?)$")
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)


class Reuse(StrEnum):
    """The weakest label a request allows."""

    OFF = "off"
    EXACT = "exact"
    PREFIX = "prefix"
    CHUNKS = "chunks"

    @classmethod
    def parse(cls, value: str | Reuse) -> Reuse:
        """Return the mode of that name. Raises ConfigError, which lists the modes, for an unknown one."""
        try:
            return cls(value)
        except ValueError:
            raise ConfigError(f"reuse must be one of 'off', 'exact', 'prefix', 'chunks', got {value!r}") from None


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
    """Return the folder for what Keepwarm can make again: `$KEEPWARM_CACHE` or `~/.cache/keepwarm`.

    Raises ConfigError when there is neither the variable nor a home folder.
    """
    try:
        return Path(os.environ.get("KEEPWARM_CACHE") or Path.home() / ".cache" / "keepwarm").expanduser()
    except RuntimeError:
        raise ConfigError("this user has no home folder: name one for Keepwarm's cache with KEEPWARM_CACHE") from None


def default_remotes(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the remote tiers of `$KEEPWARM_REMOTE`, used when none is named. A URL with a password belongs there."""
    return environment.get("KEEPWARM_REMOTE", "").split()


def from_environment(values: dict[str, Any], environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Override nested `values` with the variables `KEEPWARM__SECTION__NAME`, and return them.

    Lists, tables, numbers and booleans are written as JSON; anything else is text. `$KEEPWARM_REMOTE` is the engine's
    `remote` unless that has a variable of its own. Raises ConfigError when the section in a name is not a section.
    """
    given = {name: text for name, text in environment.items() if name.startswith(ENVIRONMENT)}
    if remotes := default_remotes(environment):
        given.setdefault(f"{ENVIRONMENT}ENGINE__REMOTE", json.dumps(remotes))
    for variable, text in sorted(given.items()):
        path = variable.removeprefix(ENVIRONMENT).lower().split("__")
        put_setting(values, path, _parsed(text), f"the variable {variable}")
    return values


def put_setting(values: dict[str, Any], path: list[str], value: Any, origin: str) -> None:
    """Set one nested value. Errors name its `origin`. Raises ConfigError when `path` leads through a non-section."""
    here = values
    for part in path[:-1]:
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            raise ConfigError(f"{origin}: {part!r} is not a section")
    here[path[-1]] = value


def _parsed(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, str) else value


def store_key(file: Path | None = None) -> bytes | None:
    """Return the 32 bytes of a store's key, from a file or else from `$KEEPWARM_STORE_KEY`; None without either.

    Both may hold the bytes as 64 hex digits or in base64, and a file also the bytes themselves. Raises ConfigError.
    """
    if file is not None:
        try:
            found, origin = file.expanduser().read_bytes(), str(file)
        except OSError as error:
            raise ConfigError(f"the store's key file {file} cannot be read: {error.strerror or error}") from None
        if len(found) == _KEY_BYTES:
            return found
    elif text := os.environ.get("KEEPWARM_STORE_KEY"):
        found, origin = text.encode(), "KEEPWARM_STORE_KEY"
    else:
        return None
    found = found.strip()
    try:
        secret = (
            bytes.fromhex(found.decode()) if len(found) == 2 * _KEY_BYTES else base64.b64decode(found, validate=True)
        )
    except (ValueError, binascii.Error):
        secret = b""
    if len(secret) != _KEY_BYTES:  # the message must not repeat what was found
        raise ConfigError(
            f"{origin} holds no key: expected {_KEY_BYTES} random bytes, as 64 hex digits or in base64; "
            "`openssl rand -hex 32` makes one"
        )
    return secret


class EngineConfig(BaseModel):
    """All settings of `Engine.from_pretrained` except the model. Sizes are bytes or texts such as "4GiB"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: Path | None = Field(None, description="folder of the disk tier; None keeps KV in this process only")
    reuse: Reuse = Field(Reuse.EXACT, description="weakest exactness allowed: exact, prefix, chunks or off")
    device: str | None = Field(None, description="cuda, mps or cpu; None or auto chooses the first present")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="float32, bfloat16 or float16; None or auto chooses by device"
    )
    kv_codec: Literal["raw", "int8", "int4", "fp8"] = Field(
        "raw", description="how KV is kept in the store; all but raw are lossy: their reuse is labelled quantized"
    )
    kv_in_memory: Literal["decoded", "encoded"] = Field(
        "decoded",
        description="KV of a hit: decoded as it is loaded, or kept encoded: attention then decodes it page by page",
    )
    store_key_file: Path | None = Field(None, description="file with the store's key; else $KEEPWARM_STORE_KEY")
    max_ram: int = Field(4 << 30, description="byte cap of the RAM tier, per process")
    max_device: int | None = Field(
        None,
        description="byte cap of KV on the device outside a batch's pages, in use and kept, per engine. "
        "None: on a GPU three quarters of its memory that is free once the model is loaded, less the pages of a batch; "
        "on the CPU room for one whole context window, at least 4GiB",
    )
    device_timeout: float = Field(
        10.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds that a request outside a batch waits for running ones to give back KV memory of the "
        "device; then it is refused",
    )
    max_pages: int | None = Field(
        None,
        description="byte cap of the KV pages that a batch decodes from, per Batcher. None: 1GiB; with our kernels for "
        "GPUs about half of what is free there, or what max_device leaves of three quarters",
    )
    max_disk: int = Field(20 << 30, description="byte cap of the store on disk, over all processes")
    ram_policy: Literal["lru", "lfu", "s3fifo"] = Field("s3fifo", description="what RAM evicts first")
    disk_policy: Literal["lru", "lfu", "s3fifo"] = Field("s3fifo", description="what the store evicts first")
    admit: Literal["always", "second_use"] = Field(
        "always", description="second_use: store what is seen twice, not what is computed once"
    )
    min_store_tokens: int = Field(0, ge=0, description="shorter prefixes are not stored")
    min_write_tokens: int = Field(
        0,
        ge=0,
        description="what adds fewer tokens stays in RAM until enough follows it; what is still there when the process "
        "ends is lost",
    )
    store_answers: bool = Field(
        True, description="store the KV of answers; without it an answer is stored once a prompt goes on from it"
    )
    draft_tokens: int = Field(
        DRAFT_TOKENS,
        ge=0,
        le=DRAFT_TOKENS,
        description="most tokens that are drafted for a step of an answer: those that followed the same tokens earlier "
        "in prompt and answer, or the same prompt before. The number does not change the answer, to the bit. Models on "
        "the compiled kernels for the processor have drafts, unless a layer has a recurrent state; batches of more "
        "than eight answers have none",
    )
    store_ttl: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="seconds without a use after which KV is evicted first"
    )
    store_timeout: float = Field(
        5.0, gt=0, allow_inf_nan=False, description="seconds a request waits for a store folder that does not answer"
    )
    exit_timeout: float = Field(
        EXIT_SECONDS,
        gt=0,
        allow_inf_nan=False,
        description="seconds that an engine which nobody closed may take to write what is queued when the program ends",
    )
    map_files: bool = Field(
        False,
        description="attend to stored files in place where the page cache holds them, verified but not copied; what "
        "the system reads again from disk later is then not verified again",
    )
    max_disk_writes_per_day: int | None = Field(
        None,
        description="bytes written per UTC day, over all processes; beyond it KV stays in RAM only. None: no limit",
    )
    remote: tuple[SecretStr, ...] = Field(
        (), description="remote tiers below the disk: one URL or several (redis://, s3://, gs://, az://, file://)"
    )
    remote_timeout: float = Field(0.5, gt=0, allow_inf_nan=False, description="seconds a remote lookup may take")
    remote_load_timeout: float = Field(5.0, gt=0, allow_inf_nan=False, description="seconds a remote load may take")
    max_remote: int | None = Field(None, description="byte cap of each remote tier, over all replicas. None: no limit")
    step: int | None = Field(
        None,
        ge=1,
        description=f"tokens per prefill step; None: {DEFAULT_STEP}, or {SCHEDULED_STEP} where matches end at steps",
    )
    snapshot_budget: float = Field(
        SNAPSHOT_BUDGET,
        gt=0,
        allow_inf_nan=False,
        description="of a model with recurrent state: bytes of snapshots along a prompt for each byte of its KV",
    )
    max_scratch: int = Field(1 << 30, description="bytes a prefill step may take beside KV: steps shrink to keep to it")
    min_step: int = Field(
        DEFAULT_MIN_STEP, ge=0, description="tokens that lie between two ends of messages where reuse can end"
    )
    chunker: Literal["fixed", "semantic", "document", "content"] = Field(
        "content", description="how what is not declared as a segment is divided into chunks"
    )
    chunk_size: int = Field(128, ge=2, description="tokens per chunk: exactly (fixed) or about")
    chunk_least: int = Field(32, ge=1, description="shorter content is no chunk")
    chunk_partial: bool = Field(
        False, description="with the fixed chunker: also what is shorter than chunk_size at the end"
    )
    chunk_start: str | None = Field(
        None, description="text that chunks are computed after; None: the chat template's beginning of a system prompt"
    )
    chunk_contexts: Literal["neutral", "any"] = Field(
        "neutral", description="any: reuse also KV from other requests' contexts; answers then depend on traffic"
    )
    learn_chunks: bool = Field(True, description="compute the KV of chunks that were met, when nothing else runs")
    repair: str = Field(
        "impact:0.13",
        description="how blended KV is repaired: which tokens are computed again, and which share of them",
    )
    max_divergence: float | None = Field(
        None, gt=0, description="estimated divergence above which a blended answer is computed in full instead"
    )
    shadow: float = Field(
        0.0, ge=0, le=1, description="share of blended answers (served: of all) that are compared with a cold run"
    )
    tool_order: ToolOrder = Field(
        "as_sent",
        description="of a request's tools and of the keys in them. sorted: tools by name, and in their schemas every "
        "object's keys and arrays like required; one prompt for every order, but properties are then written in order "
        "of their names",
    )
    session_tokens: Literal["canonical", "as_generated"] = Field(
        "canonical", description="ids of a session's history: of its whole text, or those that were really run"
    )
    least_text_share: float = Field(
        0.8, ge=0, le=1, description="of a text that was run, how much must agree for its ids to be kept as generated"
    )
    settle_after: float | None = Field(
        0.05, ge=0, allow_inf_nan=False, description="idle seconds until sessions settle; None: only when asked"
    )
    session_ttl: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="seconds without a use until sessions are dropped; None: never"
    )
    template_args: dict[str, Any] = Field(default_factory=dict, description="extra variables for the chat template")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    attention: Literal["auto", "model", "triton"] = Field(
        "auto",
        description="auto: our kernels where they were seen; model: the model's own code; triton: our kernels for GPUs",
    )

    @field_validator("max_ram", "max_disk", "max_scratch", mode="before")
    @classmethod
    def _size(cls, value: int | str) -> int:
        return parse_bytes(value)

    @field_validator("max_device", "max_pages", "max_disk_writes_per_day", "max_remote", mode="before")
    @classmethod
    def _budget(cls, value: int | str | None) -> int | None:
        return None if value is None else parse_bytes(value)

    @field_validator("store", "store_key_file", mode="before")
    @classmethod
    def _folder(cls, value: str | os.PathLike[str] | None) -> Path | None:
        if value is None:
            return None
        if not isinstance(value, str | os.PathLike):
            raise ConfigError(f"store and store_key_file are paths, or None, got {value!r}")
        return Path(value).expanduser()

    @field_validator("device", "dtype", mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        return None if value == "auto" else value

    @field_validator("device")
    @classmethod
    def _place(cls, value: str | None) -> str | None:
        if value is not None and not _DEVICE.match(value):
            raise ConfigError(f"a device is cpu, mps, cuda or cuda:NUMBER, got {value!r}")
        return value

    @field_validator("remote", mode="before")
    @classmethod
    def _urls(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str | SecretStr) else () if value is None else value

    @property
    def remote_urls(self) -> tuple[str, ...]:
        """The URLs of the remote tiers, with their passwords. Do not show them."""
        return tuple(url.get_secret_value() for url in self.remote)

    @field_validator("reuse", mode="before")
    @classmethod
    def _reuse(cls, value: str | Reuse) -> Reuse:
        return Reuse.parse(value)

    def step_for(self, *, invariant: bool) -> int:
        """Return G, the tokens per prefill step, for invariant or scheduled arithmetic (`core.schedule`)."""
        return self.step or (DEFAULT_STEP if invariant else SCHEDULED_STEP)

    @property
    def is_choosy(self) -> bool:
        """Whether some of what is computed is not stored at once."""
        return self.admit != "always" or max(self.min_store_tokens, self.min_write_tokens) > 0 or not self.store_answers

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
            if first["type"] == "value_error":  # one of our own errors: it says what it got
                raise ConfigError(f"setting {name!r}: {first['ctx']['error']}") from None
            seen = "something else" if name.startswith("remote.") else repr(first["input"])  # a URL may hold a password
            raise ConfigError(f"setting {name!r}: {first['msg']}, got {seen}") from None
        if config.kv_codec != "raw" and config.reuse is Reuse.EXACT:
            raise ConfigError(
                f"kv_codec={config.kv_codec!r} is lossy, so nothing it stores can be reused under reuse='exact': "
                "allow reuse='prefix', or take kv_codec='raw'"
            )
        if config.kv_in_memory == "encoded" and config.kv_codec == "raw":
            raise ConfigError("kv_in_memory='encoded' needs a kv_codec that encodes: int8, int4 or fp8")
        if config.step is not None and config.min_step > config.step:
            raise ConfigError(f"min_step ({config.min_step}) cannot exceed step ({config.step})")
        return config
