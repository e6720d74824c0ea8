"""Whether Triton's interpreter runs kernels here."""

from __future__ import annotations

import os
from importlib.util import find_spec

import numpy as np


def _why_not() -> str:
    if find_spec("triton") is None:
        return "Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "TRITON_INTERPRET is not 1, as it must be before Triton is imported"
    if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
        return "Triton's interpreter counts loops in a way that NumPy 2.4 no longer allows"
    return ""


WHY_NOT = _why_not()
