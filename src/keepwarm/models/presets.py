"""Published configurations by name, cut down to the fields that shape the KV: sizes without weights."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from keepwarm.errors import ModelNotFound

_HUB_ID = re.compile(r"^\w[\w.-]*/[\w.-]+$")
_TUNED = {
    "instruct",
    "chat",
    "it",
    "hf",
    "base",
    "meta",
}  # words in the names of models that differ in weights but not in shape


@cache
def _presets() -> dict[str, dict[str, Any]]:
    text = files(__package__).joinpath("presets.json").read_text(encoding="utf-8")
    loaded: dict[str, dict[str, Any]] = json.loads(text)
    return loaded


def preset_names() -> tuple[str, ...]:
    """The known names, sorted."""
    return tuple(sorted(_presets()))


def preset(name: str) -> dict[str, Any]:
    """Return the configuration called `name` (in any case), ready for `geometry_of`; a `note` says what it leaves out.

    A hub id works, too: `Qwen/Qwen3-8B`, `meta-llama/Llama-3.1-8B-Instruct`. Raises ModelNotFound naming the nearest
    known names.
    """
    found = _presets().get(_short(name))
    if found is None:
        near = get_close_matches(_short(name), preset_names(), n=3) or preset_names()
        raise ModelNotFound(f"no configuration is called {name!r}; known are {', '.join(near)}")
    return deepcopy(found)


def _short(name: str) -> str:
    """Return a model's name. From a hub id, leave out who published the model and how it was tuned."""
    name = name.lower()
    if not _HUB_ID.match(name):
        return name
    return "-".join(word for word in name.partition("/")[2].split("-") if word not in _TUNED)
