"""The state of a layer as bytes: whatever its attributes hold, tensors and plain values, described in JSON before them.

So no class of transformers is known here but the linear attention layers, which may keep keys and values beside their
state. Objects inside a state are those of a cache that a model has of its own: they are rebuilt on the shape of one
that was seen, never from a name in what is stored.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from keepwarm.core.ports import Bytes
from keepwarm.errors import CorruptRun

_LENGTH = 8  # bytes before a layer's description
# of transformers' linear attention layers: what beside an attention layer's own attributes is state
_LINEAR = (
    "conv_states",
    "recurrent_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Tensor)
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, IndexError, OverflowError, MemoryError)
_MODELS = ("transformers.models.", "transformers_modules.")


class OwnCache:
    """A cache that a model makes itself, of a class of its own or none: all of it is state."""

    def __init__(self, name: str, shape: Any) -> None:
        """`name` is the model's argument for it, and what it returns it as; `shape` is one that was seen."""
        self._name, self._shape = name, shape
        self.value: Any = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def shape(self) -> Any:
        return self._shape


def state_bytes(layers: Iterable[Any]) -> int:
    """What a snapshot of some layers weighs as they are now."""
    return sum(len(encoded(layer)) for layer in layers)


def attributes(layer: Any) -> Iterator[str]:
    """Names of those that hold a layer's state."""
    if isinstance(layer, LinearAttentionLayer):
        yield from _LINEAR
    elif isinstance(layer, OwnCache):
        yield "value"
    else:
        yield from (name for name, value in vars(layer).items() if _is_state(value))


def _is_state(value: Any, *, objects: bool = False) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str | int) and _is_state(item, objects=objects) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_state(item, objects=objects) for item in value)
    return isinstance(value, _PLAIN) or (objects and _is_object(value))


def _is_object(value: Any) -> bool:
    if isinstance(value, PreTrainedConfig | torch.nn.Module):
        return False
    known = isinstance(value, Cache | CacheLayerMixin | LinearAttentionCacheLayerMixin)
    return known or type(value).__module__.startswith(_MODELS)


def encoded(layer: Any) -> Bytes:
    """A layer's state, copied: 1-D uint8."""
    tensors: list[Bytes] = []

    def described(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            raw = value.detach().contiguous().cpu()
            tensors.append(raw.reshape(-1).view(torch.uint8).numpy() if raw.numel() else np.empty(0, np.uint8))
            return {"t": [str(value.dtype).removeprefix("torch."), [*value.shape]]}
        if isinstance(value, Mapping):
            return {"d": [[key, described(item)] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            return {"l" if isinstance(value, list) else "u": [*map(described, value)]}
        if isinstance(value, torch.device):
            return {"device": None}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if _is_object(value):
            parts = {name: item for name, item in vars(value).items() if _is_state(item, objects=True)}
            return {"o": [[name, described(item)] for name, item in parts.items()]}
        return {"v": value}

    text = json.dumps({name: described(getattr(layer, name)) for name in attributes(layer)}).encode()
    head = np.frombuffer(len(text).to_bytes(_LENGTH, "little") + text, np.uint8)
    return np.concatenate([head, *tensors])


def outline(layer: Any) -> dict[str, Any]:
    """What a layer's state is made of, without the numbers."""
    return _Reader(encoded(layer), torch.device("cpu")).described


def restore(layer: Any, data: Bytes, device: torch.device, seen: Mapping[str, Any] | None = None) -> None:
    """Raises CorruptRun for what is no state of such a layer, of which `seen` is the `outline` of one."""
    reader = _Reader(data, device)
    shapes = {"value": layer.shape} if isinstance(layer, OwnCache) else {}
    try:
        if seen is not None and not _fits(reader.described, seen, exactly=isinstance(layer, LinearAttentionLayer)):
            raise ValueError("its parts have other shapes or dtypes than the model's")
        values = {name: reader.value(item, shapes.get(name)) for name, item in reader.described.items()}
        reader.check_end()
        if isinstance(layer, OwnCache) and set(values) != {"value"}:
            raise ValueError(f"it has {sorted(values)}")
        odd = [name for name in values if name.startswith("__") or callable(getattr(type(layer), name, None))]
        if odd or (isinstance(layer, LinearAttentionLayer) and set(values) != set(_LINEAR)):
            raise ValueError(f"it has {sorted(values)}")
    except _UNREADABLE as error:
        raise CorruptRun(f"a recurrent state cannot be read: {error}") from error
    for name, value in values.items():
        setattr(layer, name, value)
    if isinstance(layer, LinearAttentionLayer):
        setattr(layer, "device", device)  # noqa: B010  # transformers declares it None


def _fits(found: Any, seen: Any, *, exactly: bool) -> bool:
    """Whether two values are described alike. Without `exactly` sizes may differ, and how many there are: what a model
    keeps of its own may grow with the prompt."""
    if isinstance(seen, Mapping) and isinstance(found, Mapping):
        if "t" in seen and "t" in found:
            (dtype, shape), (had, size) = found["t"], seen["t"]
            return bool(dtype == had and (shape == size if exactly else len(shape) == len(size)))
        same = found.keys() == seen.keys()
        return (same or not exactly) and all(_fits(found[k], seen[k], exactly=exactly) for k in found.keys() & seen)
    if isinstance(seen, list) and isinstance(found, list):
        same = len(found) == len(seen)
        return (same or not exactly) and all(_fits(a, b, exactly=exactly) for a, b in zip(found, seen, strict=False))
    return not exactly or type(found) is type(seen)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All in a value, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(tensors, value.values()))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(tensors, value))
    elif _is_object(value):
        yield from tensors(vars(value))


class _Reader:
    """The values in the bytes of a state, in the order in which they were written."""

    def __init__(self, data: Bytes, device: torch.device) -> None:
        self._data, self._device = data, device
        self._at = _LENGTH + int.from_bytes(data[:_LENGTH].tobytes(), "little")

    @property
    def described(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._data[_LENGTH : self._at].tobytes())
        return found

    def check_end(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes too many")

    def value(self, found: Any, shape: Any = None) -> Any:
        """`shape` is a value of this kind that was seen, for objects to be rebuilt on."""
        ((kind, value),) = found.items()
        if kind == "t":
            return self._tensor(_dtype(value[0]), value[1])
        if kind == "d":
            known = shape if isinstance(shape, Mapping) else {}
            return {key: self.value(item, known.get(key)) for key, item in value}
        if kind in ("l", "u"):
            seen = shape if isinstance(shape, list | tuple) else ()
            items = [self.value(item, seen[at] if at < len(seen) else None) for at, item in enumerate(value)]
            return items if kind == "l" else tuple(items)
        if kind == "o":
            if not _is_object(shape):
                raise ValueError("an object where none was seen")
            made = copy.copy(shape)
            for name, item in value:
                setattr(made, name, self.value(item, getattr(shape, name)))
            return made
        if kind == "device":
            return self._device
        return _dtype(value) if kind == "dtype" else value

    def _tensor(self, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        end = self._at + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if end > len(self._data):
            raise ValueError("it ends early")
        raw, self._at = self._data[self._at : end].copy(), end
        flat = torch.from_numpy(raw).view(dtype) if len(raw) else torch.empty(0, dtype=dtype)
        return flat.reshape(shape).to(self._device)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found
