"""Memory that the packed weights of a model share."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from keepwarm.runtime.native import memory
from keepwarm.runtime.native.memory import WeightMemory


def bytes_at(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


def test_weights_keep_their_bytes_side_by_side() -> None:
    held = WeightMemory()
    weights = [torch.randn(3, 5).t(), torch.randn(7).bfloat16(), torch.randn(64, 33).bfloat16()]
    addresses = [held.add(weight) for weight in weights]
    for weight, address in zip(weights, addresses, strict=True):
        assert bytes_at(address, weight.nbytes) == weight.contiguous().view(torch.uint8).numpy().tobytes()
    assert all(address % 64 == 0 for address in addresses)
    assert max(addresses) - min(addresses) < 8192  # so a huge page can hold all of them
    assert sum(held.storages.values()) == sum(weight.nbytes for weight in weights)


def test_a_full_mapping_is_followed_by_another_one(monkeypatch: Any) -> None:
    monkeypatch.setattr(memory, "_SHARED", 4096)
    held = WeightMemory()
    weights = [torch.randn(size) for size in (600, 600, 5000, 10)]  # the third is larger than a mapping
    addresses = [held.add(weight) for weight in weights]
    for weight, address in zip(weights, addresses, strict=True):
        assert bytes_at(address, weight.nbytes) == weight.numpy().tobytes()
    assert addresses[3] - addresses[1] == 2432  # 600 floats, up to the next line
