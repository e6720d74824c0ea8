"""JSON in another order."""

from __future__ import annotations

import random
from typing import Any


def shuffled(value: Any, rng: random.Random) -> Any:
    """The same JSON with the keys of its objects, and `required`, in another order."""
    if isinstance(value, dict):
        keys = list(value)
        rng.shuffle(keys)
        copied = {key: shuffled(value[key], rng) for key in keys}
        if isinstance(copied.get("required"), list):
            rng.shuffle(copied["required"])
        return copied
    return [shuffled(item, rng) for item in value] if isinstance(value, list) else value
