"""Published configurations by name, cut down to the fields that shape the KV: sizes without weights."""

from __future__ import annotations

import json
from copy import deepcopy
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from keepwarm.errors import ModelNotFound


@cache
def _presets() -> dict[str, dict[str, Any]]:
    text = files(__package__).joinpath("presets.json").read_text(encoding="utf-8")
    loaded: dict[str, dict[str, Any]] = json.loads(text)
    return loaded


def preset_names() -> tuple[str, ...]:
    """The known names, sorted."""
    return tuple(sorted(_presets()))


def preset(name: str) -> dict[str, Any]:
    """The configuration called `name` (in any case), ready for `geometry_of`; a `note` says what it leaves out.

    Raises ModelNotFound naming the nearest known names.
    """
    found = _presets().get(name.lower())
    if found is None:
        near = get_close_matches(name.lower(), preset_names(), n=3) or preset_names()
        raise ModelNotFound(f"no configuration is called {name!r}; known are {', '.join(near)}")
    return deepcopy(found)
