"""Runs steps through the Triton kernels, on a model's weights where they lie on the device.

Sequences are read and written by address (`native.places`). A row's bits depend on its tokens and positions alone, as
with the lean decoder: see `products` and `attention`. What a step needs is brought to the device in one copy. No step
waits for the device, unless the rotary tables have to grow, or a graph is recorded. On CUDA, small steps are repeated
by graphs: see `graphs`. All their rows then go through the whole last layer.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
from transformers import PreTrainedModel

from keepwarm.core.blocks import TokenIds
from keepwarm.core.identity import canonical_json, digest
from keepwarm.runtime.capture import ALONE, CudaCapture
from keepwarm.runtime.gpu_kernels.experts import Mixture
from keepwarm.runtime.gpu_kernels.graphs import ROWS, Graphs, Pass, written
from keepwarm.runtime.gpu_kernels.launch import Heads, Launch
from keepwarm.runtime.gpu_kernels.plan import Numbers
from keepwarm.runtime.gpu_kernels.reasons import device_of_weights, missing, uncovered
from keepwarm.runtime.gpu_kernels.step import Attended, Plan, Step, arranged, asked, brought, flat, pieces
from keepwarm.runtime.gpu_kernels.tile_check import checked
from keepwarm.runtime.gpu_kernels.tiles import Tiles
from keepwarm.runtime.gpu_kernels.upload import Upload
from keepwarm.runtime.native.description import Attention, Description, LayerParts
from keepwarm.runtime.native.families import described
from keepwarm.runtime.native.outline import Outline
from keepwarm.runtime.native.places import MOVE, Placed, Region, Sequenced, scattered, works
from keepwarm.runtime.native.tables import RotaryTables
from keepwarm.runtime.stepping import ArrivingLayers

_LEAST = (3, 4)  # Triton's version; as in pyproject.toml
_RESULTS = 128 << 20  # bytes of the results of attention's parts that are in memory at the same time

Seen = Callable[[int, torch.Tensor], None]


class TritonDecoder:
    """Runs forward passes over one model's weights. Only one call may run at a time."""

    name = "triton"
    is_threaded = in_blocks = screens = reads_encoded = False
    states: tuple[int, ...] = ()

    def __init__(self, model: PreTrainedModel, windows: Sequence[int | None]) -> None:
        """`windows` are those of the cache's layers, in positions; None stands for all. Raises ValueError if the
        kernels do not run the model."""
        if tuple(map(int, triton.__version__.split(".")[:2])) < _LEAST:
            raise ValueError(f"Triton {triton.__version__} is too old (torch brings a newer one from 2.8 on)")
        self.device: torch.device = device_of_weights(model)
        if reason := missing(self.device) or uncovered(model, windows):
            raise ValueError(reason)
        parts = described(model, anywhere=True)
        assert isinstance(parts.embedding, torch.Tensor)  # as `reasons` says
        assert isinstance(parts.head, torch.Tensor)
        self._embedding, self._head = parts.embedding, parts.head
        self.dtype = model.dtype
        self.scaling = parts.scaling
        self.threads: int | None = None
        self.rows_at_once: int | None = None
        self.is_routed = bool(parts.experts)
        self._parts, self._windows = parts, tuple(windows)
        with self._on_device():
            launch = self._launch = _launch(parts, self.dtype, self.device)
        self._heads = _heads(parts, launch)
        self._mixture = Mixture(launch, parts.alpha, parts.limit)
        self._most = max(1, _RESULTS // (4 * parts.heads * (parts.dim + 2)))
        with ALONE:  # the tables wait for the whole device
            self._tables = RotaryTables(parts.tables, parts.rotated, self.device)
        is_cuda = self.device.type == "cuda"
        self._graphs = Graphs(self.device, partial(CudaCapture, self.device) if is_cuda else None)
        with self._on_device():
            self.digest = kernels_digest(launch.compiled(self._embedding))
        # What the model's modules compute beside their weights is part of the arithmetic identity.
        self.constants = digest(
            "keepwarm triton constants 1",
            canonical_json([Outline(model).of(parts), parts.activation, parts.scaling]),
            *(table.cpu().numpy().tobytes() for pair in self._tables.pairs for table in pair),
        ).hex()

    @property
    def storages(self) -> dict[int, int]:
        """None: the weights are the model's own."""
        return {}

    def adapted(self) -> None:
        """Return None: there are no kernels for rows with an adapter."""

    def apart(self) -> TritonDecoder:
        """Return a decoder with the same weights, and with tables of its own, for steps beside this one's."""
        other = copy.copy(self)
        other._tables = copy.copy(self._tables)
        other._graphs = self._graphs.apart()
        return other

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
        """Run the next tokens of several sequences at once: see `Decoder.step`. The logits are on the device, all of
        them also with `largest`.

        `arrivals` is asked for each layer before the layer's memory is read or written.
        """
        _refuse_adapters(sequences)
        ends = [start + len(part) for start, part in zip(starts, tokens, strict=True)]
        ids = np.concatenate([np.asarray(part, dtype=np.int64) for part in tokens])
        positions = np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in zip(starts, ends, strict=True)])
        return self._run(ids, positions, works(starts, ends, sequences), wanted, arrivals=arrivals, there=there)

    def rows(
        self,
        tokens: TokenIds,
        positions: npt.NDArray[np.int64],
        sequence: Sequenced,
        wanted: Sequence[int],
        layers: int | None = None,
        seen: Seen | None = None,
    ) -> torch.Tensor:
        """Run tokens at any rising `positions` of one sequence: see `LeanDecoder.rows`."""
        _refuse_adapters([sequence])
        ids, at = np.asarray(tokens, dtype=np.int64), np.asarray(positions, dtype=np.int64)
        return self._run(ids, at, scattered(at, sequence), wanted, layers, seen=seen)

    def copy_rows(self, source: Region, row: int, target: Region, at: int, rows: int) -> None:
        """Copy rows of every layer and head from one region to another."""
        regions = flat(np.array([region.record for region in (source, target)], dtype=Region.DTYPE))
        moves = pieces(np.array([(row, 1 << 32 | at, rows)], MOVE))
        with self._on_device():
            self._move(moves, regions)

    def _move(self, moves: Numbers, regions: Numbers) -> None:
        """Make moves in all layers."""
        upload = Upload(self.device)
        which, where = upload.add(moves), upload.add(regions)
        numbers, like = upload.sent(), torch.empty(1, dtype=self.dtype, device=self.device)
        self._heads.move(numbers[which], numbers[where], like, 0, len(self._parts.layers))

    def _run(
        self,
        ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        placed: Placed,
        wanted: Sequence[int],
        layers: int | None = None,
        arrivals: ArrivingLayers | None = None,
        seen: Seen | None = None,
        there: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layers, all of them or the first `layers`. The pass ends with the keys and values of the last one if
        nothing is wanted of it."""
        if not len(ids):
            return self._no_logits()
        with self._on_device():
            self._reach(int(positions.max()) + 1)
            small = layers is None and seen is None and self._graphs.repeat and len(ids) <= ROWS
            bounds = set(self._windows), self._heads.rows, self._most
            plan = arranged(ids, positions, placed, wanted, *bounds, whole=small and len(wanted) > 0)
            plan = replace(plan, there=there)
            x = self._graphs.run(plan, self._pass(arrivals)) if small else None
            if x is None:
                x = self._through(brought(plan, self.device)[1], layers, arrivals, seen)
            if layers is not None or not len(wanted):
                return self._no_logits()
            parts, x = self._parts, asked(x, plan.wanted) if plan.is_whole else x
            return self._launch.logits(self._launch.norm(x, parts.norm), self._head, parts.logit, parts.logit_cap)

    def _through(
        self, step: Step, layers: int | None = None, arrivals: ArrivingLayers | None = None, seen: Seen | None = None
    ) -> torch.Tensor:
        """Return rows behind the last layer: all if the step is whole, else the wanted ones."""
        parts, every = self._parts, self._parts.layers[:layers]
        results = self._results(step.results)
        x = self._launch.embed(step.tokens, self._embedding, parts.embedded)
        for number, layer in enumerate(every):
            queries = self._queries(number, layer, x, step, arrivals)
            if seen is not None:
                seen(number, queries.float())
            is_last = number + 1 == len(every)
            if is_last and (layers is not None or not len(step.wanted)):
                break
            mixed = self._attended(number, queries, step, step.few if is_last else step.every, results)
            if is_last and not step.is_whole:
                x, mixed = x.index_select(0, step.wanted), mixed.index_select(0, step.wanted)
            self._onward(layer, x, mixed)
        return x

    def _pass(self, arrivals: ArrivingLayers | None) -> Pass:
        """Return how a step is run whose memory arrives as `arrivals` says."""
        count = len(self._parts.layers)

        def arrive() -> None:
            if arrivals is not None:
                for number in range(count):
                    arrivals.arrive(number)

        def move(plan: Plan) -> None:
            if plan.moves.size:
                self._move(plan.moves, plan.regions)

        return Pass(self._through, partial(written, heads=self._heads, layers=count, device=self.device), arrive, move)

    def _reach(self, positions: int) -> None:
        """Have rotary tables for so many positions."""
        if positions > self._tables.reached:
            with ALONE:  # it waits for the whole device
                self._tables.grow(positions)
            self._graphs.drop()  # they read the tables that were there before

    def _no_logits(self) -> torch.Tensor:
        return torch.empty(0, len(self._head), dtype=torch.float32, device=self.device)

    def _queries(
        self, number: int, layer: LayerParts, x: torch.Tensor, step: Step, arrivals: ArrivingLayers | None
    ) -> torch.Tensor:
        """Write a layer's keys and values, and return its queries."""
        attention, heads = _attention(layer), self._heads
        h = self._launch.norm(x, layer.before)
        qkv = torch.empty(len(x), heads.width, dtype=torch.float32, device=self.device)
        begin = 0
        for linear in attention.reads:
            end = begin + linear.weight.shape[0]
            self._launch.product(h, linear, qkv[:, begin:end])
            begin = end
        if arrivals is not None:
            arrivals.arrive(number)
        if len(step.moves):
            heads.move(step.moves, step.regions, h, number)
        pair = None if attention.table is None else self._tables.pairs[attention.table]
        norms = attention.q_norm, attention.k_norm
        return heads.place(qkv, norms, pair, step.positions, step.slots, step.regions, number)

    def _attended(
        self, number: int, queries: torch.Tensor, step: Step, plan: list[Attended], results: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """Return the results of a layer's attention, in the rows of `plan`."""
        heads, window = self._heads, self._windows[number]
        sinks = _attention(self._parts.layers[number]).sinks
        out = torch.empty(len(queries), heads.heads * heads.dim, dtype=self.dtype, device=self.device)
        for each in plan:
            jobs = each.jobs[window]
            where = step.pages, step.regions, each.cells, results
            heads.attend(queries, step.positions, each.members, jobs, *where, number, window)
            heads.merge(results, sinks, each.rows, step.positions, each.cells, out, window)
        return out

    def _onward(self, layer: LayerParts, x: torch.Tensor, mixed: torch.Tensor) -> None:
        """Add the results of a layer's two parts to `x`."""
        launch, parts = self._launch, self._parts
        more = launch.product(mixed, _attention(layer).o)
        if not parts.parallel:
            launch.add(x, more, layer.after, parts.residual)
        fed = self._fed(layer, launch.norm(x, layer.before_mlp))
        if parts.parallel:
            launch.add(x, more, layer.after, parts.residual)
        launch.add(x, fed, layer.after_mlp, parts.residual)

    def _fed(self, layer: LayerParts, h: torch.Tensor) -> torch.Tensor:
        """Return what a layer's MLP or experts give for normed rows."""
        if layer.experts is not None:
            return self._mixture.mixed(h, layer.experts, layer.mlp)
        assert layer.mlp is not None  # a layer has one or the other
        return self._launch.product(self._launch.widen(h, layer.mlp), layer.mlp.down)

    def _results(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return memory for the results of attention's parts: maxima, totals and sums."""
        lanes, dim = count * self._heads.heads, self._heads.dim
        how: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
        return torch.empty(lanes, **how), torch.empty(lanes, **how), torch.empty(lanes * dim, **how)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Launch kernels on the model's device, whatever the calling thread's current one is."""
        return nullcontext() if self.device.type == "cpu" else torch.cuda.device(self.device)


def _launch(parts: Description, dtype: torch.dtype, device: torch.device) -> Launch:
    group = parts.heads // parts.kv_heads
    if device.type != "cuda" or torch.version.hip is not None:
        return Launch(dtype, parts.centred, Tiles.of(dtype, group))
    found: Any = torch.cuda.get_device_properties(device)
    tiles = Tiles.of(dtype, group, found.shared_memory_per_block_optin, found.multi_processor_count)
    activation = next((mlp.activation for mlp in parts.mlps), "silu")
    gated = all(mlp.gate is not None for mlp in parts.mlps)
    return checked(Launch(dtype, parts.centred, tiles), activation, device, gated=gated)


def _heads(parts: Description, launch: Launch) -> Heads:
    return Heads(
        launch,
        heads=parts.heads,
        kv_heads=parts.kv_heads,
        dim=parts.dim,
        rotary=parts.rotary,
        interleaved=parts.interleaved,
        wide=parts.wide_norms,
        scaling=parts.scaling,
        cap=parts.score_cap,
    )


def kernels_digest(compiled: str) -> str:
    """Return what decides the kernels' arithmetic: their code, and how they are `compiled` (see `Launch.compiled`)."""
    made = hashlib.sha256(f"{triton.__version__} {compiled}".encode())
    for name in ("rows", "products", "routes", "attention", "launch", "tiles", "experts", "plan", "graphs", "decoder"):
        made.update(resources.files(__package__ or "").joinpath(f"{name}.py").read_bytes())
    return made.hexdigest()


def _attention(layer: LayerParts) -> Attention:
    assert layer.attention is not None  # as `reasons` says
    return layer.attention


def _refuse_adapters(sequences: Sequence[Sequenced]) -> None:
    if any(sequence.lora is not None for sequence in sequences):
        raise RuntimeError("the Triton kernels compute no rows with an adapter")
