"""Registered sets: names, versions, the order that edits keep, and what survives on disk."""

from __future__ import annotations

import copy
import json
import logging
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.tools import only_file, tool, tools

from keepwarm.core.tools import shown_tools
from keepwarm.errors import ConfigError, PromptError, StoreLocked, StoreNotWritable
from keepwarm.store.runfile.crypto import StoreKey
from keepwarm.toolsets import Registry, Version
from keepwarm.toolsets.versions import changes, next_version


@pytest.fixture(params=["memory", "disk", "encrypted"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Registry:
    if request.param == "memory":
        return Registry()
    return Registry(tmp_path, StoreKey(b"k" * 32) if request.param == "encrypted" else None)


def test_the_same_content_is_the_same_version(registry: Registry) -> None:
    name, first, base = registry.register(tools("b", "a", "c"), name="set")
    assert (name, first.number, first.names, base) == ("set", 1, ("b", "a", "c"), None), "in the order of the first"
    shuffled = copy.deepcopy(tools("c", "b", "a"))
    shuffled[0]["inputSchema"]["required"].reverse()
    assert registry.register([dict(reversed(t.items())) for t in shuffled], name="set")[1] == first
    assert registry.get("set") == first
    assert len(registry.versions("set")) == 1


def rendered(version: Version) -> str:
    """The tools as a template prints them: the order of every key counts."""
    return json.dumps(version.tools)


def turned(value: Any) -> Any:
    """The same JSON with the keys of every object, and `required`, the other way round."""
    if isinstance(value, dict):
        return {key: turned(value[key]) for key in reversed(value)}
    return value[::-1] if value in (["b", "a"], ["a", "b"]) else value


def test_a_set_keeps_the_order_of_its_keys(registry: Registry) -> None:
    _, first, _ = registry.register(tools("b", "a", "c"), name="set")
    shown = rendered(first)
    assert shown.index('"parameters"') > shown.index('"description"')
    assert '"required": ["b", "a"]' in shown
    other = [turned(each) for each in tools("c", "b", "a")]
    assert rendered(registry.register(other, name="set")[1]) == shown
    assert rendered(registry.get("set")) == shown
    _, named, _ = registry.register(other, name="other")
    assert (named.hash, rendered(named) == shown) == (first.hash, False), "another name, another order"
    assert '"required": ["a", "b"]' in rendered(named)


def test_an_edit_keeps_the_order_of_its_keys(registry: Registry) -> None:
    registry.register(tools("b", "a", "c"), name="set")
    edited = [turned(each) for each in (*tools("a", "c"), tool("b", "more"), tool("d"))]
    edited[2]["inputSchema"]["properties"] = {"new": {}, **edited[2]["inputSchema"]["properties"]}
    _, second, _ = registry.register(edited, name="set")
    a, c, b, d = second.tools
    assert (second.names, json.dumps([a, c])) == (("a", "c", "b", "d"), json.dumps(shown_tools(tools("a", "c"))))
    changed = b["function"]
    assert list(changed) == ["name", "description", "parameters"]
    assert list(changed["parameters"]) == ["type", "properties", "required"]
    assert list(changed["parameters"]["properties"]) == ["a", "b", "new"], "what is new comes last"
    assert changed["parameters"]["required"] == ["b", "a"]
    assert list(d["function"]) == ["parameters", "description", "name"], "a new tool is as it was sent"


@pytest.mark.parametrize(("before", "after"), [(0, False), (1, True), (1, 1.0), ({"x": 0}, {"x": False})])
def test_numbers_and_booleans_are_different_tools(registry: Registry, before: Any, after: Any) -> None:
    def saying(value: Any) -> list[dict[str, Any]]:
        found = tools("a", "b")
        found[0]["inputSchema"]["properties"]["a"] = {"const": value}
        return found

    _, first, _ = registry.register(saying(before), name="set")
    _, second, base = registry.register(saying(after), name="set")
    assert second.hash != first.hash
    assert second.number == 2
    assert changes(base, second).changed == ("a",)
    assert json.dumps({"const": after}) in rendered(second)
    assert json.dumps({"const": before}) not in rendered(second)
    assert registry.adopt("copy", first).number == registry.adopt("copy", second).number - 1


def changed_enum() -> list[dict[str, Any]]:
    found = tools("a", "b", "c")
    found[1]["inputSchema"]["properties"]["a"]["enum"].reverse()
    return found


@pytest.mark.parametrize(
    "edit",
    [
        {"tools": changed_enum()},
        {"tools": [tool("a", "does more"), *tools("b", "c")]},
        {"tools": tools("a", "b", "c"), "system": "Be kind."},
        {"tools": tools("a", "b", "c"), "documents": ["A text."]},
        {"tools": tools("a", "b")},
    ],
)
def test_any_change_is_another_version_and_hash(registry: Registry, edit: dict[str, Any]) -> None:
    _, first, _ = registry.register(tools("a", "b", "c"), name="set")
    _, second, base = registry.register(**edit, name="set")
    assert second.hash != first.hash
    assert (second.number, base) == (2, first)
    assert registry.get("set", 1) == first
    assert registry.get("set") == second


def test_edits_keep_the_order_and_put_what_is_new_last(registry: Registry) -> None:
    registry.register(tools("a", "c", "e", "g"), name="set")
    _, more, _ = registry.register(tools("a", "b", "c", "e", "g"), name="set")
    assert more.names == ("a", "c", "e", "g", "b")
    assert more.ends == (4, 5)
    _, edited, base = registry.register([*tools("a", "b", "c", "g"), tool("e", "new")], name="set")
    assert edited.names == ("a", "c", "g", "b", "e")
    assert edited.ends == (5,), "the cut after the fourth tool lay behind the change"
    assert changes(base, edited).changed == ("e",)
    _, fewer, base = registry.register([*tools("a", "c", "g"), tool("e", "new")], name="set")
    assert fewer.names == ("a", "c", "g", "e")
    assert changes(base, fewer).removed == ("b",)


def test_going_back_finds_the_old_order(registry: Registry) -> None:
    _, first, _ = registry.register(tools("b", "d"), name="set")
    registry.register(tools("a", "b", "d"), name="set")
    registry.register(tools("d"), name="set")
    _, again, _ = registry.register(tools("a", "d", "b"), name="set")
    assert (again.number, again.names, again.ends) == (4, ("b", "d", "a"), (2, 3))
    assert registry.register(tools("d", "b"), name="set")[1].names == first.names


def test_a_set_may_start_from_another(registry: Registry) -> None:
    registry.register(tools("b", "c"), name="small")
    _, version, base = registry.register(tools("a", "b", "c"), name="large", based_on="small")
    assert version.names == ("b", "c", "a")
    assert base == registry.get("small")
    assert version.number == 1
    with pytest.raises(ConfigError, match="no tool set is called 'none'; registered are: large, small"):
        registry.register(tools("a"), name="third", based_on="none")


def test_names(registry: Registry) -> None:
    name, version, _ = registry.register(tools("a"))
    assert name == f"set-{version.hash[:12]}"
    registry.register(
        [], system="You read files.", documents=["x", {"title": "t", "text": "y"}], name="files: été/../x"
    )
    assert registry.names() == ("files: été/../x", name)
    assert registry.get("files: été/../x").documents == ("x", {"title": "t", "text": "y"})
    assert registry.remove(name)
    assert not registry.remove(name)
    assert registry.names() == ("files: été/../x",)
    with pytest.raises(ConfigError, match="versions 1, not 3"):
        registry.get("files: été/../x", 3)
    for wrong in ("", " ", "a\nb", "x" * 201):
        with pytest.raises(ConfigError, match="name"):
            registry.register(tools("a"), name=wrong)
    with pytest.raises(PromptError, match="nothing was given"):
        registry.register([])
    with pytest.raises(PromptError, match="plain JSON"):
        registry.register([], documents=[object()])


def test_only_the_latest_versions_are_kept(registry: Registry) -> None:
    for number in range(20):
        registry.register(tools(f"t{number}"), name="set")
    assert [version.number for version in registry.versions("set")] == list(range(5, 21))


def test_sets_survive_a_restart(tmp_path: Path) -> None:
    for number in range(30):
        Registry(tmp_path).register(tools("a", f"t{number}"), system="S", name=f"n{number}")
    again = Registry(tmp_path)
    assert len(again.names()) == 30
    assert again.get("n7") == Registry(tmp_path).register(tools("t7", "a"), system="S", name="n7")[1]


@pytest.mark.parametrize("damage", ["truncated", "changed", "foreign", "empty"])
@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_a_damaged_file_is_moved_aside(tmp_path: Path, damage: str, key: bytes | None, caplog: Any) -> None:
    registry = Registry(tmp_path, StoreKey(key) if key else None)
    registry.register(tools("a"), name="set")
    path = only_file(tmp_path)
    data = path.read_bytes()
    record = json.loads(data)
    field = "sealed" if key else "versions"
    middle = len(record[field]) // 2
    letter = "A" if record[field][middle] != "A" else "B"
    record[field] = record[field][:middle] + letter + record[field][middle + 1 :]
    damaged = {"truncated": data[:-10], "changed": json.dumps(record).encode(), "foreign": b'{"a": 1}', "empty": b""}
    path.write_bytes(damaged[damage])
    with caplog.at_level(logging.WARNING):
        assert registry.versions("set") == ()
    assert "'set' cannot be read" in caplog.text
    assert registry.corrupt == 1
    assert registry.register(tools("a"), name="set")[1].number == 1


def test_an_encrypted_registry_shows_nothing_and_needs_its_key(tmp_path: Path) -> None:
    registry = Registry(tmp_path, StoreKey(b"k" * 32))
    registry.register([tool("secret_tool")], system="Secret words.", name="set")
    data = only_file(tmp_path).read_bytes()
    assert b"secret_tool" not in data
    assert b"Secret words" not in data
    for key in (None, StoreKey(b"x" * 32)):
        with pytest.raises(StoreLocked, match="'set' is encrypted"):
            Registry(tmp_path, key).get("set")
    assert Registry(tmp_path, StoreKey(b"k" * 32)).get("set").system == "Secret words."


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreNotWritable, match="tool sets"):
        Registry(tmp_path / "file")


def register_many(folder: Path, worker: int) -> None:
    registry = Registry(folder)
    for number in range(4):
        registry.register(tools(f"w{worker}", f"n{number}"), name="shared")


def test_writers_take_turns(tmp_path: Path) -> None:
    """Each with a registry of its own, as processes have: they meet at the file's lock only."""
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(register_many, tmp_path, worker) for worker in range(4)]:
            done.result()
    numbers = [version.number for version in Registry(tmp_path).versions("shared")]
    assert numbers == list(range(1, 17)), "no version was lost"


@settings(max_examples=60, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10**6), edits=st.integers(1, 40))
def test_any_edits_keep_what_can_be_kept(seed: int, edits: int) -> None:
    rng = random.Random(seed)
    content = {f"t{n}": 0 for n in range(8)}
    version: Version | None = None
    for number in range(edits):
        match rng.randrange(3):
            case 0:
                content[f"n{number}"] = 0
            case 1 if len(content) > 1:
                del content[rng.choice(sorted(content))]
            case _:
                content[rng.choice(sorted(content))] += 1
        schemas = [
            {"type": "function", "function": {"name": n, "description": str(v)}} for n, v in sorted(content.items())
        ]
        before, version = version, next_version(schemas, None, (), version, number + 1)
        assert sorted(version.names) == sorted(content)
        assert version.ends[-1] == len(version.tools)
        assert list(version.ends) == sorted(set(version.ends))
        assert len(version.ends) <= 2 + len(version.tools).bit_length()
        if before is not None:
            kept = [t for t in before.tools if t in version.tools]
            assert list(version.tools[: len(kept)]) == kept
            for end in version.ends[:-1]:
                assert version.tools[:end] == before.tools[:end], "an inherited cut has the same head"
                assert end in before.ends
