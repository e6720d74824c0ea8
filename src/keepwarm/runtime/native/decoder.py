"""Runs steps through the compiled kernels, on weights packed from a transformers model.

For models whose layers the kernels have (`families` says which), in float32 or bfloat16 on the CPU. Everything else
runs through transformers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedModel

from keepwarm.core.blocks import TokenIds
from keepwarm.core.identity import canonical_json, digest
from keepwarm.runtime.native.blocks import ACTIVATIONS as ROUNDED
from keepwarm.runtime.native.blocks import Blocks, Packed
from keepwarm.runtime.native.build import Kernels, done
from keepwarm.runtime.native.description import ACTIVATIONS, LayerParts, Linear, Norm, NotCovered
from keepwarm.runtime.native.families import described
from keepwarm.runtime.native.places import UNIT, Placed, Region, Sequenced, scattered, works
from keepwarm.runtime.native.reads import Taking

_LANES = 16
_POSITIONS = 4096  # of a piece of the rotary tables
_LOG2E = 1.4426950408889634  # the kernels' exponentials are powers of two


class _Norm(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Norm) for name in ("before", "q", "k", "after", "before_mlp", "after_mlp")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "qkv_bias",
                "o_bias",
                "gate_bias",
                "up_bias",
                "down_bias",
                "cosine",
                "sine",
                "qkv",
                "o",
                "gate",
                "up",
                "down",
            )
        ),
        ("window", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


_NUMBERS = ("layers", "hidden", "heads", "kv_heads", "dim", "inner", "vocab", "is_bf16")
_FACTS = ("rotary", "interleaved", "centred", "wide", "parallel", "activation")
_FACTORS = ("epsilon", "scale", "embedded", "residual", "logit", "score_cap", "logit_cap")


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in (*_NUMBERS, *_FACTS)),
        *((name, ctypes.c_float) for name in _FACTORS),
        *((name, ctypes.c_void_p) for name in ("embedding", "head")),
        ("norm", _Norm),
        ("layer", ctypes.POINTER(_Layer)),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in ("rows", "works", "outputs", "threads", "first", "last", "moves", "stopped", "places")
        ),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "tokens",
                "positions",
                "slots",
                "regions",
                "pages",
                "work",
                "members",
                "move",
                "wanted",
                "scratch",
                "logits",
                "take",
                "job",
                "wrong",
            )
        ),
    )


class ArrivingLayers(Protocol):
    """Keys and values on their way to a sequence."""

    def taking(self) -> Taking | None:
        """What the step's own threads can do about it; None where they cannot do all of it."""
        ...

    def passed(self, layer: int) -> None:
        """The step has done that for all before this layer, and not for this one."""
        ...

    def arrive(self, layer: int) -> None:
        """Wait for a layer."""
        ...


def unsupported(model: PreTrainedModel, windows: Sequence[int | None]) -> str:
    """Return why a model does not run here, empty if it does. `windows` are its layers' (None: all positions)."""
    if any(window is not None and window < UNIT for window in windows):
        return f"a window of fewer than {UNIT} positions"
    try:
        described(model)
    except NotCovered as reason:
        return str(reason)
    return ""


class LeanDecoder:
    """Forward passes over one model's weights, packed once. One call at a time."""

    def __init__(self, model: PreTrainedModel, kernels: Kernels, windows: Sequence[int | None]) -> None:
        """`windows` are the layers' (None: all positions). Raises ValueError for a model that `unsupported` names a
        reason for."""
        if reason := unsupported(model, windows):
            raise ValueError(reason)
        self._library = kernels.library
        self.digest = kernels.digest
        self._library.keepwarm_scratch.restype = ctypes.c_int64
        parts = described(model)
        in_blocks = isinstance(parts.head, Blocks)
        self.dtype = model.dtype
        self.deep: int = self._library.keepwarm_deep() if self.dtype is torch.bfloat16 else 1
        self._held: list[Any] = []  # tensors whose addresses the structures below hold
        self._tables_of = [layer.attention.table for layer in parts.layers]
        self._layers = (_Layer * len(parts.layers))(*map(self._layer, parts.layers))
        for layer, window in zip(self._layers, windows, strict=True):
            layer.window = window or 0
        head = self._packed(Linear(parts.head))
        self._model = _Model(
            layers=len(parts.layers),
            hidden=parts.head.shape[1],
            heads=parts.heads,
            kv_heads=parts.kv_heads,
            dim=parts.dim,
            inner=parts.layers[0].mlp.down.weight.shape[1],
            vocab=parts.head.shape[0],
            is_bf16=self.dtype is torch.bfloat16,
            rotary=parts.rotary,
            interleaved=parts.interleaved,
            centred=parts.centred,
            wide=parts.wide_norms,
            parallel=parts.parallel,
            activation=ACTIVATIONS[parts.activation],
            epsilon=parts.epsilon,
            scale=parts.scaling * _LOG2E,
            embedded=parts.embedded,
            residual=parts.residual,
            logit=parts.logit,
            score_cap=parts.score_cap * _LOG2E,
            logit_cap=parts.logit_cap,
            embedding=self._embedding(parts.embedding, parts.head, head),
            head=head,
            norm=self._norm(parts.norm),
            layer=self._layers,
        )
        self.scaling = parts.scaling
        self._reached = 0
        self._rotaries = parts.tables
        empty = torch.empty(0, parts.rotary // 2, dtype=torch.float32)
        self._tables = [[empty, empty] for _ in parts.tables]  # cosines and sines of each
        self._grow(_POSITIONS)
        self.constants = digest(  # which the model's modules give beside weights: part of the arithmetic identity
            "keepwarm decoder constants 2",
            canonical_json([*parts.facts, [window or 0 for window in windows], *([ROUNDED] if in_blocks else [])]),
            *(table.numpy().tobytes() for pair in self._tables for table in pair),
        ).hex()
        self.threads: int | None = None  # of a step; None: as many as torch has
        self._scratch = torch.empty(0, dtype=torch.float32)

    def step(
        self,
        tokens: Sequence[TokenIds],
        starts: Sequence[int],
        sequences: Sequence[Sequenced],
        wanted: Sequence[int],
        arrivals: ArrivingLayers | None = None,
    ) -> torch.Tensor:
        """Run the next tokens of several sequences at once, and append their keys and values.

        `tokens[i]` stand at positions `starts[i] ...` of `sequences[i]`, whose pages hold everything before and have
        room for them. `wanted` are rows, counted over all tokens in order, whose logits are asked for. Returns them,
        `[len(wanted), vocab]`, float32, rounded to the model's dtype. With `arrivals` keys and values may still be on
        their way: each layer is brought, or waited for, just before it is attended to; what that raises ends the step.
        """
        ends = [start + len(part) for start, part in zip(starts, tokens, strict=True)]
        if max(ends) > self._reached:
            self._grow(max(ends))
        placed = works(starts, ends, sequences)
        ids = np.concatenate([np.asarray(part, dtype=np.int32) for part in tokens])
        positions = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in zip(starts, ends, strict=True)])
        return self._run(ids, positions, placed, wanted, arrivals=arrivals)

    def rows(
        self,
        tokens: TokenIds,
        positions: npt.NDArray[np.int64],
        sequence: Sequenced,
        wanted: Sequence[int],
        layers: int | None = None,
        seen: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Run tokens at any rising `positions` of one sequence; else as `step`.

        Everything at other positions is taken as it lies in the pages. A row's bits depend on what it attends to, so
        rows of a sequence that is in place give what a step would. `layers` ends the pass when the keys and values of
        so many layers are in place. `seen` is called behind each layer with the queries that attended there,
        `[rows, heads, dim]`, float32, its own for the call.
        """
        if int(positions[-1]) >= self._reached:
            self._grow(int(positions[-1]) + 1)
        ids, at = tokens.astype(np.int32), positions.astype(np.int32)
        return self._run(ids, at, scattered(positions, sequence), wanted, layers, seen=seen)

    def _run(
        self,
        ids: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        placed: Placed,
        wanted: Sequence[int],
        layers: int | None = None,
        arrivals: ArrivingLayers | None = None,
        seen: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        outputs = np.asarray(wanted, dtype=np.int32)
        logits = torch.empty(len(outputs), self._model.vocab, dtype=torch.float32)
        step = _Step(
            rows=len(ids),
            works=len(placed.work),
            outputs=len(outputs),
            threads=self.threads or torch.get_num_threads(),
            places=layers is not None,
            tokens=_pointer(ids),
            positions=_pointer(positions),
            slots=_pointer(placed.slots),
            regions=_pointer(placed.regions),
            pages=_pointer(placed.pages),
            work=_pointer(placed.work),
            members=_pointer(placed.members),
            moves=len(placed.moves),
            move=_pointer(placed.moves),
            wanted=_pointer(outputs),
            logits=logits.data_ptr(),
        )
        need = self._library.keepwarm_scratch(ctypes.byref(self._model), ctypes.byref(step))
        if need > self._scratch.numel():
            self._scratch = torch.empty(need, dtype=torch.float32)
        step.scratch = self._scratch.data_ptr()
        step.last = end = self._model.layers if layers is None else layers
        if seen is not None:
            for layer in range(end):
                step.first, step.last = layer, layer + 1
                self._forward(step)
                each = self._model.heads + 2 * self._model.kv_heads
                queries = self._scratch[: len(ids) * each * self._model.dim].view(len(ids), each, self._model.dim)
                seen(layer, queries[:, : self._model.heads])
            return logits
        if arrivals is None:
            self._forward(step)
            return logits
        if (taking := arrivals.taking()) is not None:
            step.take, step.job, step.wrong = taking.function, taking.job, taking.wrong
            self._forward(step)
            arrivals.passed(step.stopped)
            step.first, step.take = step.stopped, None
        for layer in range(step.first, end):
            arrivals.arrive(layer)
            step.first, step.last = layer, layer + 1
            self._forward(step)
        return logits

    def _forward(self, step: _Step) -> None:
        if done(self._library.keepwarm_forward(ctypes.byref(self._model), ctypes.byref(step))):
            raise RuntimeError(f"the kernels have no head width {self._model.dim}")

    def copy_rows(self, source: Region, row: int, target: Region, at: int, rows: int) -> None:
        """Copy rows of every layer and head from one region to another; encoded ones are decoded."""
        place = [np.array([region], dtype=Region.DTYPE) for region in (source.record, target.record)]
        self._library.keepwarm_copy(
            ctypes.byref(self._model),
            ctypes.c_void_p(_pointer(place[0])),
            ctypes.c_int64(row),
            ctypes.c_void_p(_pointer(place[1])),
            ctypes.c_int64(at),
            ctypes.c_int64(rows),
        )

    def _layer(self, parts: LayerParts) -> _Layer:
        attention, mlp = parts.attention, parts.mlp
        reads = (attention.q, attention.k, attention.v)
        biases = [torch.zeros(len(each.weight)) if each.bias is None else each.bias.float() for each in reads]
        has_bias = any(each.bias is not None for each in reads)
        return _Layer(
            before=self._norm(parts.before),
            q=self._norm(attention.q_norm),
            k=self._norm(attention.k_norm),
            after=self._norm(parts.after),
            before_mlp=self._norm(parts.before_mlp),
            after_mlp=self._norm(parts.after_mlp),
            qkv_bias=self._floats(torch.cat(biases)) if has_bias else None,
            o_bias=self._floats(attention.o.bias),
            gate_bias=self._floats(mlp.gate.bias) if mlp.gate else None,
            up_bias=self._floats(mlp.up.bias),
            down_bias=self._floats(mlp.down.bias),
            qkv=self._packed(*reads),
            o=self._packed(attention.o),
            gate=self._packed(mlp.gate) if mlp.gate else None,
            up=self._packed(mlp.up),
            down=self._packed(mlp.down),
        )

    def _norm(self, norm: Norm | None) -> _Norm:
        return _Norm(None, None) if norm is None else _Norm(self._floats(norm.weight), self._floats(norm.bias))

    def _packed(self, *parts: Linear) -> int:
        """Weights `[out, in]`, one under the other, as products.h or tiles.h has them, filled up with zeros."""
        weights = [part.weight for part in parts]
        if in_blocks := [each for each in weights if isinstance(each, Blocks)]:
            return self._in_blocks(in_blocks)
        weight = torch.cat([each for each in weights if isinstance(each, torch.Tensor)])
        out, width = weight.shape
        weight = nn.functional.pad(weight, (0, -width % self.deep, 0, -out % _LANES))
        if self.deep > 1:
            weight = weight.unflatten(1, (-1, 2))
        return self._address(weight.unflatten(0, (-1, _LANES)).transpose(1, 2).contiguous())

    def _in_blocks(self, weights: Sequence[Blocks]) -> int:
        self._held.append(Packed(weights))
        return int(self._held[-1].address)

    def _embedding(self, table: torch.Tensor | Blocks, head: torch.Tensor | Blocks, packed: int) -> int:
        """Where embeddings lie: as the model has them, or in blocks, packed once for the head too if it is the same."""
        if isinstance(table, torch.Tensor):
            return self._address(table)
        is_tied = isinstance(head, Blocks) and table.raw.data_ptr() == head.raw.data_ptr()
        return packed if is_tied else self._in_blocks([table])

    def _floats(self, tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else self._address(tensor.detach().float().contiguous())

    def _address(self, tensor: torch.Tensor) -> int:
        self._held.append(tensor.detach())
        return tensor.data_ptr()

    def _grow(self, positions: int) -> None:
        """Rotary tables, float32, as the model's own module makes them; piece by piece, so that what a position has
        does not depend on how many there are."""
        starts = range(self._reached, max(positions, 2 * self._reached), _POSITIONS)
        with torch.inference_mode():
            for pair, rotary in zip(self._tables, self._rotaries, strict=True):
                pieces = [rotary(torch.arange(start, start + _POSITIONS)) for start in starts]
                pair[:] = (
                    torch.cat([table, *(piece[which] for piece in pieces)]).contiguous()
                    for which, table in enumerate(pair)
                )
        self._reached += len(starts) * _POSITIONS
        for layer, number in zip(self._layers, self._tables_of, strict=True):
            if number is not None:
                layer.cosine, layer.sine = (table.data_ptr() for table in self._tables[number])


def _pointer(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)
