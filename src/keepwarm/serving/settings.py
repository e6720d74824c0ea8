"""Settings of `keepwarm serve`: one TOML file, overridden by the environment, overridden by the command line.

An environment variable names its field with double underscores: `KEEPWARM__SERVER__PORT=8080`,
`KEEPWARM__ENGINE__MAX_RAM=8GiB`; lists and tables are given as JSON. `KEEPWARM_REMOTE` stands for
`KEEPWARM__ENGINE__REMOTE`, as for the other commands. An unknown name or a bad value is a ConfigError that says where
it stands.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import regex  # type: ignore[import-untyped]
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer, field_validator, model_validator

from keepwarm.config import EngineConfig, cache_dir, from_environment, parse_bytes, put_setting
from keepwarm.errors import ConfigError
from keepwarm.models.places import model_id
from keepwarm.store.remote.backend import redacted

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,99}")
_SHARED = ("store", "store_key_file", "remote")  # engine settings that all models have in common


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class ServerSection(_Section):
    """Where the service listens, and the names it goes by."""

    host: str = Field(default="127.0.0.1", description="address; one that is not loopback needs API keys")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    model_names: tuple[str, ...] = Field(default=(), description="further names that requests may give for the model")
    cors_origins: tuple[str, ...] = Field(default=(), description="origins of web pages that may call; none by default")
    cache_key_sessions: bool = Field(default=False, description="use OpenAI's prompt_cache_key as a session's name")
    mid_chat_system: bool = Field(
        default=False, description="take system messages behind others in Anthropic's protocol"
    )
    sampling_defaults: Literal["model", "openai"] = Field(
        default="model",
        description="what stands in for temperature, top_p and so on in OpenAI's and Anthropic's protocols: what the "
        "model's makers recommend, or temperature 1 alone",
    )
    warm_last: int = Field(
        default=0, ge=0, description="headers used last, which are loaded or computed at start, in the background"
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(), description="names under which it is reached, beside loopback's; without keys"
    )
    model_memory: int | None = Field(
        default=None,
        description="byte cap of the weights of all loaded models, where there are several. None: three quarters of "
        "the memory of the device they lie on",
    )

    @field_validator("model_memory", mode="before")
    @classmethod
    def _size(cls, value: int | str | None) -> int | None:
        return None if value is None else parse_bytes(value)


class BatchSection(_Section):
    """Continuous batching; see `keepwarm.Batcher`."""

    max_batch: int = Field(default=32, ge=1, description="requests that run at once")
    max_queue: int = Field(
        default=256, ge=1, description="requests that wait at most; more are refused, to ask again later"
    )
    max_prefill_tokens: int = Field(
        default=256, ge=1, description="tokens of prompts computed between two tokens of running answers"
    )


class LimitsSection(_Section):
    """What one request, one connection and one tenant may take. `None` is no limit."""

    max_body: int = Field(default=32 << 20, description="bytes of a request's body")
    max_tools: int = Field(default=1024, ge=1, description="tools in one request or set")
    max_messages: int = Field(
        default=10_000, ge=1, description="messages in one request, with what is beyond one part in each, and calls"
    )
    max_documents: int = Field(default=1024, ge=1, description="documents in one request or set")
    max_breakpoints: int = Field(default=4, ge=0, description="declarations of cache_control in one request")
    max_values: int = Field(default=1_000_000, ge=1, description="JSON values in one body, token ids among them")
    max_new_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens of one answer; a request for more is cut to it, or to the rest of the window",
    )
    default_new_tokens: int = Field(
        default=8192, ge=1, description="tokens of an answer to requests that do not say, as OpenAI's may"
    )
    max_choices: int = Field(default=16, ge=1, description="answers to one request (n, or several prompts)")
    max_responses: int = Field(default=1000, ge=1, description="stored responses of one tenant; the oldest go first")
    response_ttl: float = Field(default=2_592_000, gt=0, description="seconds that a stored response is kept")
    max_connections: int = Field(default=512, ge=1, description="open connections")
    header_timeout: float = Field(
        default=10, gt=0, description="seconds from connecting to the end of the first headers"
    )
    body_timeout: float = Field(default=30, gt=0, description="seconds that a body may take to arrive")
    send_timeout: float = Field(
        default=30, gt=0, description="seconds that a client may leave a piece of an answer unread"
    )
    prepare_timeout: float = Field(
        default=30, gt=0, description="seconds until a request must be read, rendered and tokenized"
    )
    request_timeout: float = Field(default=600, gt=0, description="seconds for a whole answer")
    load_timeout: float = Field(
        default=300, gt=0, description="seconds that a request waits for its model, where there are several"
    )
    shutdown_grace: float = Field(default=5, ge=0, description="seconds that running answers have to end at shutdown")
    shutdown_timeout: float = Field(
        default=4, gt=0, description="seconds after that to write what is queued; then the process ends as it is"
    )
    requests_per_minute: int | None = Field(default=None, ge=1, description="requests per minute and tenant")
    tokens_per_minute: int | None = Field(
        default=None, ge=1, description="tokens per minute and tenant, prompt and answer together"
    )
    tokens_per_day: int | None = Field(default=None, ge=1, description="tokens per tenant and UTC day")
    max_concurrent: int | None = Field(default=None, ge=1, description="requests of one tenant at once")

    @field_validator("max_body", mode="before")
    @classmethod
    def _size(cls, value: int | str) -> int:
        return parse_bytes(value)


class TenantsSection(_Section):
    """Who may ask."""

    keys_file: Path | None = Field(default=None, description="hashed API keys, as `keepwarm keys` writes them")

    @field_validator("keys_file", mode="before")
    @classmethod
    def _path(cls, value: str | Path | None) -> Path | None:
        return None if value is None else Path(value).expanduser()


class CatalogueEntry(_Section):
    """A public header: tools, system prompt and documents whose KV all tenants may share."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="the name that requests give")
    tools: Path | None = Field(default=None, description="JSON file with a list of tools")
    system: str | None = Field(default=None, description="the system prompt")
    documents: tuple[Path, ...] = Field(default=(), description="text files")


class ModelSection(_Section):
    """One of several models: a path alone, or a table."""

    path: str = Field(description="a folder, a GGUF file, a hub id, or 'demo'")
    names: tuple[str, ...] = Field(default=(), description="further names that requests may give for it")
    engine: dict[str, Any] = Field(default_factory=dict, description="its own settings of `EngineConfig`")

    @model_validator(mode="before")
    @classmethod
    def _path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @field_validator("engine")
    @classmethod
    def _engine(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in _SHARED:
            if name in value:
                raise ValueError(f"{name} is that of all models: set it in [engine]")
        EngineConfig.build(**value)
        return value


@dataclass(frozen=True)
class Served:
    """One model that is served."""

    name: str
    source: str  # a folder, a GGUF file, a hub id, or "demo"
    names: tuple[str, ...]  # that requests may use, its own first
    engine_settings: Mapping[str, Any]  # of `Engine.from_pretrained`
    adapters: Mapping[str, Path] = field(default_factory=dict)  # folders by name; their names are also in `names`


class RewriteRule(_Section):
    """What is moved or fixed in every request before it is rendered."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    pattern: str = Field(min_length=1, max_length=4000, description="regular expression, as Python's `regex` takes it")
    where: tuple[Literal["system", "first_user", "tools", "tool_results"], ...] = Field(
        min_length=1, description="texts that are searched; of tools, their descriptions"
    )
    action: Literal["drop", "replace", "move"] = Field(
        description="leave it out, put `text` in its place, or move it to the end of the last user message"
    )
    text: str | None = Field(default=None, max_length=4000, description="of `replace`")

    @model_validator(mode="after")
    def _usable(self) -> RewriteRule:
        try:
            pattern = regex.compile(self.pattern)
        except regex.error as error:
            raise ValueError(f"the rule {self.name!r}: its pattern is no regular expression: {error}") from None
        if pattern.search(""):
            raise ValueError(f"the rule {self.name!r}: its pattern matches an empty text, so it would match everywhere")
        if (self.text is None) == (self.action == "replace"):
            wanted = "needs a text" if self.text is None else f"is for replace, and the action is {self.action!r}"
            raise ValueError(f"the rule {self.name!r}: {'replace' if self.text is None else 'text'} {wanted}")
        return self


class LogSection(_Section):
    """What is logged, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least that is logged")
    format: Literal["json", "text"] = Field(default="json", description="one JSON object per line, or plain lines")
    prompts: bool = Field(default=False, description="also log prompts and answers; they hold what users write")


class TracingSection(_Section):
    """OpenTelemetry; needs `pip install keepwarm[otel]`."""

    enabled: bool = Field(default=False, description="send a span for each request, with its stages")
    endpoint: str | None = Field(default=None, description="OTLP/HTTP collector; else the standard OTEL_* variables")


class ServeConfig(_Section):
    """All settings of the service."""

    server: ServerSection = ServerSection()
    model: str = Field(
        default="demo",
        description="a folder, a GGUF file, a hub id, or 'demo'; with [models], the name of the one loaded at start",
    )
    models: dict[str, ModelSection] = Field(
        default_factory=dict, description="several models by name; see ModelSection"
    )
    adapters: dict[str, Path] = Field(
        default_factory=dict,
        description="folders of LoRA adapters, by the names that requests give for them; with [models], of the first",
    )
    engine: dict[str, Any] = Field(default_factory=dict, description="settings of `EngineConfig`")
    batch: BatchSection = BatchSection()
    limits: LimitsSection = LimitsSection()
    tenants: TenantsSection = TenantsSection()
    catalogue: tuple[CatalogueEntry, ...] = ()
    rewrite: tuple[RewriteRule, ...] = Field(default=(), max_length=100)
    log: LogSection = LogSection()
    tracing: TracingSection = TracingSection()

    @field_validator("engine")
    @classmethod
    def _engine(cls, value: dict[str, Any]) -> dict[str, Any]:
        EngineConfig.build(**value)
        return value

    @field_validator("adapters")
    @classmethod
    def _folders(cls, value: dict[str, Path]) -> dict[str, Path]:
        if not all(0 < len(name) <= 200 for name in value):
            raise ValueError("a name has 1 to 200 characters")
        return {name: path.expanduser() for name, path in value.items()}

    @field_serializer("engine")
    def _shown(self, value: dict[str, Any]) -> dict[str, Any]:
        """Remote tiers without their passwords."""
        if "remote" not in value:
            return value
        urls = EngineConfig.build(**value).remote_urls
        return value | {"remote": [redacted(url) for url in urls]}

    @property
    def engine_settings(self) -> dict[str, Any]:
        """Settings of `Engine.from_pretrained`; the store is the command line's default unless the file names one."""
        return {"store": str(cache_dir() / "store")} | self.engine

    @property
    def served(self) -> tuple[Served, ...]:
        """The models, the one that is loaded at start first. Its names are also those of `server.model_names`."""
        more = (*self.server.model_names, *self.adapters)
        if not self.models:
            name = model_id(self.model)
            return (Served(name, self.model, (name, *more), self.engine_settings, self.adapters),)
        first = self.model if "model" in self.model_fields_set else next(iter(self.models))
        return tuple(
            Served(
                name,
                self.models[name].path,
                (name, *self.models[name].names, *(more if name == first else ())),
                self.engine_settings | self.models[name].engine,
                self.adapters if name == first else {},
            )
            for name in sorted(self.models, key=lambda name: name != first)
        )

    @classmethod
    def load(
        cls,
        file: Path | None = None,
        overrides: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> ServeConfig:
        """Read a file, then the environment, then `overrides` (by dotted name). Raises ConfigError."""
        values: dict[str, Any] = {}
        if file is not None:
            try:
                values = tomllib.loads(file.expanduser().read_text(encoding="utf-8"))
            except OSError as error:
                raise ConfigError(f"the configuration {file} cannot be read: {error.strerror or error}") from None
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"the configuration {file} is no TOML: {error}") from None
        from_environment(values, os.environ if environment is None else environment)
        for name, value in (overrides or {}).items():
            if value is not None:
                put_setting(values, name.split("."), value, f"the option for {name}")
        try:
            config = cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError("; ".join(_told(problem) for problem in error.errors()[:5])) from None
        config._check_public()
        config._check_models()
        return config

    def _check_public(self) -> None:
        if self.tenants.keys_file is None and not is_loopback(self.server.host):
            raise ConfigError(
                f"server.host is {self.server.host!r}, which others can reach, and there are no API keys: make some "
                "with `keepwarm keys add` and set tenants.keys_file, or bind to 127.0.0.1"
            )
        own = () if self.models else (model_id(self.model), *self.server.model_names)
        if taken := self.adapters.keys() & {*own}:  # for several models see `_check_models`
            raise ConfigError(f"adapters: {', '.join(sorted(taken))} is a name of the model itself")
        names = [entry.name for entry in self.catalogue]
        if len(set(names)) < len(names):
            raise ConfigError(f"catalogue: two entries have one name, of {', '.join(names)}")
        rules = [rule.name for rule in self.rewrite]
        if len(set(rules)) < len(rules):
            raise ConfigError(f"rewrite: two rules have one name, of {', '.join(rules)}")

    def _check_models(self) -> None:
        if not self.models:
            return
        known = ", ".join(self.models)
        if "model" in self.model_fields_set and self.model not in self.models:
            raise ConfigError(f"model: {self.model!r} is none of the names in [models], which are {known}")
        if wrong := [name for name in self.models if not _MODEL_NAME.fullmatch(name)]:
            raise ConfigError(
                f"models: {wrong[0]!r} is no name: expected letters, digits and . _ : / @ + -, at most 100, beginning "
                "with a letter or a digit"
            )
        names = Counter(name for model in self.served for name in model.names)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ConfigError(f"models: {twice[0]!r} is the name of more than one model, or given twice")
        if len(self.models) > 1 and self.engine_settings["store"] is None:
            raise ConfigError("models: several models need a store (engine.store): their KV waits there")


def is_loopback(host: str) -> bool:
    """Whether an address can be reached only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _told(problem: Any) -> str:
    name = ".".join(str(part) for part in problem["loc"]) or "the configuration"
    if problem["type"] == "extra_forbidden":
        return f"unknown setting {name!r}"
    if problem["type"] == "value_error":
        return f"{name}: {problem['msg'].removeprefix('Value error, ')}"
    return f"{name}: {problem['msg']}, got {problem['input']!r}"
