"""The RAM tier of a process whose KV is on a device."""

from __future__ import annotations

from collections.abc import Callable

from keepwarm.core.ports import Bytes, Policy
from keepwarm.store.ram.tier import RamTier
from keepwarm.store.retention import Retention
from keepwarm.store.runfile.layout import Run


class RegisteredRam(RamTier):
    """Registers the bytes of its runs with the device, which then copies from where they lie."""

    def __init__(self, cap: int, register: Callable[[Bytes], object], *, policy: Policy | None = None) -> None:
        super().__init__(cap, policy=policy)
        self._register = register

    def put(self, run: Run, retention: Retention | None = None, allowed: Callable[[], bool] = lambda: True) -> bool:
        """See `RamTier.put`."""
        entered = super().put(run, retention, allowed)
        if entered:
            self._register(run.data)
        return entered
