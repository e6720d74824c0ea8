"""Compares all tiles of products on a device, to the bit, when a model is loaded."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from keepwarm.runtime.gpu_kernels.launch import Launch
from keepwarm.runtime.gpu_kernels.tiles import Sizes, Tile
from keepwarm.runtime.native.description import Linear, Mlp

log = logging.getLogger(__name__)

_SHAPE = 140, 272, 1040  # rows, columns and depth: no whole number of large tiles, but multiples of 16 as in models
_COMPILED = 8  # at once


def checked(launch: Launch, activation: str, device: torch.device, *, gated: bool = True) -> Launch:
    """Return kernels whose tiles all give the same bits on a device. A tile that does not run there makes way for the
    base. If a bit differs, the number of rows decides nothing any more. `activation` is that of the model's MLPs, and
    `gated` tells whether all have a gate."""
    if launch.tiles.sizes is None:
        return launch
    one, two = launch.tiles.sizes
    case = _Case.of(launch, activation, device, gated)
    every = [(tile, weights) for weights, sizes in ((1, one), (2, two)) for tile in dict.fromkeys(sizes)]
    with ThreadPoolExecutor(_COMPILED) as threads:
        failed = {each for each, works in zip(every, threads.map(case.works, every), strict=True) if not works}
    base = launch.tiles.base
    for tile, weights in every:
        if (tile, weights) in failed:
            continue
        if not all(map(torch.equal, case.run(tile, weights), case.run(base, weights))):
            log.warning(
                "products have other bits in other tiles (%s) on %s, so all take one tile, which is slower",
                *(tile, device),
            )
            return replace(launch, tiles=replace(launch.tiles, sizes=None))

    def working(sizes: Sizes, weights: int) -> Sizes:
        return tuple(base if (tile, weights) in failed else tile for tile in sizes)

    return replace(launch, tiles=replace(launch.tiles, sizes=(working(one, 1), working(two, 2))))


@dataclass(frozen=True)
class _Case:
    """Rows, and weights to multiply them with."""

    launch: Launch
    device: torch.device
    x: torch.Tensor
    weights: tuple[torch.Tensor, torch.Tensor]
    activation: str
    gated: bool

    @classmethod
    def of(cls, launch: Launch, activation: str, device: torch.device, gated: bool) -> _Case:
        rows, columns, depth = _SHAPE
        made = torch.randn(rows + 2 * columns, depth, generator=torch.Generator().manual_seed(0))
        x, up, gate = made.to(device, launch.dtype).split([rows, columns, columns])
        return cls(launch, device, x, (up, gate), activation, gated)

    def run(self, tile: Tile, weights: int) -> list[torch.Tensor]:
        """Return the results of products with so many weights side by side."""
        sizes = (tile,) * 5
        only = replace(self.launch, tiles=replace(self.launch.tiles, sizes=(sizes, sizes)))
        up, gate = map(Linear, self.weights)
        if weights == 2:
            return [only.widen(self.x, Mlp(up, up, self.activation, gate))]
        plain = [] if self.gated else [only.widen(self.x, Mlp(up, up, self.activation))]
        return [only.product(self.x, up), *plain]

    def works(self, which: tuple[Tile, int]) -> bool:
        """Whether a tile can be compiled and launched. This may be called from any thread."""
        try:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                self.run(*which)
        except Exception as error:  # those of Triton's compiler have no type in common
            log.info("products take no tiles of %s here: %s", which[0], error)
            return False
        return True
