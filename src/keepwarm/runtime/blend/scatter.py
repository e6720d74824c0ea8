"""Forward passes over tokens at any positions of a sequence whose other keys and values are in place.

Each row writes its key and value at its position and attends to all positions up to its own: those of the same pass and
those that the arena holds. It costs as much as the same number of rows in an ordinary step.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from keepwarm.core.blocks import TokenIds
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.native.build import CHUNKS, LANES, compiled, done
from keepwarm.runtime.runner import ROWS, Runner
from keepwarm.runtime.stepping import Decoder

Positions = npt.NDArray[np.int64]


class _Seen(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "queries", "positions", "mass")),
        *((name, ctypes.c_int64) for name in ("key_head", "query_row", "total")),
        *((name, ctypes.c_int32) for name in ("rows", "heads", "kv_heads", "dim", "itemsize")),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True)
class Watch:
    """Gathers the attention of the last rows of a pass, over all heads of each layer from `first` on."""

    mass: torch.Tensor  # sum of probabilities by layer and position, `[layers, T]`, float32
    positions: Positions  # of those rows
    first: int = 0

    def see(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, scale: float, *, native: bool = True) -> None:
        """Add a layer's attention. `queries` are those of the pass, `[S, heads, dim]`; `keys` `[kv_heads, T, dim]`."""
        queries = queries[-len(self.positions) :]
        if layer < self.first or (native and self._seen(layer, queries, keys, scale)):
            return
        rows, heads, dim = queries.shape
        folded = queries.float().transpose(0, 1).reshape(len(keys), -1, dim) @ keys.float().transpose(1, 2)
        scores = folded.reshape(heads, rows, -1) * scale
        last = torch.from_numpy(self.positions).to(keys.device)
        hidden = torch.arange(scores.shape[-1], device=keys.device) > last[:, None]
        self.mass[layer, : scores.shape[-1]] += scores.masked_fill(hidden, float("-inf")).softmax(-1).sum((0, 1))

    def _seen(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, scale: float) -> bool:
        """Do what `see` does with the compiled kernel. Return False if it does not support the layer."""
        rows, heads, dim = queries.shape
        kv_heads, total, _ = keys.shape
        if (
            keys.device.type != "cpu"
            or keys.dtype not in (torch.bfloat16, torch.float32)
            or queries.dtype is not torch.float32
            or keys.stride()[1:] != (dim, 1)
            or queries.stride()[1:] != (dim, 1)
            or dim % LANES
        ):
            return False
        kernels = compiled(CHUNKS)
        if kernels is None:
            return False
        seen = _Seen(
            keys.data_ptr(),
            queries.data_ptr(),
            self.positions.ctypes.data,
            self.mass[layer].data_ptr(),
            keys.stride(0),
            queries.stride(0),
            total,
            rows,
            heads,
            kv_heads,
            dim,
            keys.itemsize,
            scale * math.log2(math.e),
        )
        done(kernels.library.keepwarm_see(ctypes.byref(seen), torch.get_num_threads()))
        return True


class _Reached(Exception):
    """Ends a forward pass of transformers after the last wanted layer; there is no other way to end it."""


class _RowsLayer(CacheLayerMixin):
    """One layer of an arena, written at the given positions and read from the beginning."""

    is_sliding = False

    def __init__(self, arena: Arena, layer: int, positions: torch.Tensor, end: int, last: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        there = arena.layers[layer]
        there.materialize()
        self._planes = there.plane(0), there.plane(1)
        self._positions = positions
        self._end = end
        self._last = last
        self.dtype, self.device = there.dtype, there.device
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the memory is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._planes
        keys.scatter(self._positions, key_states[0])
        values.scatter(self._positions, value_states[0])
        if self._last:
            raise _Reached
        return keys.tensor()[None, :, : self._end], values.tensor()[None, :, : self._end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._end, 0

    def get_seq_length(self) -> int:
        return self._end

    def get_max_length(self) -> int:
        return -1


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    keepwarm_watch: Watch | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Implement transformers' attention interface with a mask `[1, 1, S, T]`; grouped queries are folded into rows.

    `keepwarm_watch` gathers how much the last rows attend to each position.
    """
    if given := [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]:
        raise ValueError(f"{ROWS} does not compute {', '.join(given)}")
    assert attention_mask is not None
    _, heads, rows, dim = query.shape
    kv_heads, total = key.shape[1], key.shape[2]
    groups = heads // kv_heads
    scale = dim**-0.5 if scaling is None else scaling
    if keepwarm_watch is not None:
        keepwarm_watch.see(getattr(module, "layer_idx", 0), query[0].transpose(0, 1), key[0], scale)
    folded = query.reshape(1, kv_heads, groups * rows, dim)
    mask = attention_mask.expand(1, groups, rows, total).reshape(1, 1, groups * rows, total)
    out = torch.nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    return out.reshape(1, heads, rows, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(ROWS, _attention)


class Rows:
    """Runs rows of one sequence on one model, through the lean decoder if there is one."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def run(
        self,
        tokens: TokenIds,
        positions: Positions,
        arena: Arena,
        *,
        logits: bool = False,
        layers: int | None = None,
        watch: Watch | None = None,
    ) -> torch.Tensor | None:
        """Run `tokens` at rising `positions`. With `logits`, return those after the last token, `[vocab]`.

        `layers` ends the pass once the keys and values of that many layers are in place. `watch` gathers attention.
        Raises UnsupportedModel when a model's attention cannot be watched.
        """
        runner = self._runner
        if runner.lean is not None and not runner.model.training:
            return self._lean(runner.lean, tokens, positions, arena, logits, layers, watch)
        end = int(positions[-1]) + 1
        where = torch.from_numpy(positions).to(runner.device)
        count = len(arena.layers) if layers is None else layers
        cache = Cache(
            layers=[_RowsLayer(arena, at, where, end, layers is not None and at + 1 == count) for at in range(count)]
        )
        dtype = runner.model.dtype
        hidden = torch.arange(end, device=runner.device)[None] > where[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=runner.device).masked_fill_(hidden, torch.finfo(dtype).min)
        extra: dict[str, Any] = {} if watch is None else {"keepwarm_watch": watch}
        try:
            return runner.run_rows(tokens, where, cache, mask[None, None], logits, extra)
        except _Reached:
            return None

    def _lean(
        self,
        lean: Decoder,
        tokens: TokenIds,
        positions: Positions,
        arena: Arena,
        logits: bool,
        layers: int | None,
        watch: Watch | None,
    ) -> torch.Tensor | None:
        end = int(positions[-1]) + 1

        def see(layer: int, queries: torch.Tensor) -> None:
            assert watch is not None
            there = arena.layers[layer]
            there.materialize()
            watch.see(layer, queries, there.plane(0).tensor()[:, :end], lean.scaling)

        with self._runner.lock, torch.inference_mode():
            wanted = [len(tokens) - 1] if logits else []
            arena.in_turn()
            sequence = arena.sequenced()
            out = lean.rows(tokens, positions, sequence, wanted, layers, see if watch is not None else None)
        return out[0] if logits else None
