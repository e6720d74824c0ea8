"""Runs steps through the compiled kernels, on weights packed from a transformers model.

For Llama-shaped models (RMSNorm, rotary embedding, grouped-query attention, SiLU-gated MLP) in float32 or bfloat16 on
the CPU. Everything else runs through transformers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedModel

from keepwarm.core.blocks import TokenIds
from keepwarm.core.identity import canonical_json, digest
from keepwarm.runtime.native.build import Kernels, done
from keepwarm.runtime.native.places import Placed, Region, Sequenced, scattered, works
from keepwarm.runtime.native.reads import Taking

_FAMILIES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_DIMS = (16, 32, 64, 128)
_LANES = 16
_POSITIONS = 4096  # of a piece of the rotary tables
_POINTERS = ("norm1", "bias", "q_norm", "k_norm", "norm2", "qkv", "o", "gate", "up", "down")


class _Layer(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in _POINTERS)


class _Model(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in ("layers", "hidden", "heads", "kv_heads", "dim", "inner", "vocab", "is_bf16")
        ),
        ("epsilon", ctypes.c_float),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("embedding", "head", "norm", "cosine", "sine")),
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


def unsupported(model: PreTrainedModel) -> str:
    """Why a model does not run here; empty when it does."""
    config: Any = model.config
    if type(model).__name__ not in _FAMILIES or not type(model).__module__.startswith("transformers.models."):
        return f"{type(model).__name__} is not one of {', '.join(sorted(_FAMILIES))}"
    if getattr(config, "hidden_act", None) != "silu":
        return f"activation {getattr(config, 'hidden_act', None)!r}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "sliding-window attention"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") in ("dynamic", "longrope") or rope.get("partial_rotary_factor", 1) != 1:
        return "its rotary embedding"
    body: Any = model.model
    modules = [*_linears(body), model.lm_head]
    if any(type(module) is not nn.Linear for module in modules):
        return "linear layers that are not plain (quantized, or with an adapter)"
    if (
        any(module.bias is not None for layer in body.layers for module in _biasless(layer))
        or model.lm_head.bias is not None
    ):
        return "biases beyond those of query, key and value"
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return "forward hooks"
    tensors = list(model.parameters())
    dtype = tensors[0].dtype
    if dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {dtype}"
    if any(t.dtype is not dtype or t.device.type != "cpu" or not t.is_contiguous() for t in tensors):
        return "weights of mixed dtype or device"
    attention = body.layers[0].self_attn
    if attention.head_dim not in _DIMS or any(module.in_features % _LANES for module in modules):
        return "widths that are no multiple of 16, or an unusual head width"
    return ""


def _linears(body: Any) -> Iterable[nn.Module]:
    for layer in body.layers:
        yield from (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, *_biasless(layer))


def _biasless(layer: Any) -> tuple[Any, ...]:
    return layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj


class LeanDecoder:
    """Forward passes over one model's weights, packed once. One call at a time."""

    def __init__(self, model: PreTrainedModel, kernels: Kernels) -> None:
        """Raises ValueError for a model that `unsupported` names a reason for."""
        if reason := unsupported(model):
            raise ValueError(reason)
        self._library = kernels.library
        self.digest = kernels.digest
        self._library.keepwarm_scratch.restype = ctypes.c_int64
        body: Any = model.model
        attention = body.layers[0].self_attn
        config: Any = model.config
        self._rotary = body.rotary_emb
        self.dtype = model.lm_head.weight.dtype
        self.deep: int = self._library.keepwarm_deep() if self.dtype is torch.bfloat16 else 1
        self._held: list[Any] = []  # tensors whose addresses the structures below hold
        self._layers = (_Layer * len(body.layers))(*(self._layer(layer) for layer in body.layers))
        self._model = _Model(
            layers=len(body.layers),
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            dim=attention.head_dim,
            inner=config.intermediate_size,
            vocab=model.lm_head.out_features,
            is_bf16=self.dtype is torch.bfloat16,
            epsilon=body.norm.variance_epsilon,
            scale=attention.scaling * 1.4426950408889634,  # the kernel's exponentials are powers of two
            embedding=self._address(body.embed_tokens.weight),
            head=self._packed(model.lm_head),
            norm=self._floats(body.norm.weight),
            layer=self._layers,
        )
        self.scaling: float = attention.scaling
        self._reached = 0
        self._tables: list[torch.Tensor] = [torch.empty(0, attention.head_dim // 2, dtype=torch.float32)] * 2
        self._grow(_POSITIONS)
        self.constants = digest(  # which the model's modules give beside weights: part of the arithmetic identity
            "keepwarm decoder constants 1",
            canonical_json([body.norm.variance_epsilon, attention.scaling]),
            *(table.numpy().tobytes() for table in self._tables),
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

    def _layer(self, layer: Any) -> _Layer:
        a, mlp = layer.self_attn, layer.mlp
        biases = [module.bias for module in (a.q_proj, a.k_proj, a.v_proj)]
        return _Layer(
            norm1=self._floats(layer.input_layernorm.weight),
            bias=None if biases[0] is None else self._floats(torch.cat(biases)),
            q_norm=self._floats(a.q_norm.weight) if hasattr(a, "q_norm") else None,
            k_norm=self._floats(a.k_norm.weight) if hasattr(a, "k_norm") else None,
            norm2=self._floats(layer.post_attention_layernorm.weight),
            qkv=self._packed(a.q_proj, a.k_proj, a.v_proj),
            o=self._packed(a.o_proj),
            gate=self._packed(mlp.gate_proj),
            up=self._packed(mlp.up_proj),
            down=self._packed(mlp.down_proj),
        )

    def _packed(self, *modules: Any) -> int:
        """Weights `[out, in]`, one under the other, as products.h or tiles.h has them, filled up with zeros."""
        weight = torch.cat([module.weight.detach() for module in modules])
        out, width = weight.shape
        weight = nn.functional.pad(weight, (0, -width % self.deep, 0, -out % _LANES))
        if self.deep > 1:
            weight = weight.unflatten(1, (-1, 2))
        return self._address(weight.unflatten(0, (-1, _LANES)).transpose(1, 2).contiguous())

    def _floats(self, tensor: torch.Tensor) -> int:
        return self._address(tensor.detach().float().contiguous())

    def _address(self, tensor: torch.Tensor) -> int:
        self._held.append(tensor.detach())
        return tensor.data_ptr()

    def _grow(self, positions: int) -> None:
        """Rotary tables, float32, as the model's own module makes them; piece by piece, so that what a position has
        does not depend on how many there are."""
        with torch.inference_mode():
            pieces = [
                self._rotary(torch.empty(1, dtype=torch.float32), torch.arange(start, start + _POSITIONS)[None])
                for start in range(self._reached, max(positions, 2 * self._reached), _POSITIONS)
            ]
            half = self._model.dim // 2
            cosine, sine = (
                torch.cat([table, *(piece[which][0, :, :half] for piece in pieces)])
                for which, table in enumerate(self._tables)
            )
        self._tables = [cosine, sine]
        self._model.cosine, self._model.sine = cosine.data_ptr(), sine.data_ptr()
        self._reached = len(cosine)


def _pointer(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)
