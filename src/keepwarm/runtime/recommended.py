"""How a model's makers recommend to choose its tokens."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from keepwarm.core.request import Decoding
from keepwarm.errors import ConfigError
from keepwarm.runtime.gguf.reader import Reader

log = logging.getLogger(__name__)

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_IN_GGUF = dict(zip(_NAMES, ("temp", "top_p", "top_k", "min_p", "penalty_repeat"), strict=True))


def recommended(config: Any) -> dict[str, float]:
    """Return what a generation config (`generation_config.json`, or None) names of `temperature`, `top_p`, `top_k`,
    `min_p` and `repetition_penalty`. A value that no request may have is left out, with a line in the log."""
    found: dict[str, float] = {}
    for name in _NAMES:
        value = getattr(config, name, None)
        if value is None or (name == "top_k" and value in (0, -1)):  # all tokens
            continue
        try:
            if name == "top_k" and not (isinstance(value, int | float) and value % 1 == 0):
                raise ConfigError(f"top_k must be a whole number, got {value!r}")
            value = int(value) if name == "top_k" else value
            asked: dict[str, Any] = {"temperature": 1.0, name: value}
            Decoding(**asked)
        except ConfigError as error:
            log.warning("the model's generation config is not followed: %s", error)
        else:
            found[name] = value
    return found


def recommended_in(reader: Reader) -> dict[str, float]:
    """Return what a GGUF file's metadata (`general.sampling`, as llama.cpp reads it) names, as a generation config
    calls it. The file's numbers have 32 bits; 0.95 is meant to be 0.95."""
    told = {name: reader.value(f"general.sampling.{key}") for name, key in _IN_GGUF.items()}
    if reader.value("general.sampling.penalty_last_n") == 0:  # of no token
        del told["repetition_penalty"]
    return {
        name: float(str(np.float32(value))) if isinstance(value, float) else value
        for name, value in told.items()
        if isinstance(value, int | float)
    }
