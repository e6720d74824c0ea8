"""Configuration: one file, the environment over it, options over both; nothing unknown passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepwarm.cli.serve import _adapters
from keepwarm.errors import ConfigError
from keepwarm.serving.settings import ServeConfig

TEXT = '[server]\nport = 9000\n[engine]\nmax_ram = "1GiB"\n[limits]\nmax_body = "2MiB"\n[log]\nlevel = "warning"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.toml"
    path.write_text(TEXT)
    return path


def test_options_win_over_the_environment_and_that_over_the_file(file: Path) -> None:
    environment = {"KEEPWARM__SERVER__PORT": "9001", "KEEPWARM__LOG__LEVEL": "error", "KEEPWARM_CACHE": "/elsewhere"}
    config = ServeConfig.load(file, {"server.port": 9002, "server.host": None}, environment)
    assert (config.server.port, config.server.host, config.log.level) == (9002, "127.0.0.1", "error")
    assert config.limits.max_body == 2 << 20
    assert config.engine["max_ram"] == "1GiB"
    assert ServeConfig.load(file, {}, {"KEEPWARM__SERVER__PORT": "9001"}).server.port == 9001


def test_lists_come_as_json(file: Path) -> None:
    config = ServeConfig.load(file, {}, {"KEEPWARM__SERVER__MODEL_NAMES": '["a", "b"]'})
    assert config.server.model_names == ("a", "b")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"KEEPWARM__SERVER__PROT": "1"}, "unknown setting 'server.prot'"),
        ({"KEEPWARM__SERVER__PORT": "many"}, "server.port"),
        ({"KEEPWARM__ENGINE__MAX_RAM": "lots"}, "engine"),
        ({"KEEPWARM__ENGINE__COLOUR": "red"}, "unknown setting 'colour'"),
        ({"KEEPWARM__SERVER__HOST": "0.0.0.0"}, "keepwarm keys add"),
        ({"KEEPWARM__SERVER__HOST": "example.org"}, "keepwarm keys add"),
    ],
)
def test_what_is_wrong_is_named(file: Path, environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        ServeConfig.load(file, {}, environment)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert ServeConfig.load(None, {"server.host": host}, {}).server.host == host


def test_a_public_address_with_keys(tmp_path: Path) -> None:
    config = ServeConfig.load(None, {"server.host": "0.0.0.0", "tenants.keys_file": str(tmp_path / "keys.json")}, {})
    assert config.tenants.keys_file is not None


def test_a_missing_or_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ServeConfig.load(tmp_path / "none.toml", {}, {})
    (tmp_path / "bad.toml").write_text("[server\n")
    with pytest.raises(ConfigError, match="no TOML"):
        ServeConfig.load(tmp_path / "bad.toml", {}, {})


def test_adapters_have_names_of_their_own(file: Path) -> None:
    config = ServeConfig.load(file, {}, {"KEEPWARM__ADAPTERS": '{"one": "~/one"}'})
    assert config.adapters == {"one": Path("~/one").expanduser()}
    with pytest.raises(ConfigError, match="adapters: demo is a name of the model itself"):
        ServeConfig.load(file, {"adapters": {"demo": "folder"}}, {})
    for name in ("", "x" * 201):
        with pytest.raises(ConfigError, match="adapters: a name has 1 to 200 characters"):
            ServeConfig.load(file, {"adapters": {name: "folder"}}, {})


def test_adapters_of_several_models_have_names_of_their_own(tmp_path: Path) -> None:
    """The default of `model` is no name there."""
    given = {"models": {"a": str(tmp_path), "b": str(tmp_path)}}
    (first, other) = ServeConfig.load(None, given | {"adapters": {"demo": "folder"}}, {}).served
    assert (first.names, other.names) == (("a", "demo"), ("b",))
    assert (list(first.adapters), list(other.adapters)) == (["demo"], [])
    for taken in ("a", "b"):
        with pytest.raises(ConfigError, match=f"models: '{taken}' is the name of more than one model, or given twice"):
            ServeConfig.load(None, given | {"adapters": {taken: "folder"}}, {})


@pytest.mark.parametrize("given", [["one"], ["=folder"], ["one="]])
def test_an_adapter_option_is_a_name_and_a_folder(given: list[str]) -> None:
    with pytest.raises(ConfigError, match="--adapter takes NAME=PATH"):
        _adapters(given)


def test_an_adapter_option_may_come_twice() -> None:
    assert _adapters(["one=a", "two=b=c"]) == {"one": "a", "two": "b=c"}
    with pytest.raises(ConfigError, match="two have one name, of one, one"):
        _adapters(["one=a", "one=b"])
