"""The state of a layer as bytes: all that its attributes hold, tensors and plain values, after a description in JSON.

The only transformers classes known here are the linear attention layers, which may keep keys and values besides their
state. Objects inside a state come from a model's own cache: they are rebuilt as copies of an object that was seen,
never from a name in the stored bytes.
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
# attributes of transformers' linear attention layers that are state, not keys and values
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
    """A cache that a model makes itself, as an object of its own class or as plain values. All of it is state."""

    def __init__(self, name: str, shape: Any) -> None:
        """`name` is the model's argument for it and its name in the output; `shape` is one that was seen."""
        self._name, self._shape = name, shape
        self.value: Any = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def shape(self) -> Any:
        return self._shape


class KernelState:
    """The state of one layer as the compiled kernels keep it."""

    def __init__(self, size: int) -> None:
        self.numbers = torch.zeros(size, dtype=torch.float32)


def state_bytes(layers: Iterable[Any]) -> int:
    """Return the bytes of a snapshot of these layers as they are now."""
    return sum(len(encoded(layer)) for layer in layers)


def attributes(layer: Any) -> Iterator[str]:
    """Yield the names of the attributes that hold a layer's state."""
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
    """Return a copy of a layer's state, 1-D uint8."""
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
    """Return the description of a layer's state, without the tensors' values."""
    return _Reader(encoded(layer), torch.device("cpu")).described


def restore(layer: Any, data: Bytes, device: torch.device, seen: Mapping[str, Any] | None = None) -> None:
    """Restore a layer's state. Raises CorruptRun if the bytes do not fit such a layer; `seen` is its `outline`."""
    reader = _Reader(data, device)
    shapes = {"value": layer.shape} if isinstance(layer, OwnCache) else {}
    try:
        if seen is not None and not _fits(reader.described, seen, exactly=_is_exact(layer)):
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


def _is_exact(layer: Any) -> bool:
    """Whether all states of such a layer have one form. A model's own cache may grow with the prompt."""
    return isinstance(layer, LinearAttentionLayer | KernelState)


def _fits(found: Any, seen: Any, *, exactly: bool) -> bool:
    """Whether two descriptions agree. Without `exactly`, sizes and numbers of parts may differ: a model's own cache may
    grow with the prompt."""
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
    """Yield all tensors in a value, at any depth."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(tensors, value.values()))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(tensors, value))
    elif _is_object(value):
        yield from tensors(vars(value))


class _Reader:
    """Reads the values from the bytes of a state, in the order in which they were written."""

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
        """Return a described value. `shape` is a value of this kind that was seen; objects are rebuilt as its copy."""
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
