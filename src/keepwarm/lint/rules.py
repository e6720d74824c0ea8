"""The vendors' published caching rules and prices: data with a date (`prices.json`), which a file may override."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from keepwarm.errors import ConfigError


class ModelPrice(BaseModel):
    """One model. `read` is the price of a cached token as a share of an uncached one's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: float | None = Field(None, ge=0, description="US dollars per million tokens")
    read: float = Field(..., ge=0, le=1)
    minimum: int | None = Field(None, ge=0, description="shortest prefix that is cached, tokens")
    write: float | None = Field(
        default=None, ge=0, description="share that a written token costs, where prefixes are cached by themselves"
    )
    ttl_seconds: float | None = Field(default=None, gt=0)
    source: str = Field(default="", description="the vendor's own page that says so")
    unconfirmed: tuple[str, ...] = Field(
        default=(), description="fields that no page of the vendor's own was found for"
    )


class VendorRules(BaseModel):
    """How one vendor caches."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    minimum: int = Field(..., ge=0, description="shortest prefix that is cached, tokens")
    increment: int = Field(..., ge=1, description="a hit is the minimum plus a multiple of so many tokens")
    ttl_seconds: float = Field(..., gt=0)
    long_ttl_seconds: float = Field(..., gt=0)
    lookback_blocks: int | None = Field(None, description="parts before a breakpoint where an entry is looked for")
    breakpoints: int | None = Field(None, description="most per request; None: prefixes are cached by themselves")
    read: float = Field(..., ge=0, le=1, description="of a model that is not listed")
    write: float = Field(..., ge=0, description="price of a written token as a share of an uncached one's")
    write_1h: float = Field(..., ge=0)
    sources: tuple[str, ...] = Field(default=(), description="the vendor's own pages that say so")
    unconfirmed: tuple[str, ...] = Field(default=(), description="rules that no page of the vendor's own was found for")
    models: dict[str, ModelPrice]

    def price(self, model: str) -> ModelPrice | None:
        """Return a model's price, from the longest listed beginning of its name without date, host and region."""
        known = self.known(model)
        return None if known is None else self.models[known]

    def known(self, model: str) -> str | None:
        """Return the name that a model is listed under; None when it is not listed."""
        name = re.sub(r"^.*[/:]|^(?:[a-z]{2,6}\.)?anthropic\.", "", model.lower()).replace("claude-4-", "claude-")
        known = [key for key in self.models if name == key or name.startswith(key + "-")]
        return max(known, key=len) if known else None


class Prices(BaseModel):
    """Both vendors' rules, as of a date."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    date: str
    note: str = ""
    openai: VendorRules
    anthropic: VendorRules

    def of(self, vendor: str) -> VendorRules:
        rules: VendorRules = getattr(self, vendor)
        return rules


def load_prices(override: Path | None = None) -> Prices:
    """Return the published rules, overridden by a JSON file of the same form. Raises ConfigError."""
    data: dict[str, Any] = json.loads(resources.files("keepwarm.lint").joinpath("prices.json").read_text("utf-8"))
    name = "prices.json"
    if override is not None:
        name = str(override)
        try:
            changes = json.loads(override.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"the price file {override} cannot be read as JSON: {error}") from None
        if not isinstance(changes, dict):
            raise ConfigError(f"{override}: expected a JSON object like prices.json, got {type(changes).__name__}")
        data = _merged(data, {"note": "", "date": name} | changes)
    try:
        return Prices.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{name}: {where}: {first['msg']}, got {first['input']!r}") from None


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        below = result.get(key)
        result[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result
