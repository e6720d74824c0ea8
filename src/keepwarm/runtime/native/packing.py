"""Packs a model's weights as the compiled kernels read them, and keeps what they read alive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from keepwarm.runtime.native.block_experts import OfExperts
from keepwarm.runtime.native.blocks import IN_PARTS, Blocks, Packed
from keepwarm.runtime.native.description import (
    Attention,
    Convolution,
    DeltaNet,
    Experts,
    LayerParts,
    Mlp,
    Norm,
    PerLayer,
    PerLayerEmbeddings,
    Recurrent,
    Sigmoid,
    StateSpace,
)
from keepwarm.runtime.native.memory import WeightMemory
from keepwarm.runtime.native.structures import (
    ConvolutionRecord,
    DeltaRecord,
    ExpertsRecord,
    LayerRecord,
    MlpRecord,
    NormRecord,
    PerLayerRecord,
)
from keepwarm.runtime.native.twelve import Panels

LANES = 16
_CHECKED = 4096  # rows that are widened at once to compare them
LOG2E = 1.4426950408889634  # the kernels' exponentials are powers of two


class Head(NamedTuple):
    """A packed head."""

    address: int
    errors: int | None  # the address of what a first part of bfloat16 is off by (`Panels.errors`)
    most: float  # the share of panels up to which the largest logits are found faster by parts; 0 if there is one part


class WideWeights(Exception):
    """Some weight in float32 is no number of bfloat16."""


class Packing:
    """Packs one model's weights. The records hold addresses only; this object keeps the memory at them alive."""

    def __init__(self, dtype: torch.dtype, deep: int, *, narrow: bool = False) -> None:
        """`dtype` is the model's, and `deep` is how many elements of an inner dimension are packed together. With
        `narrow`, weights of products in float32 are kept as the bfloat16 that they are, as those of most checkpoints
        are: half as many bytes."""
        self._dtype = dtype
        self._deep = deep
        self._narrow = narrow
        self._held: list[Any] = []
        self._memory = WeightMemory()

    @property
    def storages(self) -> dict[int, int]:
        """Bytes of what the kernels read, by address. Some of it may be the model's own tensors."""
        others = dict(
            (held.address, held.nbytes)
            if isinstance(held, Packed | Panels)
            else (held.untyped_storage().data_ptr(), held.untyped_storage().nbytes())
            for held in self._held
        )
        return others | self._memory.storages

    def layer(self, parts: LayerParts) -> LayerRecord:
        mixer = parts.mixer
        reads = mixer.reads
        biases = [
            torch.zeros(len(each.weight), dtype=torch.float32) if each.bias is None else each.bias.float()
            for each in reads
        ]
        has_bias = any(each.bias is not None for each in reads)
        record = LayerRecord(
            before=self.norm(parts.before),
            after=self.norm(parts.after),
            before_mlp=self.norm(parts.before_mlp),
            after_mlp=self.norm(parts.after_mlp),
            qkv_bias=self._floats(torch.cat(biases)) if has_bias else None,
            o_bias=self._floats(mixer.o.bias),
            qkv=self.packed(*(part.weight for part in reads)),
            o=self.packed(mixer.o.weight),
            mlp=MlpRecord() if parts.mlp is None else self._mlp(parts.mlp),
            per_layer=PerLayerRecord() if parts.per_layer is None else self._per_layer(parts.per_layer),
            factor=parts.factor,
            experts=ExpertsRecord() if parts.experts is None else self._experts(parts.experts),
        )
        if not isinstance(mixer, Attention):
            self._recurrent(record, mixer)
            return record
        record.q, record.k, record.v = map(self.norm, (mixer.q_norm, mixer.k_norm, mixer.v_norm))
        record.sinks = None if mixer.sinks is None else self._floats(mixer.sinks.float() * LOG2E)
        if mixer.gate is not None:
            record.gate, record.gate_bias = self.packed(mixer.gate.weight), self._floats(mixer.gate.bias)
        return record

    def _recurrent(self, record: LayerRecord, mixer: Recurrent) -> None:
        channels, kernel = mixer.weight.shape
        weight = self._floats(mixer.weight.t())
        record.convolution = ConvolutionRecord(weight, self._floats(mixer.bias), kernel, channels)
        if not isinstance(mixer, Convolution):
            record.delta = DeltaRecord(
                decay=self._floats(mixer.decay.float() * LOG2E),
                step=self._floats(mixer.step),
                norm=self._floats(mixer.norm.weight),
                skip=self._floats(mixer.skip) if isinstance(mixer, StateSpace) else None,
                heads=mixer.heads,
                key_heads=mixer.key_heads,
                dim=mixer.dim,
                key_dim=mixer.key_dim,
                tiled=isinstance(mixer, DeltaNet) and mixer.tiled,
            )

    def norm(self, norm: Norm | None) -> NormRecord:
        return NormRecord() if norm is None else NormRecord(self._floats(norm.weight), self._floats(norm.bias))

    def packed(self, *weights: torch.Tensor | Blocks) -> int:
        """Stack weights `[..., out, in]`, pack them as products.h or tiles.h reads them, pad them with zeros, and
        return their address. If they are in blocks, pack them as quantized.h reads them; then all must be. If elements
        are packed together, they are bfloat16, and packed as twelve.h reads them. Raises WideWeights."""
        if in_blocks := [each for each in weights if isinstance(each, Blocks)]:
            return self._in_blocks(in_blocks[0].each if isinstance(in_blocks[0], OfExperts) else in_blocks)
        stacked = _stacked(weights)
        if self._deep == 1:
            return self._floating(narrowed(stacked) if self._narrow else stacked.to(self._dtype))
        self._held.append(Panels(stacked.detach(), self._deep, self._memory))
        return int(self._held[-1].address)

    def head(self, weight: torch.Tensor | Blocks, *, in_parts: bool) -> Head:
        """Pack a head as `packed` does; `in_parts` if its kind has two parts."""
        if in_parts and isinstance(weight, Blocks) and weight.kind in IN_PARTS:
            return Head(self.packed(weight.in_parts), None, 1 / 4)
        if not in_parts or isinstance(weight, Blocks) or self._deep == 1:
            return Head(self.packed(weight), None, 0.0)
        panels = Panels(weight.detach(), self._deep, self._memory, in_parts=True)
        self._held.append(panels)
        if panels.errors is None:
            return Head(panels.address, None, 0.0)
        return Head(panels.address, int(panels.errors.ctypes.data), 1 / 4)

    def embedding(self, table: torch.Tensor | Blocks, head: torch.Tensor | Blocks, packed: int) -> int:
        """Return the address of the embeddings. If they are in blocks or narrow, and the head is the same tensor, its
        packed form at the address `packed` serves for both. Else they are a `table`."""
        if isinstance(table, Blocks) and isinstance(head, Blocks) and table.raw.data_ptr() == head.raw.data_ptr():
            return packed
        return packed if self.is_tied(table, head) else self.table(table)

    def is_tied(self, table: torch.Tensor | Blocks, head: torch.Tensor | Blocks) -> bool:
        """Whether narrow embeddings are the head, too."""
        if isinstance(table, Blocks) or isinstance(head, Blocks) or not self._narrow:
            return False
        return table.dtype is torch.bfloat16 and table.data_ptr() == head.data_ptr()

    def table(self, table: torch.Tensor | Blocks) -> int:
        """Return the address of a table of tokens' rows. It stays as the model has it, or is packed if it is in
        blocks. One that is narrower than the model lies in a file, which may change, and is copied."""
        if isinstance(table, Blocks):
            return self._in_blocks([table])
        return self.address(table) if table.dtype is self._dtype else self._memory.add(table.detach())

    def address(self, tensor: torch.Tensor) -> int:
        self._held.append(tensor.detach())
        return tensor.data_ptr()

    def _mlp(self, parts: Mlp) -> MlpRecord:
        return MlpRecord(
            gate_bias=self._floats(parts.gate.bias) if parts.gate else None,
            up_bias=self._floats(parts.up.bias),
            down_bias=self._floats(parts.down.bias),
            gate=self.packed(parts.gate.weight) if parts.gate else None,
            up=self.packed(parts.up.weight),
            down=self.packed(parts.down.weight),
            inner=parts.down.weight.shape[-1],
        )

    def per_layer(self, parts: PerLayerEmbeddings) -> dict[str, Any]:
        """Return what the model's record tells of per-layer embeddings."""
        return {
            "per_layer": parts.width,
            "looked_up": parts.looked_up,
            "projected": parts.projected,
            "summed": parts.summed,
            "per_layer_table": self.table(parts.table),
            "per_layer_projection": self.packed(parts.projection.weight),
            "per_layer_norm": self.norm(parts.norm),
        }

    def _per_layer(self, parts: PerLayer) -> PerLayerRecord:
        gate, up = self.packed(parts.gate.weight), self.packed(parts.up.weight)
        return PerLayerRecord(gate=gate, up=up, after=self.norm(parts.after))

    def _experts(self, parts: Experts) -> ExpertsRecord:
        sigmoid = parts.sigmoid or Sigmoid(None, None, 1.0)
        router = _stacked([parts.router.weight, parts.gate])
        record = ExpertsRecord(
            router=self._floating(
                router.float() if isinstance(parts.all.up.weight, Blocks) else router.to(self._dtype)
            ),
            router_bias=self._floats(parts.router.bias),
            all=self._mlp(parts.all),
            count=len(parts.router.weight),
            chosen=parts.chosen,
            over_all=parts.over_all,
            gates=parts.gate is not None,
            sigmoid=parts.sigmoid is not None,
            least=-1.0 if sigmoid.least is None else sigmoid.least,
            factor=sigmoid.factor,
            correction=self._floats(sigmoid.correction),
            scale=self._floats(parts.scale),
        )
        if parts.norms is not None:
            record.scored, record.before, record.after, record.after_own = map(self.norm, parts.norms)
        return record

    def _floating(self, weight: torch.Tensor) -> int:
        """Copy a weight as the kernels for floats read it, and return its address."""
        padded = weight.detach()
        if lacking := -weight.shape[-2] % LANES:  # padding copies all of it
            padded = nn.functional.pad(padded, (0, 0, 0, lacking))
        return self._memory.add(padded.unflatten(-2, (-1, LANES)).transpose(-2, -1))

    def _in_blocks(self, weights: Sequence[Blocks]) -> int:
        self._held.append(Packed(weights))
        return int(self._held[-1].address)

    def _floats(self, tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else self.address(tensor.detach().float().contiguous())


def _stacked(weights: Sequence[torch.Tensor | Blocks | None]) -> torch.Tensor:
    """Return the tensors among weights, stacked."""
    found = [each for each in weights if isinstance(each, torch.Tensor)]
    return found[0] if len(found) == 1 else torch.cat(found)


def narrowed(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in float32 as bfloat16, if no bit is lost. It may be so already. Raises WideWeights."""
    if weight.dtype is torch.bfloat16:
        return weight.detach()
    narrow = weight.detach().bfloat16()
    for part, whole in zip(narrow.split(_CHECKED), weight.detach().split(_CHECKED), strict=True):
        # As floats, denormals could be taken for zeros (torch.set_flush_denormal).
        if not torch.equal(part.float().view(torch.int32), whole.view(torch.int32)):
            raise WideWeights
    return narrow
