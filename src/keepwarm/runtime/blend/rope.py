"""Moves cached keys to other positions while chunks are placed. Arithmetic is float32, whatever the KV's dtype.

`core.rope` is the reference. A check runs the model itself to see whether its keys move as its configuration says.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from keepwarm.core.blocks import token_ids
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.plan import Relocate
from keepwarm.core.ports import BlockCodec, Bytes, KVSink
from keepwarm.core.reads import Arriving
from keepwarm.core.rope import Rotary, rotaries
from keepwarm.errors import UnsupportedModel
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.arena.form import PLAIN, CacheForm
from keepwarm.runtime.device.plane import Plane
from keepwarm.runtime.native.build import CHUNKS, LANES, compiled, done

if TYPE_CHECKING:
    from keepwarm.runtime.runner import Runner

_PLANES = np.dtype(
    [(name, "<i8") for name in ("from", "to", "from_head", "to_head", "cosine", "sine")]
    + [(name, "<i4") for name in ("heads", "dim", "pairs", "padding")]
)
_TOGETHER = 16 << 20  # about this many bytes of KV are put in place by one call
_TEXTS = 3  # that the check tries
_TRIED = 4  # tokens of each
_MOVED = 37  # positions by which it moves them
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.08}  # of the largest key


def turned(
    keys: torch.Tensor, into: torch.Tensor, rotary: Rotary, cosine: torch.Tensor, sine: torch.Tensor
) -> torch.Tensor:
    """Rotate keys `[..., n, key_dim]` by angles given as cosines and sines (`[pairs]` or `[n, pairs]`). Write them into
    other memory, in its dtype, and return that."""
    first, second = rotary.pairs
    a, b = keys[..., first].float(), keys[..., second].float()
    into.copy_(keys)  # other dimensions are not rotated
    into[..., first] = torch.addcmul(a * cosine, b, sine, value=-1)
    into[..., second] = torch.addcmul(b * cosine, a, sine)
    return into


class Turn:
    """Rotates keys further by `delta` positions: `[..., n, key_dim]`, any floating dtype."""

    def __init__(self, rotary: Rotary, delta: int, device: torch.device) -> None:
        angles = delta * np.asarray(rotary.frequencies)
        self.cosine, self.sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.rotary = rotary
        self._cosine, self._sine = torch.from_numpy(self.cosine).to(device), torch.from_numpy(self.sine).to(device)

    def __call__(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the rotated keys, in the same dtype."""
        return turned(keys, torch.empty_like(keys), self.rotary, self._cosine, self._sine)


class Relocator:
    """Makes sinks that rotate a model's keys as they are loaded."""

    def __init__(self, runner: Runner, geometry: KVGeometry, form: CacheForm = PLAIN) -> None:
        """Raises UnsupportedModel, with the reason, for a model whose keys cannot be moved."""
        if form.has_states:
            raise UnsupportedModel(
                f"{type(runner.model).__name__} has layers with a recurrent state, which holds all that came before it "
                "and cannot be moved: reuse='chunks' is refused; 'exact' and 'prefix' work"
            )
        if any(layer.window is not None for layer in geometry.layers):
            raise UnsupportedModel(
                "some layers attend to a sliding window, which relocated chunks do not support in this version: "
                "use reuse='exact' or 'prefix'"
            )
        if form.others:
            where = ", ".join(sorted(map(str, (runner.device, *form.others))))
            raise UnsupportedModel(
                f"its layers lie on several devices ({where}), where keys are not moved in this version: "
                "use reuse='exact' or 'prefix'"
            )
        self.rotaries = rotaries(runner.model.config.to_dict())
        if len(self.rotaries) != len(geometry.layers):
            raise UnsupportedModel(
                f"the configuration describes {len(self.rotaries)} layers and the model keeps KV in "
                f"{len(geometry.layers)}: reuse='chunks' is refused; 'exact' and 'prefix' work"
            )
        self._device = runner.device
        self._check(runner)

    def sink(self, arena: Arena, span: Relocate) -> Relocation:
        """Return the sink into which to load the block of `span`. It writes to the arena at the span's positions."""
        return Relocation(arena, span, self._turns(span.start - span.source_start))

    def copy(self, source: Arena, start: int, target: Arena, at: int, count: int) -> None:
        """Copy the KV of `count` positions from `start` in one arena to `at ...` in another, and rotate the keys."""
        turns = self._turns(at - start)
        source.materialize()
        with torch.inference_mode():
            for here, there, turn in zip(source.layers, target.layers, turns, strict=True):
                for kv, moved in enumerate((turn, None)):
                    rows = here.plane(kv).tensor()[:, start : start + count]
                    there.plane(kv).put(at, rows if moved is None else moved(rows))
        target.advance(at + count)

    def _turns(self, delta: int) -> list[Turn | None]:
        made: dict[Rotary, Turn] = {}
        turns: list[Turn | None] = []
        for rotary in self.rotaries:
            if rotary is None or delta == 0:
                turns.append(None)
            else:
                if rotary not in made:
                    made[rotary] = Turn(rotary, delta, self._device)
                turns.append(made[rotary])
        return turns

    def _check(self, runner: Runner) -> None:
        """Raise UnsupportedModel unless the model's keys move as its configuration says.

        Several texts are tried: in half precision, rounding one large number otherwise may change all that comes behind
        it. A wrong rotation is wrong with every text.
        """
        reasons = (self._unmoved(runner, text) for text in range(_TEXTS))
        told = [*takewhile(bool, reasons)]
        if len(told) == _TEXTS:
            raise UnsupportedModel(
                f"{type(runner.model).__name__} does not move as its configuration says: {told[0]} at another "
                "position, so reuse='chunks' is refused; 'exact' and 'prefix' work"
            )

    def _unmoved(self, runner: Runner, text: int) -> str:
        """Run the same tokens at two positions. Values must be equal, and keys must be rotations of each other. Returns
        what differs, or an empty text."""
        tokens = token_ids([1 + (text * _TRIED + i) * 7919 % (runner.vocabulary - 1) for i in range(_TRIED)])
        caches = []
        for start in (0, _MOVED):
            caches.append(DynamicCache(config=runner.model.config))
            runner.extend(tokens, caches[-1], start)
        tolerance = _TOLERANCE.get(runner.model.dtype, 0.08)
        for layer, (here, there, turn) in enumerate(
            zip(caches[0].layers, caches[1].layers, self._turns(_MOVED), strict=True)
        ):
            assert isinstance(here, CacheLayerMixin)
            assert isinstance(there, CacheLayerMixin)
            assert here.keys is not None
            assert here.values is not None
            assert there.keys is not None
            assert there.values is not None
            moved = here.keys if turn is None else turn(here.keys)
            for name, ours, theirs in (("keys", moved, there.keys), ("values", here.values, there.values)):
                off = (ours.float() - theirs.float()).abs().max().item()
                if not off <= tolerance * max(theirs.float().abs().max().item(), 1e-6):
                    return f"the {name} of layer {layer} differ by {off:.3g}"
        return ""


_Move = tuple[Bytes, Plane, int, Turn | None]  # rows, the target plane, the first position there, and keys' rotation


class Relocation:
    """A sink for one block. It takes KV at its original positions and writes it to an arena at others."""

    def __init__(self, arena: Arena, span: Relocate, turns: list[Turn | None]) -> None:
        self.geometry = arena.geometry
        self._arena = arena
        self._span = span
        self._turns = turns
        self._dtype: torch.dtype = getattr(torch, self.geometry.dtype)
        self._held: dict[tuple[int, int], Bytes] = {}
        self._moves: list[_Move] = []  # of loaded layers, to be put in place together

    def view(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        heads = self.geometry.layers[layer].kv_heads
        data = np.empty((heads, end - start, self.geometry.head_bytes(layer, kv)), np.uint8)
        self._held[layer, kv] = data
        return data

    def fill(self, layer: int, kv: int, start: int, data: Bytes) -> None:
        self._held[layer, kv] = data

    def defer(self, arriving: Arriving) -> bool:
        return False  # a layer is rotated as a whole once it is loaded

    def encoded(
        self, rows: KVGeometry, codec: BlockCodec, blocks: Sequence[tuple[int, int]], end: int
    ) -> KVSink | None:
        return None  # keys must be decoded to be rotated

    def commit(self, layer: int, start: int, end: int) -> None:
        span, there = self._span, self._arena.layers[layer]
        first = span.source_start - start
        for kv in (0, 1):
            data = self._held.pop((layer, kv))[:, first : first + span.end - span.start]
            self._moves.append((data, there.plane(kv), span.start, None if kv else self._turns[layer]))
        if layer == len(self._turns) - 1 or sum(data.nbytes for data, *_ in self._moves) >= _TOGETHER:
            self._move()

    def _move(self) -> None:
        moves, self._moves = self._moves, []
        if not _moved(moves, self._dtype):
            with torch.inference_mode():
                for data, plane, at, turn in moves:
                    rows = torch.from_numpy(data).view(self._dtype).to(self._arena.device)
                    plane.put(at, rows if turn is None else turn(rows))


def _moved(moves: Sequence[_Move], dtype: torch.dtype) -> bool:
    """Put rows in place with the compiled kernel. Return False if it does not support them."""
    if dtype not in (torch.bfloat16, torch.float32) or any(
        plane.array is None or (turn is not None and (turn.rotary.interleaved or turn.rotary.head_dim % LANES))
        for _, plane, _, turn in moves
    ):
        return False
    kernels = compiled(CHUNKS)
    if kernels is None:
        return False
    planes = np.empty(len(moves), _PLANES)
    for at, (data, plane, start, turn) in enumerate(moves):
        heads, rows, width = data.shape
        if data.strides[1:] != (width, 1):
            return False
        angles = (0, 0, 0) if turn is None else (turn.cosine.ctypes.data, turn.sine.ctypes.data, len(turn.cosine))
        planes[at] = (
            data.__array_interface__["data"][0],
            plane.address + start * width,
            data.strides[0],
            plane.head_stride,
            *angles[:2],
            heads,
            width // dtype.itemsize,
            angles[2],
            0,
        )
    done(
        kernels.library.keepwarm_move(
            ctypes.c_void_p(planes.ctypes.data),
            ctypes.c_int64(len(planes)),
            ctypes.c_int64(rows),
            dtype.itemsize,
            torch.get_num_threads(),
        )
    )
    return True
