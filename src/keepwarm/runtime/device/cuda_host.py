"""Registers memory of the host with NVIDIA's driver.

The driver is asked itself, not through CUDA's runtime: what fails there is reported by torch's next launch.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from keepwarm.runtime.device.registered import Registered

log = logging.getLogger(__name__)

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: for all devices


def registered(device: int) -> Registered | None:
    """Return the memory that is registered with a device; None if there is no such driver."""
    try:
        driver = HostMemory(ctypes.CDLL("libcuda.so.1"), device)
    except (OSError, AttributeError, RuntimeError) as error:  # not NVIDIA's, or not on Linux
        log.info("the host's memory is copied to the device through pinned memory: %s", error)
        return None
    return Registered(driver.register, driver.unregister)


class HostMemory:
    """The driver's calls, in the context that torch uses."""

    def __init__(self, driver: Any, device: int) -> None:
        self._driver = driver
        number, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._check("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(number), device))
        retained = driver.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), number)
        self._check("cuDevicePrimaryCtxRetain", retained)
        self._is_told = False

    def register(self, address: int, nbytes: int) -> bool:
        """Let devices copy from memory where it lies. Return False if that is refused."""
        with self._current():
            size = ctypes.c_size_t(nbytes)
            status = self._driver.cuMemHostRegister_v2(ctypes.c_void_p(address), size, ctypes.c_uint(_PORTABLE))
        if status and not self._is_told:
            self._is_told = True
            log.warning("memory of the host is not registered, so hits from RAM are copied twice: CUresult %d", status)
        return not status

    def unregister(self, address: int) -> bool:
        """Undo `register`. Return False if the driver refuses; the memory must then stay."""
        with self._current():
            status = self._driver.cuMemHostUnregister(ctypes.c_void_p(address))
        if status:
            log.warning("memory of the host stays registered with the GPU: CUresult %d", status)
        return not status

    @contextmanager
    def _current(self) -> Iterator[None]:
        status = self._driver.cuCtxPushCurrent_v2(self._context)
        try:
            yield
        finally:
            if not status:
                self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    @staticmethod
    def _check(name: str, status: int) -> None:
        if status:
            raise RuntimeError(f"{name} failed with CUresult {status}")
