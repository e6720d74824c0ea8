"""A tiny model on the lean decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tests.helpers.models import tiny
from torch import nn

from keepwarm.core.blocks import token_ids
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.device.host import HostPort
from keepwarm.runtime.native import build
from keepwarm.runtime.native.decoder import LeanDecoder
from keepwarm.runtime.native.places import Sequenced
from keepwarm.runtime.probe import probe
from keepwarm.runtime.runner import Runner

LENGTH = 700  # more than one part of 512 positions


compiled = build.kernels()


class Lean:
    """A tiny model with its lean decoder, and arenas to run sequences in."""

    def __init__(
        self, family: str, dtype: torch.dtype, kernels: build.Kernels | None = compiled, **changes: Any
    ) -> None:
        assert kernels is not None
        self.model = tiny(family, dtype, **changes)
        if family == "qwen2":  # its biases begin as zeros
            for name, parameter in self.model.named_parameters():
                if name.endswith("bias"):
                    nn.init.normal_(parameter, std=0.2)
        self.decoder = LeanDecoder(self.model, kernels)
        self.geometry = probe(Runner(self.model, None)).geometry

    def arena(self) -> Arena:
        return Arena(self.geometry, LENGTH + 68, HostPort())

    def sequenced(self, arena: Arena) -> Sequenced:
        return arena.sequenced()

    def run(self, ids: Sequence[int], cuts: Sequence[int], arena: Arena, wanted: Sequence[int] = (-1,)) -> torch.Tensor:
        """Logits of the `wanted` rows of the last of the steps that end at `cuts` and at the end."""
        for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
            rows = [(end - start + row) % (end - start) for row in wanted] if end == len(ids) else []
            step = token_ids(ids[start:end])
            logits = self.decoder.step([step], [start], [self.sequenced(arena)], rows)
        return logits
