"""A loaded LoRA adapter, as a request carries it through all stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class Lora:
    """A LoRA adapter. Requests that began with it keep it, even if another one gets its name meanwhile."""

    name: str  # by which requests ask for it; it is in no identity
    digest: str  # of its weights and scales: part of the model's identity
    packed: Any = field(repr=False)  # its weights, as the kernels read them (`runtime.native.low_rank`)
