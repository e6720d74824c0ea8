"""Shapes and sizes of a model's KV state.

One token costs `sum over layers of kv_heads * (key_dim + value_dim) * itemsize` bytes. The often quoted
`2 * layers * d_model * itemsize` holds only for multi-head attention with `heads * head_dim == d_model`. With grouped
or multi-query attention there are fewer key/value heads than query heads, and the formula overestimates by that factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keepwarm.core.kinds import first, layer_count, layer_kinds, text_config
from keepwarm.errors import UnsupportedModel

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "float8_e4m3fn": 1}

STATE_BYTES = "state/bytes"  # dtype of a recurrent state: rows of bytes that describe themselves

_WITHOUT_KV = ("stateful", "none")  # kinds of layers
_OLD_HEADS = ("n_heads", "decoder_attention_heads", "num_decoder_attention_heads", "attention_heads")


@dataclass(frozen=True)
class LayerGeometry:
    """One layer's KV per token: keys `[kv_heads, key_dim]`, values `[kv_heads, value_dim]`.

    `window` is the number of last positions that the layer attends to (None: all). In a store, `kept` is the number of
    last tokens of each block that are kept (None: all).
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    kept: int | None = None

    def kept_from(self, start: int, end: int) -> int:
        """The first position of a block `[start, end)` that is kept."""
        return start if self.kept is None else max(start, end - self.kept)

    def elements(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class KVGeometry:
    """All layers' KV per token, in one dtype."""

    layers: tuple[LayerGeometry, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        return 1 if self.is_coded else ITEMSIZE[self.dtype]

    @property
    def is_coded(self) -> bool:
        """Whether these are rows of encoded KV (`store.runfile.codec`) or a recurrent state: widths are in bytes."""
        return "/" in self.dtype

    @property
    def is_state(self) -> bool:
        """Whether this is a recurrent state at a position, stored as one token's row."""
        return self.dtype == STATE_BYTES

    @property
    def bytes_per_token(self) -> int:
        return sum(layer.elements() for layer in self.layers) * self.itemsize

    def block_bytes(self, length: int) -> int:
        """Bytes of a block of `length` tokens in a store."""
        rows = ((layer, length - layer.kept_from(0, length)) for layer in self.layers)
        return sum(layer.elements() * count for layer, count in rows) * self.itemsize

    @property
    def stored(self) -> KVGeometry:
        """The geometry in a store: in a windowed layer, a block keeps only the tokens that later steps attend to."""
        if all(layer.window is None for layer in self.layers):
            return self
        return replace(
            self,
            layers=tuple(
                layer if layer.window is None else replace(layer, kept=max(1, layer.window - 1))
                for layer in self.layers
            ),
        )

    @property
    def longest_part(self) -> int | None:
        """Length of the longest block that every layer stores as a whole, so that a match may end inside it. None:
        blocks of any length."""
        return min((layer.kept for layer in self.stored.layers if layer.kept is not None), default=None)

    def stored_bytes(self, tokens: int, step: int) -> int:
        """Bytes of a prompt of `tokens` tokens in a store, in blocks of `step` tokens."""
        whole, rest = divmod(tokens, step)
        return whole * self.stored.block_bytes(step) + self.stored.block_bytes(rest)

    def loaded_bytes(self, tokens: int) -> int:
        """Least bytes that a hit of `tokens` tokens loads: those that later steps attend to."""
        return self.stored.block_bytes(tokens)

    def bytes_for(self, tokens: int) -> int:
        """Bytes that a model needs for a sequence of `tokens` tokens; a windowed layer needs at most its window."""
        return sum(
            layer.elements() * self.itemsize * (tokens if layer.window is None else min(tokens, layer.window))
            for layer in self.layers
        )

    def head_bytes(self, layer: int, kv: int) -> int:
        """Bytes of one token in one head; `kv` is 0 for keys and 1 for values."""
        geometry = self.layers[layer]
        return (geometry.value_dim if kv else geometry.key_dim) * self.itemsize

    @property
    def form(self) -> tuple[str, tuple[tuple[int, int, int], ...]]:
        """The layout of its bytes: KV of equal forms is interchangeable. A window does not change the form."""
        return self.dtype, tuple((layer.kv_heads, layer.key_dim, layer.value_dim) for layer in self.layers)

    def describe(self) -> dict[str, Any]:
        """A JSON-ready form; `from_description` reads it back."""
        rows = ([g.kv_heads, g.key_dim, g.value_dim, g.window, g.kept] for g in self.layers)
        return {"dtype": self.dtype, "layers": [row if row[-1] is not None else row[:-1] for row in rows]}

    @classmethod
    def from_description(cls, described: Mapping[str, Any]) -> KVGeometry:
        return cls(tuple(LayerGeometry(*row) for row in described["layers"]), described["dtype"])

    @classmethod
    def uniform(cls, layers: int, kv_heads: int, head_dim: int, dtype: str) -> KVGeometry:
        return cls((LayerGeometry(kv_heads, head_dim, head_dim),) * layers, dtype)


def naive_bytes_per_token(config: Mapping[str, Any], dtype: str) -> int:
    """`2 * layers * d_model * itemsize`: correct for multi-head attention, an overestimate otherwise."""
    config = text_config(config)
    return 2 * layer_count(config) * _hidden(config) * ITEMSIZE[dtype]


def geometry_of(config: Mapping[str, Any], dtype: str | None = None) -> KVGeometry:
    """Derive the KV geometry from a Hugging Face `config.json`.

    Handles multi-head, grouped and multi-query attention, explicit `head_dim`, per-layer lists, separate key and value
    widths, latent attention as transformers caches it (one head: the compressed latent in place of the keys, the shared
    rotary key in place of the values), sliding windows, index keys (a layer of their own, in two halves), layers
    without KV (recurrent or linear attention, or only a mixture of experts) and layers that read an earlier layer's KV.
    Raises UnsupportedModel, which names the missing field.
    """
    outer, config = config, text_config(config)
    named = (part.get(key) for part in (config, outer) for key in ("dtype", "torch_dtype"))
    dtype = dtype or str(next((name for name in named if name), "float16")).removeprefix("torch.")
    if dtype not in ITEMSIZE:
        raise UnsupportedModel(f"KV dtype {dtype!r} is not known; expected one of {', '.join(ITEMSIZE)}")
    kinds = layer_kinds(config)
    own = len(kinds) - (config.get("num_kv_shared_layers") or 0)  # the last ones read an earlier layer's KV
    if all(kind in _WITHOUT_KV for kind, _ in kinds[:own]):
        return KVGeometry((), dtype)
    widths = _widths(config, len(kinds))
    result: list[LayerGeometry] = []
    for i, (kind, window) in enumerate(kinds[:own]):
        if kind not in _WITHOUT_KV:
            result.append(_layer(config, i, kind, window, widths[i]))
        if kind == "indexed" and (index := _index_width(config, i)):
            result.append(LayerGeometry(1, index - index // 2, index // 2))
    return KVGeometry(tuple(result), dtype)


def _widths(config: Mapping[str, Any], layers: int) -> list[tuple[int, int, int]]:
    """Key/value heads of each layer and their widths, unless the configuration overrides them for the layer."""
    if config.get("kv_lora_rank") is not None:  # latent attention
        return [(1, config["kv_lora_rank"], first(config, "qk_rope_head_dim"))] * layers
    heads = first(config, "num_attention_heads", "n_head", "num_heads", "num_query_heads", *_OLD_HEADS)
    heads_per_layer = _per_layer(heads, layers)
    kv_heads = _per_layer(_kv_heads(config, heads), layers)
    head_dim = config.get("head_dim") or config.get("attention_head_dim")
    head_dim = head_dim or _hidden(config) // max(heads_per_layer)
    return [(count, head_dim, config.get("v_head_dim") or head_dim) for count in kv_heads]


def _layer(
    config: Mapping[str, Any], number: int, kind: str, window: int | None, widths: tuple[int, int, int]
) -> LayerGeometry:
    special = _overrides(config, number, kind)
    heads, key, value = widths
    if config.get("kv_lora_rank") is not None:
        own = special.get("kv_lora_rank"), special.get("qk_rope_head_dim")
        return LayerGeometry(heads, own[0] or key, own[1] or value, window)
    width = special.get("head_dim")
    return LayerGeometry(special.get("num_key_value_heads") or heads, width or key, width or value, window)


def _index_width(config: Mapping[str, Any], layer: int) -> int:
    """Width of the keys by which sparse attention selects what to read (DeepSeek V3.2); 0 if it shares a layer's."""
    kinds = config.get("indexer_types")
    if isinstance(kinds, list) and layer < len(kinds) and kinds[layer] == "shared":
        return 0
    return int(config.get("index_head_dim") or config.get("indexer_head_dim") or 0)


def _overrides(config: Mapping[str, Any], layer: int, kind: str) -> Mapping[str, Any]:
    """Head count and widths of one layer, if they differ from the other layers' (Gemma 4's full layers, MiMo's sliding
    ones)."""
    own = config.get("per_layer_config")
    if isinstance(own, Mapping):
        found: Mapping[str, Any] = own.get(layer) or own.get(str(layer)) or {}
        return found
    if config.get("model_type") == "mimo_v2_flash" and kind == "sliding":
        return {"num_key_value_heads": 2 * config["num_key_value_heads"]}
    if kind != "full" or not config.get("global_head_dim"):
        return {}
    heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v", True) else None
    return {"head_dim": config["global_head_dim"], "num_key_value_heads": heads}


def _hidden(config: Mapping[str, Any]) -> int:
    return int(first(config, "hidden_size", "n_embd", "d_model", "model_dim"))


def _per_layer(value: int | Sequence[int], layers: int) -> list[int]:
    if isinstance(value, int):
        return [value] * layers
    if len(value) != layers:
        raise UnsupportedModel(f"the configuration declares {layers} layers but lists the heads of {len(value)}")
    return [int(v) for v in value]


def _kv_heads(config: Mapping[str, Any], heads: int | Sequence[int]) -> int | Sequence[int]:
    if config.get("new_decoder_architecture"):  # Falcon: transformers repeats its few KV heads before caching them
        return heads
    for name in ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"):
        if config.get(name) is not None and not (name == "num_kv_heads" and config.get("multi_query")):
            value: int | Sequence[int] = config[name]
            return value
    return 1 if config.get("multi_query") else heads
