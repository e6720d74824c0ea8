"""Random keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np

from keepwarm.core.codecs import narrow


def raw(tokens: int, dim: int, dtype: str, heads: int = 2, seed: int = 0, spread: float = 3.0) -> Any:
    rng = np.random.default_rng(seed)
    values = rng.normal(0, spread, (heads, tokens, dim)) * rng.uniform(0.1, 4, dim) + rng.normal(0, 2, dim)
    return narrow(values.astype(np.float32), dtype)
