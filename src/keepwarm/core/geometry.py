"""Shapes and sizes of a model's KV state.

One token costs `sum over layers of kv_heads * (key_dim + value_dim) * itemsize` bytes. The often quoted
`2 * layers * d_model * itemsize` holds only for multi-head attention with `heads * head_dim == d_model`: with grouped
or multi-query attention there are fewer key/value heads than query heads, and it overestimates by that factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keepwarm.errors import UnsupportedModel

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "float8_e4m3fn": 1}

STATE_BYTES = "state/bytes"  # dtype of a recurrent state: rows of bytes, whose meaning they say themselves

# Families whose config.json may leave out which layers are full: every n-th is, the others slide.
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "exaone4": 4}


@dataclass(frozen=True)
class LayerGeometry:
    """One layer's KV per token: keys `[kv_heads, key_dim]`, values `[kv_heads, value_dim]`.

    `window` is the number of last positions the layer attends to (None: all). In a store, `kept` is the number of last
    tokens of each block that are there (None: all).
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    kept: int | None = None

    def kept_from(self, start: int, end: int) -> int:
        """The first position of a block `[start, end)` that is there."""
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
        """Whether these are rows of encoded KV (`store.runfile.codec`) or a recurrent state: their widths are bytes."""
        return "/" in self.dtype

    @property
    def is_state(self) -> bool:
        """Whether this is a recurrent state at a position, as one token's row."""
        return self.dtype == STATE_BYTES

    @property
    def bytes_per_token(self) -> int:
        return sum(layer.elements() for layer in self.layers) * self.itemsize

    def block_bytes(self, length: int) -> int:
        """Bytes of a block of so many tokens in a store."""
        rows = ((layer, length - layer.kept_from(0, length)) for layer in self.layers)
        return sum(layer.elements() * count for layer, count in rows) * self.itemsize

    @property
    def stored(self) -> KVGeometry:
        """The same in a store: of a windowed layer a block keeps what steps behind it attend to."""
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
        """Tokens of the longest block that is stored in every layer as a whole, so that a match may end inside; None:
        every block is."""
        return min((layer.kept for layer in self.stored.layers if layer.kept is not None), default=None)

    def stored_bytes(self, tokens: int, step: int) -> int:
        """Bytes that a store has of a prompt in blocks of `step` tokens."""
        whole, rest = divmod(tokens, step)
        return whole * self.stored.block_bytes(step) + self.stored.block_bytes(rest)

    def loaded_bytes(self, tokens: int) -> int:
        """Bytes that a hit loads of a prompt, at least: what the steps behind it attend to."""
        return self.stored.block_bytes(tokens)

    def bytes_for(self, tokens: int) -> int:
        """Bytes that a model needs of a sequence: of a windowed layer at most its window."""
        return sum(
            layer.elements() * self.itemsize * (tokens if layer.window is None else min(tokens, layer.window))
            for layer in self.layers
        )

    def head_bytes(self, layer: int, kv: int) -> int:
        """Bytes of one head's one token; `kv` is 0 for keys and 1 for values."""
        geometry = self.layers[layer]
        return (geometry.value_dim if kv else geometry.key_dim) * self.itemsize

    @property
    def form(self) -> tuple[str, tuple[tuple[int, int, int], ...]]:
        """How its bytes lie: two of one form can stand in each other's place. A window changes nothing of that."""
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
    """`2 * layers * d_model * itemsize`: right for multi-head attention, an overestimate otherwise."""
    config = text_config(config)
    return 2 * _layers(config) * _hidden(config) * ITEMSIZE[dtype]


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a (possibly multimodal) configuration that describes the decoder."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def geometry_of(config: Mapping[str, Any], dtype: str | None = None) -> KVGeometry:
    """KV geometry from a Hugging Face `config.json`.

    Handles multi-head, grouped and multi-query attention, explicit `head_dim`, per-layer lists, separate key and value
    widths, latent attention as transformers caches it (one head: the compressed latent in the keys' place, the shared
    rotary key in the values'), sliding windows, layers without KV (recurrent or linear attention) and layers that read
    an earlier layer's KV. Raises UnsupportedModel naming the missing field.
    """
    outer, config = config, text_config(config)
    named = (part.get(key) for part in (config, outer) for key in ("dtype", "torch_dtype"))
    dtype = dtype or str(next((name for name in named if name), "float16")).removeprefix("torch.")
    if dtype not in ITEMSIZE:
        raise UnsupportedModel(f"KV dtype {dtype!r} is not known; expected one of {', '.join(ITEMSIZE)}")
    layers = _layers(config)
    heads = _first(config, "num_attention_heads", "n_head", "num_heads", "num_query_heads")
    heads_per_layer = _per_layer(heads, layers)
    kv_heads = _per_layer(_kv_heads(config, heads), layers)
    head_dim = config.get("head_dim") or _hidden(config) // max(heads_per_layer)
    key_dim, value_dim = head_dim, config.get("v_head_dim") or head_dim
    if config.get("kv_lora_rank") is not None:  # latent attention
        key_dim, value_dim = config["kv_lora_rank"], _first(config, "qk_rope_head_dim")
        kv_heads = [1] * layers
    own = layers - (config.get("num_kv_shared_layers") or 0)  # the last ones read an earlier layer's KV
    result: list[LayerGeometry] = []
    for i, (kind, window) in enumerate(layer_kinds(config)[:own]):
        special = _overrides(config, i, kind)
        width = special.get("head_dim")
        if kind != "stateful":
            result.append(
                LayerGeometry(
                    special.get("num_key_value_heads") or kv_heads[i], width or key_dim, width or value_dim, window
                )
            )
    return KVGeometry(tuple(result), dtype)


def layer_kinds(config: Mapping[str, Any]) -> list[tuple[str, int | None]]:
    """Per layer: ("full", None), ("sliding", window) or ("stateful", None) for layers with a recurrent state.

    Raises UnsupportedModel when the configuration lists another number of layers than it declares.
    """
    config = text_config(config)
    count = _layers(config)
    window = config.get("sliding_window")
    if config.get("use_sliding_window") is False:
        window = None
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if kinds is None:
        if not window:
            return [("full", None)] * count
        if config.get("use_sliding_window") and config.get("max_window_layers") is not None:
            first = config["max_window_layers"]
            return [("full", None) if i < first else ("sliding", window) for i in range(count)]
        every = config.get("sliding_window_pattern") or _FULL_EVERY.get(str(config.get("model_type")))
        if isinstance(every, str):  # "LLLG": three sliding layers, one full
            every = len(every)
        return [("full", None) if every and (i + 1) % every == 0 else ("sliding", window) for i in range(count)]
    if len(kinds) != count:
        raise UnsupportedModel(f"the configuration declares {count} layers but lists the kind of {len(kinds)}")
    result: list[tuple[str, int | None]] = []
    for kind in kinds:
        if kind in ("full_attention", "attention"):
            result.append(("full", None))
        elif kind in ("sliding_attention", "chunked_attention"):
            result.append(("sliding", window or config.get("attention_chunk_size")))
        else:
            result.append(("stateful", None))
    return result


def _layers(config: Mapping[str, Any]) -> int:
    return int(_first(config, "num_hidden_layers", "n_layer", "num_layers", "num_transformer_layers"))


def _overrides(config: Mapping[str, Any], layer: int, kind: str) -> Mapping[str, Any]:
    """Head count and width of one layer where they differ from the others' (Gemma 4's full layers)."""
    own = config.get("per_layer_config")
    if isinstance(own, Mapping):
        found: Mapping[str, Any] = own.get(layer) or own.get(str(layer)) or {}
        return found
    if kind != "full" or not config.get("global_head_dim"):
        return {}
    heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v", True) else None
    return {"head_dim": config["global_head_dim"], "num_key_value_heads": heads}


def _first(config: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise UnsupportedModel(
        f"the configuration has none of {', '.join(names)}: is this the config.json of a decoder-only language model?"
    )


def _hidden(config: Mapping[str, Any]) -> int:
    return int(_first(config, "hidden_size", "n_embd", "d_model", "model_dim"))


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
