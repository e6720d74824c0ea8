"""Runs steps through the compiled kernels, on weights packed from a transformers model.

It runs models whose layers the kernels know (`families` says which), in float32 or bfloat16 on the CPU. All others run
through transformers.
"""

from __future__ import annotations

import copy
import ctypes
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from keepwarm.core.blocks import TokenIds
from keepwarm.core.identity import canonical_json, digest
from keepwarm.runtime.native.blocks import ACTIVATIONS as ROUNDED
from keepwarm.runtime.native.blocks import Blocks, packing_digest
from keepwarm.runtime.native.build import Kernels, done
from keepwarm.runtime.native.description import ACTIVATIONS, Description, NotCovered
from keepwarm.runtime.native.families import described
from keepwarm.runtime.native.low_rank import Chosen
from keepwarm.runtime.native.memory import pages
from keepwarm.runtime.native.outline import Outline
from keepwarm.runtime.native.packing import LANES, LOG2E, Packing, WideWeights
from keepwarm.runtime.native.places import Placed, Region, Sequenced, scattered, works
from keepwarm.runtime.native.recurrent import Runs
from keepwarm.runtime.native.structures import LayerRecord, ModelRecord, StepRecord
from keepwarm.runtime.native.tables import RotaryTables
from keepwarm.runtime.native.windows import differing
from keepwarm.runtime.stepping import ArrivingLayers

_ROWS_AT_ONCE = 640  # more rows do not fit into a processor's own cache (decision 153)


def unsupported(model: PreTrainedModel, windows: Sequence[int | None]) -> str:
    """Return why a model does not run here, or an empty text if it does. `windows` are those of its cache's layers with
    keys and values, in positions; None stands for all positions."""
    try:
        found = described(model)
    except NotCovered as reason:
        return str(reason)
    return differing(found, windows)


class LeanDecoder:
    """Runs forward passes over one model's weights, which it packs once. Only one call may run at a time."""

    name = "lean"
    is_threaded = True
    reads_encoded = True

    def __init__(
        self,
        model: PreTrainedModel,
        kernels: Kernels,
        windows: Sequence[int | None],
        adapted: Callable[[], Kernels | None] = lambda: None,
    ) -> None:
        """`windows` are those of the layers with keys and values, in positions; None stands for all. `adapted` returns
        the kernels for rows with an adapter. Raises ValueError if `unsupported` gives a reason."""
        if reason := unsupported(model, windows):
            raise ValueError(reason)
        self._library = kernels.library
        self.digest = kernels.digest
        self.adapted = functools.cache(adapted)
        self._library.keepwarm_scratch.restype = ctypes.c_int64
        parts = described(model)
        self.in_blocks = isinstance(parts.head, Blocks)
        self.dtype = model.dtype
        self.deep: int = self._library.keepwarm_deep() if self.dtype is torch.bfloat16 else 1
        self._tables_of = [layer.attention.table if layer.attention else None for layer in parts.layers]
        self.states = tuple(each.state for each in parts.recurrent)  # numbers that each layer with a state keeps
        if self.dtype is not torch.float32 or self.in_blocks or not self._packs_narrow(parts, windows):
            self._pack(parts, windows)
        self.scaling = parts.scaling
        self.is_routed = bool(parts.experts)
        self._tables = RotaryTables(parts.tables, parts.rotated, torch.device("cpu"), parts.factors)
        self._point()
        rounded = [ROUNDED, packing_digest()] if self.in_blocks else []
        # What the model's modules compute beside their weights is part of the arithmetic identity.
        self.constants = digest(
            "keepwarm decoder constants 3",
            canonical_json([Outline(model).of(parts), parts.activation, parts.epsilon, parts.scaling, *rounded]),
            *(table.numpy().tobytes() for table in self._tables.every),
        ).hex()
        self.threads: int | None = None  # threads of a step; None: as many as torch uses
        # With experts it is more: then each of them gets so many rows on average.
        self.rows_at_once: int | None = _ROWS_AT_ONCE * max(1, self._model.experts // max(1, self._model.chosen))
        self._scratch = torch.empty(0, dtype=torch.float32)

    @property
    def screens(self) -> bool:
        """Whether the head can be read in part, where only the largest logits are asked for."""
        return self._screening.screens

    @property
    def storages(self) -> dict[int, int]:
        """Bytes of the weights as the kernels read them, by address."""
        return self._packing.storages

    def _packs_narrow(self, parts: Description, windows: Sequence[int | None]) -> bool:
        """Pack weights in float32 as bfloat16. Return False if they are wider."""
        try:
            self._pack(parts, windows, narrow=True)
        except WideWeights:
            del self._packing  # and with it the memory of what was packed
            return False
        return True

    def _pack(self, parts: Description, windows: Sequence[int | None], *, narrow: bool = False) -> None:
        self._packing = Packing(self.dtype, self.deep, narrow=narrow)
        self._layers = (LayerRecord * len(parts.layers))(*map(self._packing.layer, parts.layers))
        self._number(parts, windows)
        self._model = self._record(parts)
        self._model.widens = narrow

    def _number(self, parts: Description, windows: Sequence[int | None]) -> None:
        """Number the layers with keys and values, and those with a state."""
        keeping, state = parts.keeping, 0
        for at, (record, layer) in enumerate(zip(self._layers, parts.layers, strict=True)):
            record.kv = record.state = -1
            if layer.attention is None:
                record.state, state = state, state + 1
                continue
            shares = layer.attention.shares
            record.shares = shares is not None
            record.kv = keeping.index(at if shares is None else shares)
            record.window = windows[record.kv] or 0
            record.kv_heads, record.dim = parts.shape(layer.attention)
            record.rotary = 0 if layer.attention.table is None else parts.rotated[layer.attention.table]

    def _record(self, parts: Description) -> ModelRecord:
        packing = self._packing
        ordered = parts.logit > 0 and not parts.logit_cap  # as in screen.h
        head = packing.head(parts.head, in_parts=ordered)
        self._screening = Screening(head.most)
        return ModelRecord(
            layers=len(parts.layers),
            hidden=parts.head.shape[1],
            heads=parts.heads,
            inner=max((mlp.down.weight.shape[-1] for mlp in parts.mlps), default=0),
            vocab=parts.head.shape[0],
            is_bf16=self.dtype is torch.bfloat16,
            narrow_tables=isinstance(parts.embedding, torch.Tensor) and parts.embedding.dtype is not self.dtype,
            tied=packing.is_tied(parts.embedding, parts.head),
            experts=max((len(experts.router.weight) for experts in parts.experts), default=0),
            chosen=max((experts.chosen for experts in parts.experts), default=0),
            expert=max((experts.all.down.weight.shape[-1] for experts in parts.experts), default=0),
            interleaved=parts.interleaved,
            centred=parts.centred,
            wide=parts.wide_norms,
            parallel=parts.parallel,
            activation=ACTIVATIONS[parts.activation],
            epsilon=parts.epsilon,
            scale=parts.scaling * LOG2E,
            alpha=parts.alpha,
            limit=parts.limit,
            embedded=parts.embedded,
            residual=parts.residual,
            logit=parts.logit,
            score_cap=parts.score_cap * LOG2E,
            logit_cap=parts.logit_cap,
            embedding=packing.embedding(parts.embedding, parts.head, head.address),
            head=head.address,
            errors=head.errors,
            norm=packing.norm(parts.norm),
            layer=self._layers,
            **({} if parts.per_layer is None else packing.per_layer(parts.per_layer)),
        )

    def step(
        self,
        tokens: Sequence[TokenIds],
        starts: Sequence[int],
        sequences: Sequence[Sequenced],
        wanted: Sequence[int],
        arrivals: ArrivingLayers | None = None,
        there: torch.Tensor | None = None,
        *,
        largest: bool = False,
    ) -> torch.Tensor:
        """Run the next tokens of several sequences at once, and append their keys and values.

        `tokens[i]` stand at positions `starts[i] ...` of `sequences[i]`, whose pages hold all earlier positions and
        have room for them. `wanted` names the rows whose logits are asked for, counted over all tokens in order.
        Returns these logits, `[len(wanted), vocab]`, float32, rounded to the model's dtype. With `arrivals`, keys and
        values may still be arriving. Each layer is then read, or waited for, just before it is attended to. An
        exception of that ends the step. With `largest`, only a row's largest logit is asked for, and where it stands:
        others may be minus infinity. Either all sequences have an adapter, each its own, or none has one.
        """
        assert there is None, "tokens are on the host here"
        chosen = _chosen(sequences, [*map(len, tokens)])
        ends = [start + len(part) for start, part in zip(starts, tokens, strict=True)]
        self._grow(max(ends))
        placed = works(starts, ends, sequences)
        ids = np.concatenate([np.asarray(part, dtype=np.int32) for part in tokens])
        positions = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in zip(starts, ends, strict=True)])
        runs = Runs(starts, ends, sequences, self.states) if self.states else None
        screened = largest and self._screening.pays(len(wanted))
        return self._run(ids, positions, placed, wanted, None, arrivals, chosen=chosen, runs=runs, largest=screened)

    def rows(
        self,
        tokens: TokenIds,
        positions: npt.NDArray[np.int64],
        sequence: Sequenced,
        wanted: Sequence[int],
        layers: int | None = None,
        seen: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Run tokens at any rising `positions` of one sequence. Otherwise it does what `step` does.

        The pages must hold the KV of all other positions. A row's bits depend on what it attends to, so the rows get
        the same bits as in a step if that KV is the sequence's own. `layers` ends the pass as soon as the keys and
        values of so many layers are written. `seen` is called after each layer that writes some, with its number among
        these and the queries that attended there, `[rows, heads, dim]`, float32. They are valid during the call only.
        """
        if sequence.lora is not None or self.states:
            raise RuntimeError("rows at chosen positions are not computed with an adapter or a recurrent state")
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
        chosen: Chosen | None = None,
        runs: Runs | None = None,
        largest: bool = False,
    ) -> torch.Tensor:
        outputs = np.asarray(wanted, dtype=np.int32)
        logits = torch.empty(len(outputs), self._model.vocab, dtype=torch.float32)
        step = StepRecord(
            rows=len(ids),
            works=len(placed.work),
            outputs=len(outputs),
            threads=self.threads or torch.get_num_threads(),
            places=layers is not None,
            largest=largest,
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
            adapters=None if chosen is None else chosen.address,
            run=None if runs is None else _pointer(runs.runs),
            keep=None if runs is None else _pointer(runs.keeps),
            runs=0 if runs is None else len(runs.runs),
        )
        need = self._library.keepwarm_scratch(ctypes.byref(self._model), ctypes.byref(step))
        if need > self._scratch.numel():
            self._scratch = torch.empty(0, dtype=torch.float32)  # the old one goes before the new one comes
            room = need * 5 // 4  # the need grows with the context
            self._scratch = torch.frombuffer(pages(4 * room), dtype=torch.float32)
        step.scratch = self._scratch.data_ptr()
        step.last = end = self._model.layers if layers is None else layers
        if seen is not None:
            for number, layer in enumerate(self._layers[:end]):
                step.first, step.last = number, number + 1
                self._forward(step)
                if not layer.shares:
                    each = self._model.heads + 2 * layer.kv_heads
                    queries = self._scratch[: len(ids) * each * layer.dim].view(len(ids), each, layer.dim)
                    seen(layer.kv, queries[:, : self._model.heads])
            return logits
        self._forward_arriving(step, end, arrivals)
        if largest:
            self._screening.was(len(outputs), step.whole * LANES / self._model.vocab)
        return logits

    def _forward_arriving(self, step: StepRecord, end: int, arrivals: ArrivingLayers | None) -> None:
        """Run the layers up to `end`, each as soon as its keys and values are there."""
        if arrivals is None:
            self._forward(step)
            return
        if (taking := arrivals.taking()) is not None:
            step.take, step.job, step.wrong = taking.function, taking.job, taking.wrong
            self._forward(step)
            arrivals.passed(sum(layer.kv >= 0 and not layer.shares for layer in self._layers[: step.stopped]))
            step.first, step.take = step.stopped, None
        for layer in range(step.first, end):
            if (number := self._layers[layer].kv) >= 0 and not self._layers[layer].shares:
                arrivals.arrive(number)
            step.first, step.last = layer, layer + 1
            self._forward(step)

    def apart(self) -> LeanDecoder:
        """Return a decoder with the same weights, and with tables and room of its own, for steps beside this one's. No
        step may run meanwhile."""
        other = copy.copy(self)
        other._tables = copy.copy(self._tables)
        other._layers = type(self._layers).from_buffer_copy(self._layers)
        other._model = ModelRecord.from_buffer_copy(self._model)
        other._model.layer = other._layers
        other._scratch = torch.empty(0, dtype=torch.float32)
        other._screening = Screening(self._screening.most)
        return other

    def _forward(self, step: StepRecord) -> None:
        library = self._library if step.adapters is None else self._library_with_adapters()
        if done(library.keepwarm_forward(ctypes.byref(self._model), ctypes.byref(step))):
            raise RuntimeError(f"the kernels have no such head width: {sorted({layer.dim for layer in self._layers})}")

    def _library_with_adapters(self) -> ctypes.CDLL:
        found = self.adapted()
        if found is None:
            raise RuntimeError("the kernels for rows with an adapter are not there")
        return found.library

    def copy_rows(self, source: Region, row: int, target: Region, at: int, rows: int) -> None:
        """Copy rows of every layer and head from one region to another. Encoded rows are decoded."""
        place = [np.array([region], dtype=Region.DTYPE) for region in (source.record, target.record)]
        self._library.keepwarm_copy(
            ctypes.byref(self._model),
            ctypes.c_void_p(_pointer(place[0])),
            ctypes.c_int64(row),
            ctypes.c_void_p(_pointer(place[1])),
            ctypes.c_int64(at),
            ctypes.c_int64(rows),
        )

    def _grow(self, positions: int) -> None:
        """Extend the rotary tables to so many positions."""
        if self._tables.grow(positions):
            self._point()

    def _point(self) -> None:
        """Tell the kernels where the rotary tables are."""
        factors = None if self._tables.factors is None else self._tables.factors.data_ptr()
        for layer, number in zip(self._layers, self._tables_of, strict=True):
            layer.factors = factors
            if number is not None:
                layer.cosine, layer.sine = (table.data_ptr() for table in self._tables.pairs[number])


class Screening:
    """Whether the largest logits are looked for alone (`screen.h`). That pays while few panels are multiplied whole."""

    _AGAIN = 64  # so often it is tried although it did not pay

    def __init__(self, most: float) -> None:
        """`most`: the share of all panels up to which it pays. It is 0 if the head lies in one part."""
        self.most = most
        self._shares: dict[int, float] = {}  # of panels that were multiplied whole lately, by rows
        self._asked: Counter[int] = Counter()

    @property
    def screens(self) -> bool:
        return self.most > 0

    def pays(self, rows: int) -> bool:
        self._asked[rows] += 1
        fits = self._shares.get(rows, 0.0) <= self.most or self._asked[rows] % self._AGAIN == 0
        return fits and self.screens

    def was(self, rows: int, share: float) -> None:
        """Note the share of panels that a step multiplied whole; 0 where it screened nothing."""
        before = self._shares.get(rows, 1.0)
        newest = 1 / 8 if before <= self.most else 1  # what did not pay is judged by the next try alone
        self._shares[rows] = before + (share - before) * newest


def _chosen(sequences: Sequence[Sequenced], counts: Sequence[int]) -> Chosen | None:
    loras = [sequence.lora for sequence in sequences if sequence.lora is not None]
    if len(loras) not in (0, len(sequences)):
        raise ValueError("a step has sequences with an adapter, and others without")
    return Chosen(loras, counts) if loras else None


def _pointer(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)
