"""Launches the kernels on tensors of one device.

`enable_fp_fusion` is off, so that a sum has the same bits wherever the compiler meets it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from keepwarm.runtime.gpu_kernels import attention, products, rows
from keepwarm.runtime.gpu_kernels.plan import JOB
from keepwarm.runtime.gpu_kernels.tiles import INTERPRETED, Tile, Tiles
from keepwarm.runtime.native.description import ACTIVATIONS, Linear, Mlp, Norm

WHOLE = {"enable_fp_fusion": False}
_MOVED = 32  # rows that a program copies at once
_EMBEDDED = 1024  # numbers that a program copies


@dataclass(frozen=True)
class Launch:
    """The kernels for one model: rows of type `dtype`, norms that subtract the mean if `centred`."""

    dtype: torch.dtype
    centred: bool
    tiles: Tiles

    @property
    def rounds(self) -> dict[str, Any]:
        return {"ROUND": INTERPRETED and self.dtype is torch.bfloat16}

    def embed(self, tokens: torch.Tensor, table: torch.Tensor, factor: float) -> torch.Tensor:
        out = torch.empty(len(tokens), table.shape[1], dtype=torch.float32, device=table.device)
        self._embed(tokens, table, out, factor)
        return out

    def compiled(self, table: torch.Tensor) -> str:
        """Return Triton's name of a compiled kernel. It names what decides the machine code of all kernels: Triton's
        build, the tools that it compiles with, the device's architecture, and variables of the environment. `table` is
        that of embeddings."""
        if INTERPRETED:
            return "interpreted"
        token = torch.zeros(1, dtype=torch.int64, device=table.device)
        out = torch.empty(1, table.shape[1], dtype=torch.float32, device=table.device)
        return str(self._embed(token, table, out, 1.0).hash)

    @staticmethod
    def _embed(tokens: torch.Tensor, table: torch.Tensor, out: torch.Tensor, factor: float) -> Any:
        """Launch the kernel, and return it compiled."""
        grid = len(tokens), -(-table.shape[1] // _EMBEDDED)
        return rows.embed[grid](tokens, table, out, table.shape[1], factor, BLOCK=_EMBEDDED, **WHOLE)

    def norm(self, x: torch.Tensor, by: Norm | None) -> torch.Tensor:
        """Return rows as products take them, normed if there is a norm."""
        if by is None:
            return x.to(self.dtype)
        y = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        self._norm(x, by, y, self.rounds["ROUND"])
        return y

    def norm_in_place(self, x: torch.Tensor, by: Norm) -> None:
        """Norm float32 rows, which may be part of wider ones."""
        self._norm(x, by, x, False)

    def _norm(self, x: torch.Tensor, by: Norm, y: torch.Tensor, rounds: bool) -> None:
        width = x.shape[1]
        rows.norm[(len(x),)](
            x,
            by.weight,
            by.bias,
            y,
            width,
            x.stride(0),
            y.stride(0),
            by.epsilon,
            CENTRED=self.centred,
            BIASED=by.bias is not None,
            ROUND=rounds,
            **_row(width),
        )

    def add(self, x: torch.Tensor, more: torch.Tensor, by: Norm | None, factor: float) -> None:
        """Add rows, normed if there is a norm, times `factor`, to `x`."""
        width = x.shape[1]
        rows.add[(len(x),)](
            x,
            more,
            None if by is None else by.weight,
            None if by is None else by.bias,
            width,
            factor,
            0.0 if by is None else by.epsilon,
            NORMED=by is not None,
            CENTRED=self.centred,
            BIASED=by is not None and by.bias is not None,
            **_row(width),
        )

    def product(self, x: torch.Tensor, by: Linear, y: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32 `[rows, out]`, written to `y`, which may be part of wider rows."""
        if y is None:
            y = torch.empty(len(x), by.weight.shape[0], dtype=torch.float32, device=x.device)
        return self._product(x, by, y, {"LOGITS": False, "CAPPED": False})

    def logits(self, x: torch.Tensor, head: torch.Tensor, factor: float, cap: float) -> torch.Tensor:
        """Return float32 logits, rounded to the model's type."""
        y = torch.empty(len(x), len(head), dtype=torch.float32, device=x.device)
        return self._product(x, Linear(head), y, {"LOGITS": True, "CAPPED": cap != 0} | self.rounds, factor, cap)

    def _product(
        self, x: torch.Tensor, by: Linear, y: torch.Tensor, how: dict[str, bool], factor: float = 1.0, cap: float = 0.0
    ) -> torch.Tensor:
        out, depth = by.weight.shape
        tile = self.tiles.of_rows(len(x), out)
        products.product[tile.grid(len(x), out)](
            x,
            by.weight,
            by.bias,
            y,
            len(x),
            out,
            depth,
            y.stride(0),
            factor,
            cap,
            BIASED=by.bias is not None,
            **({"ROUND": False} | how),
            **tiled(tile),
        )
        return y

    def widen(self, x: torch.Tensor, mlp: Mlp) -> torch.Tensor:
        """Return the first half of an MLP, in the model's type."""
        out, depth = mlp.up.weight.shape
        gate = mlp.gate
        y = torch.empty(len(x), out, dtype=self.dtype, device=x.device)
        tile = self.tiles.of_rows(len(x), out, 1 if gate is None else 2)
        products.widen[tile.grid(len(x), out)](
            x,
            mlp.up.weight,
            None if gate is None else gate.weight,
            mlp.up.bias,
            None if gate is None else gate.bias,
            y,
            len(x),
            out,
            depth,
            KIND=ACTIVATIONS[mlp.activation],
            GATED=gate is not None,
            BIASED=mlp.up.bias is not None,
            GATE_BIASED=gate is not None and gate.bias is not None,
            **self.rounds,
            **tiled(tile),
        )
        return y


def tiled(tile: Tile) -> dict[str, Any]:
    """Return how a product is compiled for a tile."""
    return {"BY_HAND": INTERPRETED} | tile.options | WHOLE


def _row(width: int) -> dict[str, Any]:
    """Return how a program takes a whole row."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": 4 if block <= 4096 else 8} | WHOLE


def attending(dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return how attention is compiled. Two stages of wide heads need more shared memory than many GPUs have."""
    stages = 2 if dim * dtype.itemsize <= 256 else 1
    return {"num_warps": 8 if dim > 128 else 4, "num_stages": stages} | WHOLE


@dataclass(frozen=True)
class Heads:
    """The kernels of attention, for the shape of one model's heads."""

    launch: Launch
    heads: int
    kv_heads: int
    dim: int
    rotary: int
    interleaved: bool
    wide: bool
    scaling: float
    cap: float

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """The number of rows that a job of attention has at most."""
        return max(1, self.launch.tiles.lanes // self.group)

    @property
    def width(self) -> int:
        """Numbers of a row's queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.dim

    @property
    def _shape(self) -> dict[str, Any]:
        return {"KV_HEADS": self.kv_heads, "DIM": self.dim, "SIZE": self.launch.dtype.itemsize}

    def place(
        self,
        qkv: torch.Tensor,
        norms: tuple[Norm | None, Norm | None],
        tables: tuple[torch.Tensor, torch.Tensor] | None,
        positions: torch.Tensor,
        slots: torch.Tensor,
        regions: torch.Tensor,
        layer: int,
    ) -> torch.Tensor:
        """Norm and rotate queries and keys. Write keys and values to their slots, and return the queries, `[rows,
        heads, dim]`."""
        q, k = norms
        if q is not None and k is not None and self.wide:
            ends = self.heads * self.dim, (self.heads + self.kv_heads) * self.dim
            self.launch.norm_in_place(qkv[:, : ends[0]], q)
            self.launch.norm_in_place(qkv[:, ends[0] : ends[1]], k)
        each = q is not None and k is not None and not self.wide
        queries = torch.empty(len(qkv), self.heads, self.dim, dtype=self.launch.dtype, device=qkv.device)
        cosine, sine = (None, None) if tables is None else tables
        attention.place[len(qkv), self.heads + 2 * self.kv_heads](
            qkv,
            queries,
            positions,
            cosine,
            sine,
            q.weight if q is not None and each else None,
            k.weight if k is not None and each else None,
            slots,
            regions,
            layer,
            q.epsilon if q is not None else 0.0,
            HEADS=self.heads,
            ROTARY=self.rotary,
            INTERLEAVED=self.interleaved,
            ROTATED=tables is not None,
            NORMED=each,
            CENTRED=self.launch.centred,
            num_warps=1,
            **self._shape,
            **self.launch.rounds,
            **WHOLE,
        )
        return queries

    def attend(
        self,
        queries: torch.Tensor,
        positions: torch.Tensor,
        members: torch.Tensor,
        jobs: torch.Tensor,
        pages: torch.Tensor,
        regions: torch.Tensor,
        cells: torch.Tensor,
        results: tuple[torch.Tensor, ...],
        layer: int,
        window: int | None,
    ) -> None:
        """Compute the results of jobs. All programs take as many queries: a row's weights are summed in an order that
        depends on it."""
        attention.attend[len(jobs) // JOB, self.kv_heads](
            queries,
            positions,
            members,
            jobs,
            pages,
            regions,
            cells,
            *results,
            layer,
            window or 0,
            self.scaling,
            self.cap,
            HEADS=self.heads,
            GROUP=self.group,
            WINDOWED=window is not None,
            CAPPED=self.cap != 0,
            BY_HAND=INTERPRETED,
            LANES=self.launch.tiles.lanes,
            **self._shape,
            **self.launch.rounds,
            **attending(self.dim, self.launch.dtype),
        )

    def merge(
        self,
        results: tuple[torch.Tensor, ...],
        sinks: torch.Tensor | None,
        chosen: torch.Tensor,
        positions: torch.Tensor,
        cells: torch.Tensor,
        out: torch.Tensor,
        window: int | None,
    ) -> None:
        """Merge the results of each `chosen` row into its row of `out`."""
        attention.merge[len(chosen), self.heads](
            *results,
            sinks,
            chosen,
            positions,
            cells,
            out,
            window or 0,
            HEADS=self.heads,
            DIM=self.dim,
            WINDOWED=window is not None,
            SINKS=sinks is not None,
            num_warps=1,
            **self.launch.rounds,
            **WHOLE,
        )

    def move(self, moves: torch.Tensor, regions: torch.Tensor, like: torch.Tensor, layer: int, layers: int = 1) -> None:
        """Make moves in some layers. `like` is a tensor of the model's type."""
        grid = len(moves) // 3, 2 * self.kv_heads, layers
        attention.move[grid](moves, regions, like, layer, ROWS=_MOVED, num_warps=1, **self._shape, **WHOLE)
