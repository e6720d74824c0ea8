"""A tiny model on the Triton decoder, under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tests.helpers.lean_families import LEAN, lean_family, unlike
from tests.helpers.models import tiny

from keepwarm.core.blocks import token_ids
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.device import DevicePort
from keepwarm.runtime.device.host import HostPort
from keepwarm.runtime.gpu_kernels.decoder import TritonDecoder
from keepwarm.runtime.probe import probe
from keepwarm.runtime.runner import Runner

SMALL = 640  # token ids


class OnTriton:
    """A tiny model with its decoder, and arenas to run sequences in."""

    def __init__(
        self, family: str, dtype: torch.dtype = torch.float32, port: DevicePort | None = None, **changes: Any
    ) -> None:
        if family in LEAN:
            self.model = lean_family(family, dtype, **changes)
        else:
            self.model = unlike(tiny(family, dtype, vocab_size=SMALL, **changes))
        self.port = port or HostPort()
        kept = probe(Runner(self.model, None))
        self.geometry, self.form = kept.geometry, kept.form
        self.decoder = TritonDecoder(self.model, [layer.window for layer in self.geometry.layers])

    def arena(self, length: int) -> Arena:
        return Arena(self.geometry, length, self.port, form=self.form)

    def run(self, ids: Sequence[int], cuts: Sequence[int] = (), arena: Arena | None = None) -> torch.Tensor:
        """The logits of all rows, from steps that end at `cuts` and at the end."""
        there = arena or self.arena(len(ids))
        rows = []
        with torch.inference_mode():
            for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
                step = token_ids(ids[start:end])
                sequence, wanted = there.sequenced(end), range(end - start)
                rows.append(self.decoder.step([step], [start], [sequence], wanted, there.arriving))
                there.advance(end)
        return torch.cat(rows)

    def alone(self, ids: Sequence[int], wanted: Sequence[int], decoder: TritonDecoder | None = None) -> torch.Tensor:
        """The logits of some rows of one step."""
        arena = self.arena(len(ids))  # it keeps the memory
        with torch.inference_mode():
            return (decoder or self.decoder).step([token_ids(ids)], [0], [arena.sequenced()], wanted, arena.arriving)

    def in_float64(self, ids: Sequence[int]) -> torch.Tensor:
        """Transformers' own eager attention in float64."""
        reference = type(self.model)(self.model.config).double().eval()
        reference.load_state_dict({name: tensor.double() for name, tensor in self.model.state_dict().items()})
        reference.config._attn_implementation = "eager"
        with torch.inference_mode():
            found: torch.Tensor = reference(torch.tensor([list(ids)])).logits[0]
        return found


def kept(arena: Arena, length: int) -> list[torch.Tensor]:
    """The keys and values of each layer."""
    return [layer.plane(kv).tensor()[:, :length].clone() for layer in arena.layers for kv in (0, 1)]
