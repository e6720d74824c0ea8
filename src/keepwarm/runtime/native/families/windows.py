"""Says to which positions a layer's rows attend. The masks of transformers' model code decide that. A cache may be made
from other settings, and a module may name a window that no mask has."""

from __future__ import annotations

from typing import Any

Windows = tuple[int | None, ...]


def none(model: Any) -> Windows:
    """Return windows for code that makes one mask, without a window even if the configuration names one."""
    return (None,) * len(model.model.layers)


def in_all(model: Any) -> Windows:
    """Return windows for code that makes one mask, with the configuration's window if it names one."""
    return (model.config.sliding_window,) * len(model.model.layers)


def by_type(model: Any) -> Windows:
    """Return windows for code that makes a mask for each type of layer."""
    window = model.config.sliding_window
    return tuple(window if kind == "sliding_attention" else None for kind in model.config.layer_types)
