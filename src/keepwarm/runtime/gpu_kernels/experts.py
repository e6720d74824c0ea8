"""Launches the kernels of experts: see `routes`. The host reads nothing on the way, and grids depend on the number of
rows alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from keepwarm.runtime.gpu_kernels import routes
from keepwarm.runtime.gpu_kernels.launch import WHOLE, Launch, tiled
from keepwarm.runtime.native.blocks import Blocks
from keepwarm.runtime.native.description import ACTIVATIONS, Experts, Linear, Mlp

_RESULTS = 256 << 20  # bytes of experts' results that are in memory at the same time
_PAIRS = 1024  # that a program looks through at once
_SUMMED = 1024  # numbers of a row that a program sums


@dataclass(frozen=True)
class Routes:
    """The experts of some rows. Each row has `chosen` pairs, whose results are multiplied by `shares`. `order` has the
    pairs by expert. A tile, a row of `tiles`, is an expert and the range of some of its pairs there; some are empty."""

    chosen: int
    shares: torch.Tensor
    order: torch.Tensor
    tiles: torch.Tensor


@dataclass(frozen=True)
class Mixture:
    """The experts of one model. `alpha` and `limit`: see `Description`."""

    launch: Launch
    alpha: float
    limit: float
    results: int = _RESULTS

    def mixed(self, h: torch.Tensor, experts: Experts, own: Mlp | None) -> torch.Tensor:
        """Return what a layer's experts and its own MLP give for normed rows, as float32. Rows whose results do not fit
        are taken in several goes."""
        y = torch.empty(h.shape, dtype=torch.float32, device=h.device)
        most = max(1, self.results // (4 * experts.chosen * h.shape[1]))
        for at in range(0, len(h), most):
            self._mix(h[at : at + most], experts, own, y[at : at + most])
        return y

    def _mix(self, h: torch.Tensor, experts: Experts, own: Mlp | None, y: torch.Tensor) -> None:
        launch = self.launch
        found = self.routed(h, experts)
        results = self._narrow(self._widen(h, experts.all, found), experts.all.down, found)
        beside = None if own is None else launch.product(launch.widen(h, own), own.down)
        gate = None if own is None or experts.gate is None else launch.product(h, Linear(experts.gate))
        rows, width = h.shape
        routes.collect[rows, -(-width // _SUMMED)](
            results,
            found.shares,
            beside,
            gate,
            y,
            width,
            CHOSEN=found.chosen,
            OWN=beside is not None,
            GATED=gate is not None,
            BLOCK=_SUMMED,
            **WHOLE,
        )

    def routed(self, h: torch.Tensor, experts: Experts) -> Routes:
        """Choose the experts of normed rows. Scores are sums of float32, and not rounded."""
        scores = self.launch.product(h, experts.router)
        (rows, count), tile = scores.shape, self.launch.tiles.base.rows
        chosen, pairs = experts.chosen, rows * experts.chosen
        most, size = _most_tiles(pairs, count, tile), routes.TILE.value
        numbers = torch.zeros(size * most + count, dtype=torch.int64, device=h.device)
        tiles, counts = numbers[: size * most], numbers[size * most :]
        every, order = (torch.empty(pairs, dtype=torch.int64, device=h.device) for _ in range(2))
        shares = torch.empty(pairs, dtype=torch.float32, device=h.device)
        lanes = triton.next_power_of_2(count)
        how = {"LANES": lanes, "num_warps": 1 if lanes <= 256 else 4} | WHOLE
        routes.choose[(rows,)](scores, counts, every, shares, count, CHOSEN=chosen, OVER_ALL=experts.over_all, **how)
        routes.group[(count,)](every, counts, order, tiles, pairs, ROWS=tile, BLOCK=_PAIRS, **how | {"num_warps": 4})
        return Routes(chosen, shares, order, tiles.view(most, size))

    def _widen(self, h: torch.Tensor, mlp: Mlp, found: Routes) -> torch.Tensor:
        """Return the first half of each pair's expert, in the model's type."""
        assert mlp.gate is not None  # as `checks` says
        up, bias = _weight(mlp.up), mlp.up.bias
        _, out, depth = up.shape
        apart, across, along = up.stride()
        bias_apart, bias_across = (0, 0) if bias is None else bias.stride()
        y = torch.empty(len(found.order), out, dtype=self.launch.dtype, device=h.device)
        tile = self.launch.tiles.of_all(out, 2)
        routes.widen[len(found.tiles), -(-out // tile.columns)](
            h,
            up,
            mlp.gate.weight,
            bias,
            mlp.gate.bias,
            y,
            found.order,
            found.tiles,
            out,
            depth,
            apart,
            bias_apart,
            self.alpha,
            self.limit,
            CHOSEN=found.chosen,
            KIND=ACTIVATIONS[mlp.activation],
            BIASED=bias is not None,
            ACROSS=across,
            ALONG=along,
            BIAS_ACROSS=bias_across,
            **self.launch.rounds,
            **tiled(tile),
        )
        return y

    def _narrow(self, x: torch.Tensor, by: Linear, found: Routes) -> torch.Tensor:
        """Return the second half of each pair's expert, as float32."""
        weight, bias = _weight(by), by.bias
        _, out, depth = weight.shape
        apart, across, along = weight.stride()
        y = torch.empty(len(x), out, dtype=torch.float32, device=x.device)
        tile = self.launch.tiles.of_all(out)
        routes.narrow[len(found.tiles), -(-out // tile.columns)](
            x,
            weight,
            bias,
            y,
            found.order,
            found.tiles,
            out,
            depth,
            apart,
            0 if bias is None else bias.stride(0),
            BIASED=bias is not None,
            ACROSS=across,
            ALONG=along,
            **tiled(tile),
        )
        return y


def _most_tiles(pairs: int, count: int, tile: int) -> int:
    """Return the most tiles that so many pairs of `count` experts can have, whatever is chosen."""
    return (pairs + min(pairs, count) * (tile - 1)) // tile


def _weight(by: Linear) -> torch.Tensor:
    assert not isinstance(by.weight, Blocks)  # as `checks` says
    return by.weight
