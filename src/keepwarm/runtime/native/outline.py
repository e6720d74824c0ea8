"""Turns a description into values for JSON, without the weights' numbers. It is part of the arithmetic identity."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from keepwarm.runtime.native.description import Description
from keepwarm.runtime.native.narrow import narrow_tensors

_COMPUTED = ("tables", "factors")  # functions, whose values are hashed elsewhere


class Outline:
    """Names each part of a model's description by where it lies in the model."""

    def __init__(self, model: nn.Module) -> None:
        tensors = chain(model.named_parameters(), model.named_buffers())  # weights in blocks are buffers
        found = sorted((tensor.data_ptr(), name, tensor) for name, tensor in tensors if tensor.numel())
        self._starts = [start for start, _, _ in found]
        self._found = [(name, tensor) for _, name, tensor in found]
        self._widens = bool(narrow_tensors(model))

    def of(self, parts: Description) -> Any:
        """Return values for JSON. They differ for two descriptions that compute different results from the same
        weights: because of a factor, of the places of norms, or of which rows are queries and which are keys."""
        told = [field.name for field in fields(parts) if field.name not in _COMPUTED]
        return self._of({name: getattr(parts, name) for name in told})

    def _of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._place(value)
        if is_dataclass(value):
            return {field.name: self._of(getattr(value, field.name)) for field in fields(value)}
        if isinstance(value, dict):
            return {name: self._of(each) for name, each in value.items()}
        return [self._of(each) for each in value] if isinstance(value, tuple) else value

    def _place(self, tensor: torch.Tensor) -> list[Any]:
        """Return which part of which parameter or buffer a tensor is, counted in numbers, not bytes. For a copy, such
        as a norm, return its digest."""
        at = bisect_right(self._starts, tensor.data_ptr()) - 1
        name, whole = self._found[max(at, 0)]
        offset = tensor.data_ptr() - whole.data_ptr()
        if at < 0 or offset >= whole.numel() * whole.element_size():
            numbers = (
                tensor.float() if self._widens and tensor.dtype is torch.bfloat16 else tensor
            )  # as of a model whose weights were widened
            held = numbers.detach().contiguous().view(torch.uint8).cpu().numpy()
            return [hashlib.sha256(held.tobytes()).hexdigest(), list(tensor.shape)]
        return [name, offset // tensor.element_size(), list(tensor.shape), list(tensor.stride())]
