"""Runs a plan of copies on a CUDA stream, by as few calls as the installed software allows.

vLLM's kernels have `swap_blocks_batch`, which also serves ROCm. Without them `cuMemcpyBatchAsync` of the driver (CUDA
12.8 and later) takes a whole plan, and an older driver takes one copy at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from keepwarm.runtime.device.copies import Copies

Run = Callable[[Copies, int], None]  # a plan, and the stream's handle, which is also torch's current stream

_IN_STREAM_ORDER, _ANY_TIME = 1, 3  # CUmemcpySrcAccessOrder: when a source may be read
_BATCH_SINCE = 12080  # version of the driver's interface
_MOST = 8192  # copies in one call; ROCm's driver fails with more


@cache
def runner() -> Run:
    """Return the best way to run plans in this process."""
    if hasattr(torch.ops, "_C_cache_ops") and hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):
        return _by_vllm
    driver = ctypes.CDLL("libcuda.so.1")
    return batches(driver) or one_by_one(driver)


@cache
def is_there() -> bool:
    """Whether plans can be run: the driver's library is found, or vLLM's kernels."""
    try:
        return bool(runner())
    except (OSError, AttributeError):  # not NVIDIA's, or not on Linux
        return False


def batches(driver: Any) -> Run | None:
    """Return `cuMemcpyBatchAsync` of the driver's library, None if it has none."""
    found, name = ctypes.c_void_p(), b"cuMemcpyBatchAsync"
    status = driver.cuGetProcAddress_v2(name, ctypes.byref(found), _BATCH_SINCE, ctypes.c_uint64(0), None)
    return _Batches(found.value) if status == 0 and found.value else None


def one_by_one(driver: Any) -> Run:
    """Return `cuMemcpyAsync` of the driver's library."""
    return _OneByOne(driver)


def _by_vllm(plan: Copies, stream: int) -> None:
    for first in range(0, len(plan), _MOST):
        parts = [torch.from_numpy(of[first : first + _MOST]) for of in (plan.sources, plan.targets, plan.sizes)]
        torch.ops._C_cache_ops.swap_blocks_batch(*parts, plan.inward)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (("order", ctypes.c_uint), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint))


class _Batches:
    """`cuMemcpyBatchAsync`. After every call of the driver a thread waits for its turn to run Python again, so one call
    for a whole plan is far quicker than one for each copy while other threads are busy."""

    def __init__(self, address: int) -> None:
        pointers, count = [ctypes.c_void_p] * 3, ctypes.c_size_t
        rest = [count, ctypes.c_void_p, ctypes.c_void_p, count, ctypes.c_void_p, ctypes.c_void_p]
        self._call = ctypes.CFUNCTYPE(ctypes.c_uint, *pointers, *rest)(address)

    def __call__(self, plan: Copies, stream: int) -> None:
        if not len(plan):
            return
        # Pinned bytes to the device do not change until the copy is done; pages do, so they are read in their turn.
        attributes = _Attributes(order=_ANY_TIME if plan.inward else _IN_STREAM_ORDER)
        of, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        lists = [each.ctypes.data for each in (plan.targets, plan.sources, plan.sizes)]
        status = self._call(
            *lists, len(plan), ctypes.byref(attributes), ctypes.byref(of), 1, ctypes.byref(failed), stream
        )
        _check("cuMemcpyBatchAsync", status)


class _OneByOne:
    """`cuMemcpyAsync`."""

    def __init__(self, driver: Any) -> None:
        self._call = driver.cuMemcpyAsync
        self._call.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)

    def __call__(self, plan: Copies, stream: int) -> None:
        for source, target, size in zip(plan.sources.tolist(), plan.targets.tolist(), plan.sizes.tolist(), strict=True):
            _check("cuMemcpyAsync", self._call(target, source, size, stream))


def _check(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{name} failed with CUresult {status}")
