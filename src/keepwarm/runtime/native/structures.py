"""The structures that the compiled kernels read, as model.h has them."""

from __future__ import annotations

import ctypes

_NUMBERS = (
    *("layers", "hidden", "heads", "inner", "vocab", "is_bf16", "widens", "narrow_tables", "tied"),
    *("experts", "chosen", "expert"),
)
_FACTS = ("per_layer", "interleaved", "centred", "wide", "parallel", "activation")
_FACTORS = (
    *("epsilon", "scale", "alpha", "limit", "embedded", "residual", "logit"),
    *("looked_up", "projected", "summed", "score_cap", "logit_cap"),
)


def _pointers(*names: str) -> tuple[tuple[str, type[ctypes.c_void_p]], ...]:
    return tuple((name, ctypes.c_void_p) for name in names)


def _integers(*names: str) -> tuple[tuple[str, type[ctypes.c_int32]], ...]:
    return tuple((name, ctypes.c_int32) for name in names)


class NormRecord(ctypes.Structure):
    _fields_ = _pointers("weight", "bias")


class MlpRecord(ctypes.Structure):
    _fields_ = (*_pointers("gate_bias", "up_bias", "down_bias", "gate", "up", "down"), ("inner", ctypes.c_int64))


class ExpertsRecord(ctypes.Structure):
    _fields_ = (
        *_pointers("router", "router_bias"),
        ("all", MlpRecord),
        *_integers("count", "chosen", "over_all", "gates", "sigmoid"),
        ("least", ctypes.c_float),
        ("factor", ctypes.c_float),
        *_pointers("correction", "scale"),
        *((name, NormRecord) for name in ("scored", "before", "after", "after_own")),
    )


class ConvolutionRecord(ctypes.Structure):
    _fields_ = (*_pointers("weight", "bias"), *_integers("kernel", "channels"))


class DeltaRecord(ctypes.Structure):
    _fields_ = (
        *_pointers("decay", "step", "norm", "skip"),
        *_integers("heads", "key_heads", "dim", "key_dim", "tiled", "unused"),
    )


class PerLayerRecord(ctypes.Structure):
    _fields_ = (*_pointers("gate", "up"), ("after", NormRecord))


class LayerRecord(ctypes.Structure):
    _fields_ = (
        *((name, NormRecord) for name in ("before", "q", "k", "v", "after", "before_mlp", "after_mlp")),
        *_pointers("qkv_bias", "o_bias", "cosine", "sine", "factors", "sinks", "gate_bias", "qkv", "o", "gate"),
        ("mlp", MlpRecord),
        ("experts", ExpertsRecord),
        ("convolution", ConvolutionRecord),
        ("delta", DeltaRecord),
        ("per_layer", PerLayerRecord),
        *_integers("kv_heads", "dim", "rotary", "shares", "window", "kv", "state"),
        ("factor", ctypes.c_float),
    )


class ModelRecord(ctypes.Structure):
    _fields_ = (
        *_integers(*_NUMBERS, *_FACTS),
        *((name, ctypes.c_float) for name in _FACTORS),
        *_pointers("embedding", "head", "errors", "per_layer_table", "per_layer_projection"),
        ("norm", NormRecord),
        ("per_layer_norm", NormRecord),
        ("layer", ctypes.POINTER(LayerRecord)),
    )


class NarrowingRecord(ctypes.Structure):
    _fields_ = (*_pointers("weight", "scale"), ("ranks", ctypes.c_int64))


class WideningRecord(ctypes.Structure):
    _fields_ = (*_pointers("weight"), *_integers("first", "rank"))


class AdapterLayerRecord(ctypes.Structure):
    _fields_ = (
        *((name, NarrowingRecord) for name in ("first", "o", "mlp", "down")),
        *_pointers("reads", "gates"),
        *((name, WideningRecord) for name in ("out", "gate", "up", "last")),
    )


class AdaptersRecord(ctypes.Structure):
    _fields_ = (*_pointers("adapter", "of", "sums", "narrow"), ("ranks", ctypes.c_int64))


class StepRecord(ctypes.Structure):
    _fields_ = (
        *_integers(
            "rows", "works", "outputs", "threads", "first", "last", "moves", "stopped", "places", "largest", "whole"
        ),
        *_pointers("tokens", "positions", "slots", "regions", "pages", "work", "members", "move", "wanted"),
        *_pointers("scratch", "logits", "take", "job", "wrong", "run", "keep"),
        ("runs", ctypes.c_int64),
        *_pointers("adapters"),  # the library without adapters does not know of it
    )
