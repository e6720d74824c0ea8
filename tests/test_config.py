"""Settings: checked once, frozen, and refused with the setting's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from keepwarm.config import DEFAULT_MIN_STEP, DEFAULT_STEP, SCHEDULED_STEP, EngineConfig, cache_dir, parse_bytes
from keepwarm.core.spans import Reuse
from keepwarm.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("4096B", 4096),
        ("1k", 1000),
        ("1KiB", 1024),
        ("512MiB", 512 << 20),
        ("20GB", 20 * 10**9),
        ("4GiB", 4 << 30),
        (" 1.5 gib ", 3 << 29),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("bad", [-1, "", "GiB", "-1", "4 GiB 2", "lots", "1e9", "4XiB"])
def test_what_is_no_size_is_refused(bad: int | str) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_bytes(bad)


@given(st.integers(0, 10**15))
def test_integers_are_bytes_as_they_are(size: int) -> None:
    assert parse_bytes(size) == size == parse_bytes(str(size))


def test_defaults() -> None:
    config = EngineConfig.build()
    assert config.reuse is Reuse.EXACT
    assert config.store is None
    assert (config.step_for(invariant=True), config.min_step) == (DEFAULT_STEP, DEFAULT_MIN_STEP)
    assert config.step_for(invariant=False) == SCHEDULED_STEP
    assert EngineConfig.build(step=64).step_for(invariant=False) == 64
    assert (config.max_ram, config.max_disk) == (4 << 30, 20 << 30)


def test_values_are_resolved_at_the_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = EngineConfig.build(store="~/kv", reuse="prefix", max_ram="1GiB", max_disk=5)
    assert config.store == Path("/home/someone/kv")
    assert config.reuse is Reuse.PREFIX
    assert (config.max_ram, config.max_disk) == (1 << 30, 5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("store", 5),
        ("reuse", "sometimes"),
        ("reuse", "fuzzy"),
        ("reuse", None),
        ("device", 0),
        ("kv_codec", "zip"),
        ("max_ram", "much"),
        ("max_ram", None),
        ("max_ram", 1.5),
        ("max_ram", True),
        ("max_disk", -1),
        ("step", 0),
        ("step", "many"),
        ("min_step", -1),
        ("tool_order", "random"),
        ("template_args", 3),
        ("attention", "flash"),
    ],
)
def test_a_bad_value_is_refused_with_its_setting(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'"):
        EngineConfig.build(**{name: value})


def test_auto_chooses_a_dtype_and_a_device_as_none_does() -> None:
    assert EngineConfig.build(dtype="auto", device="auto") == EngineConfig.build()


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'max_rma'; known are .*max_ram"):
        EngineConfig.build(max_rma="1GiB")


def test_min_step_cannot_exceed_step() -> None:
    with pytest.raises(ConfigError, match=r"min_step \(65\).*step \(64\)"):
        EngineConfig.build(step=64, min_step=65)


def test_settings_are_frozen() -> None:
    config = EngineConfig.build()
    with pytest.raises(ValidationError):
        config.step = 3


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("KEEPWARM_CACHE", raising=False)
    assert cache_dir() == Path("/home/someone/.cache/keepwarm")
    monkeypatch.setenv("KEEPWARM_CACHE", "~/elsewhere")
    assert cache_dir() == Path("/home/someone/elsewhere")
