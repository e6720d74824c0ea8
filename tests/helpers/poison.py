"""NaN in all of an arena that a request was not given, and KV that is found in one tier alone."""

from __future__ import annotations

from typing import Any

import torch

from keepwarm import Engine
from keepwarm.pipeline import prefix_loader
from keepwarm.runtime.arena.arena import Arena

_place = prefix_loader.place


def poisoned(plan: Any, tokens: Any, arena: Arena, load: Any) -> dict[str, int]:
    """As `place`, into an arena that is NaN behind what it holds already."""
    there = max((ref.end for span in plan.loads for ref in span.refs if ref.tier == "device"), default=0)
    arena.seek(there)
    for layer in arena.layers:
        for kv in (0, 1):
            plane = layer.plane(kv)
            heads, capacity, dim = plane.shape
            with torch.inference_mode():
                plane.put(there, torch.full((heads, capacity - there, dim), torch.nan, dtype=plane.dtype))
    return _place(plan, tokens, arena, load)


def drop(engine: Engine, tier: str) -> None:
    """Have the next request find what is stored in a tier, and nowhere nearer."""
    engine.flush()
    if tier != "device":
        engine.pipeline.pool.forget()
    if tier == "disk":
        engine.pipeline.archive.clear_ram()
