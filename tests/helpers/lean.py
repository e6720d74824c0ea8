"""A tiny model on the lean decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tests.helpers.lean_families import lean_family, unlike
from tests.helpers.models import FAMILIES, tiny

from keepwarm.core.blocks import token_ids
from keepwarm.core.geometry import KVGeometry
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.device.host import HostPort
from keepwarm.runtime.native import build
from keepwarm.runtime.native.decoder import LeanDecoder
from keepwarm.runtime.native.places import Sequenced
from keepwarm.runtime.probe import probe
from keepwarm.runtime.runner import Runner

LENGTH = 700  # more than one part of 512 positions


compiled = build.kernels()


def windows(geometry: KVGeometry) -> list[int | None]:
    return [layer.window for layer in geometry.layers]


class Lean:
    """A tiny model with its lean decoder, and arenas to run sequences in."""

    def __init__(
        self, family: str, dtype: torch.dtype, kernels: build.Kernels | None = compiled, **changes: Any
    ) -> None:
        assert kernels is not None
        self.kernels = kernels
        self.model = (
            unlike(tiny(family, dtype, **changes)) if family in FAMILIES else lean_family(family, dtype, **changes)
        )
        kept = probe(Runner(self.model, None))
        self.geometry = kept.geometry
        self.decoder = LeanDecoder(self.model, kernels, windows(self.geometry))
        self.form = replace(kept.form, kernel_states=self.decoder.states)

    def arena(self) -> Arena:
        return Arena(self.geometry, LENGTH + 68, HostPort(), form=self.form)

    def sequenced(self, arena: Arena) -> Sequenced:
        return arena.sequenced()

    def run(self, ids: Sequence[int], cuts: Sequence[int], arena: Arena, wanted: Sequence[int] = (-1,)) -> torch.Tensor:
        """Logits of the `wanted` rows of the last of the steps that end at `cuts` and at the end."""
        for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
            rows = [(end - start + row) % (end - start) for row in wanted] if end == len(ids) else []
            step = token_ids(ids[start:end])
            logits = self.decoder.step([step], [start], [self.sequenced(arena)], rows)
        return logits


def prompt(count: int, seed: int) -> list[int]:
    """Token ids of the embedded model's vocabulary."""
    return np.random.default_rng(seed).integers(3, 49000, count).tolist()
