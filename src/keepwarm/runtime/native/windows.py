"""Compares the windows of a model's masks with those of its cache."""

from __future__ import annotations

from collections.abc import Sequence

from keepwarm.runtime.native.description import Description
from keepwarm.runtime.native.places import UNIT


def differing(found: Description, windows: Sequence[int | None]) -> str:
    """Return why a described model cannot use a cache with these `windows`, those of its layers with keys and values,
    in positions; empty if it can. None stands for all positions."""
    if any(window is not None and window < UNIT for window in windows):
        return f"a window of fewer than {UNIT} positions"
    keeping = found.keeping
    apart = [each for each in zip(keeping, found.attended, windows, strict=False) if each[1] != each[2]]
    if len(windows) != len(keeping):
        return f"a cache of {len(windows)} layers with keys for a model of {len(keeping)}"
    return _told(*apart[0]) if apart else ""


def _told(layer: int, masked: int | None, kept: int | None) -> str:
    names = [f"{window} positions" if window else "all positions" for window in (masked, kept)]
    return f"layer {layer} attends to {names[0]}, and transformers' cache is made for {names[1]}"
