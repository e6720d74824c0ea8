"""Checks of files in deploy/: their variables and commands exist. And what a kustomization makes of its parts."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from typer.main import get_command

from keepwarm.cli.app import app
from keepwarm.config import ENVIRONMENT
from keepwarm.serving.settings import ServeConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def check_variables(found: dict[str, str]) -> None:
    """Of the service; what has no double underscore is looked for in the source."""
    ServeConfig.load(None, {}, {name: value for name, value in found.items() if name.startswith(ENVIRONMENT)})
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    for name in found:
        assert name.startswith(ENVIRONMENT) or f'"{name}"' in source, name


def check_command(words: list[str]) -> None:
    """`keepwarm ...`: the command and its options exist."""
    here: Any = get_command(app)
    while words and words[0] in getattr(here, "commands", {}):
        here = here.commands[words.pop(0)]
    options = {name for parameter in here.params for name in parameter.opts}
    given = [word for word in words if word.startswith("-")]
    assert given
    assert set(given) <= options


# ---- kustomize: as much of it as deploy/kubernetes uses ----


def built(folder: Path) -> list[dict[str, Any]]:
    """Return the objects that a kustomization stands for. A test compares them with those of `kubectl kustomize`."""
    made = yaml.safe_load((folder / "kustomization.yaml").read_text())
    known = {"apiVersion", "kind", "resources", "labels", "images", "patches"}
    assert set(made) <= known, set(made) - known
    objects = [one for name in made["resources"] for one in _objects(folder / name)]
    for labels in made.get("labels", ()):
        assert labels["includeTemplates"]
        for one in objects:
            for place in _labelled(one):
                place["labels"] = place.get("labels", {}) | labels["pairs"]
    for image in made.get("images", ()):
        for container in (container for one in objects for container in containers(one)):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    for patch in made.get("patches", ()):
        (change,) = loaded(folder / patch["path"])
        (one,) = (one for one in objects if patch["target"].items() <= {"kind": one["kind"], **one["metadata"]}.items())
        _merge(one, change)
    return objects


def loaded(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def _objects(path: Path) -> list[dict[str, Any]]:
    return built(path.resolve()) if path.is_dir() else loaded(path)


def _labelled(one: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the metadata of an object, and of the pods and claims that it makes."""
    yield one["metadata"]
    spec = one.get("spec", {})
    if "template" in spec:
        yield spec["template"]["metadata"]
    for claim in spec.get("volumeClaimTemplates", ()):
        yield claim["metadata"]


def _merge(base: dict[str, Any], change: dict[str, Any]) -> None:
    """A strategic merge: tables by key, lists of named things by name. Those that the change names go first."""
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        elif isinstance(value, list) and isinstance(base.get(key), list) and all("name" in one for one in value):
            here = {one["name"]: one for one in base[key]}
            changed = [here.pop(one["name"], {}) for one in value]
            for before, one in zip(changed, value, strict=True):
                _merge(before, one)
            base[key] = changed + list(here.values())
        else:
            base[key] = copy.deepcopy(value)


def containers(one: dict[str, Any]) -> list[dict[str, Any]]:
    pod = one.get("spec", {}).get("template", {}).get("spec", {})
    return [*pod.get("initContainers", ()), *pod.get("containers", ())]


def variables(container: dict[str, Any]) -> dict[str, str]:
    """Return a container's variables that have a value, with references to earlier ones put in where they have one.
    Raises AssertionError for a reference to a later one, which Kubernetes would leave as it is."""
    names: set[str] = set()
    found: dict[str, str] = {}
    for one in container.get("env", ()):
        if "value" in one:
            found[one["name"]] = expanded(one["value"], names, found)
        names.add(one["name"])
    return found


def expanded(text: str, names: set[str], values: dict[str, str]) -> str:
    used = set(re.findall(r"\$\((\w+)\)", text))
    assert used <= names, f"{used - names} come later, or are not there: {text}"
    return re.sub(r"\$\((\w+)\)", lambda found: values.get(found[1], found[0]), text)
