"""Registered sets are under salts: found with them alone, and gone with a purge of them, whatever became of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.models import tiny
from tests.helpers.tools import only_file, tool, tools

from keepwarm import Engine
from keepwarm.core.identity import salt_key
from keepwarm.errors import ConfigError, PurgedMeanwhile
from keepwarm.store import Archive
from keepwarm.store.runfile.crypto import StoreKey
from keepwarm.toolsets import Registry

SECRET = "The password of the harbour is marmalade. " * 4


def purge(folder: Path, *salts: str) -> None:
    """As another process does: without key or model."""
    with Archive.open(folder, max_ram=0, max_disk=1 << 30) as archive:
        archive.purge(*(salt_key(salt) for salt in salts)) if salts else archive.purge_all()


def texts(folder: Path) -> list[str]:
    needles = (b"marmalade", b"secret_tool")
    return [str(path) for path in folder.rglob("*") if path.is_file() and any(n in path.read_bytes() for n in needles)]


def test_a_name_is_another_set_under_each_salt(tmp_path: Path) -> None:
    for registry in (Registry(), Registry(tmp_path), Registry(tmp_path / "sealed", StoreKey(b"k" * 32))):
        for salt, name in (("mine", "a"), ("theirs", "b"), (None, "c")):
            registry.register(tools(name), name="set", salt=salt)
            registry.register(tools(name), name=f"only {name}", salt=salt)
        assert [registry.get("set", salt=salt).names for salt in ("mine", "theirs", None)] == [("a",), ("b",), ("c",)]
        assert registry.names("mine") == ("only a", "set")
        assert registry.names() == ("only c", "set")
        assert len(registry.all_names()) == 6
        with pytest.raises(ConfigError, match="registered are: only b, set"):
            registry.get("only a", salt="theirs")
        assert registry.remove("set", "mine")
        assert (registry.versions("set", "mine"), len(registry.versions("set"))) == ((), 1)


def test_a_purge_takes_a_salts_sets_and_no_others(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    for salt in ("mine", "theirs", None):
        registry.register([tool("secret_tool")] if salt == "mine" else tools("a"), system="S", name="set", salt=salt)
    purge(tmp_path, "mine")
    assert [len(registry.versions("set", salt)) for salt in ("mine", "theirs", None)] == [0, 1, 1]
    assert texts(tmp_path) == []
    purge(tmp_path)
    assert registry.all_names() == ()


def test_a_set_that_goes_while_they_are_listed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry, names = Registry(tmp_path), Registry.names
    for salt in ("mine", None):
        registry.register(tools("a"), name="set", salt=salt)
    assert {name: version.names for name, version in registry.latest().items()} == {"set": ("a",)}

    def purged_behind(one: Registry, salt: str | None = None) -> tuple[str, ...]:
        found = names(one, salt)
        purge(tmp_path, "mine")
        return found

    monkeypatch.setattr(Registry, "names", purged_behind)
    assert registry.latest("mine") == {}
    assert list(registry.latest()) == ["set"]


@pytest.mark.parametrize("state", ["set aside", "damaged", "of another name", "half written"])
def test_what_nobody_knows_the_owner_of_goes_with_any_purge(tmp_path: Path, state: str) -> None:
    registry = Registry(tmp_path)
    registry.register([tool("secret_tool")], system=SECRET, name="set", salt="mine")
    path = only_file(tmp_path)
    if state == "half written":
        path.rename(path.with_name(f".{path.name}.1-2.tmp"))
    elif state == "of another name":
        path.write_text(json.dumps(json.loads(path.read_text()) | {"salt": ""}))
    else:
        path.write_bytes(path.read_bytes()[:-10])
        if state == "set aside":
            assert registry.versions("set", "mine") == ()
            assert path.with_suffix(".corrupt").exists()
    assert texts(tmp_path)
    purge(tmp_path, "theirs")
    assert texts(tmp_path) == []


@pytest.mark.parametrize("folder", [True, False])
def test_a_set_that_is_being_registered(tokenizer: Any, tmp_path: Path, folder: bool) -> None:
    store = {"store": tmp_path} if folder else {}
    with Engine.from_pretrained((tiny("llama"), tokenizer), step=64, min_step=8, **store) as engine:
        epoch = engine.pipeline.archive.epoch()
        kept = engine.tools(tools("a"), name="other", salt="theirs")
        engine.tools(tools("a"), system=SECRET, name="old", salt="mine")
        engine.purge("mine")
        assert engine.tool_sets.names("mine") == ()
        assert engine.tool_sets.names("theirs") == ("other",)
        with pytest.raises(PurgedMeanwhile):
            engine.tool_sets.register([tool("secret_tool")], system=SECRET, name="set", salt="mine", epoch=epoch)
        found = engine.tool_sets.register(tools("b"), system=SECRET, name="set", salt="mine", warm=False)
        assert kept.generate("?", max_new_tokens=1).cached_tokens > 0, "under the salt of the set"
        engine.purge("mine")
        found.warm(epoch=epoch)  # what it holds was read before
        engine.flush()
        assert found.explain("?").cached_tokens == 0
        assert texts(tmp_path) == []
