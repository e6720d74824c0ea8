"""The RAM tier of a process whose KV is on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from keepwarm.core.memory import OWN_PAGES, own_bytes
from keepwarm.core.ports import Bytes, Policy
from keepwarm.store.ram.tier import RamTier
from keepwarm.store.retention import Retention
from keepwarm.store.runfile.layout import Run


class RegisteredRam(RamTier):
    """Keeps its runs in pages of their own, which are registered with the device: it then copies from where they lie.
    Whoever puts a run there waits for that copy, and may have the bytes that it came with for as long."""

    def __init__(self, cap: int, register: Callable[[Bytes], object], *, policy: Policy | None = None) -> None:
        super().__init__(cap, policy=policy)
        self._register = register

    def put(self, run: Run, retention: Retention | None = None, allowed: Callable[[], bool] = lambda: True) -> bool:
        """See `RamTier.put`."""
        entered = super().put(run, retention, allowed)
        if entered and run.data.nbytes >= OWN_PAGES:
            data = own_bytes(run.data.nbytes)
            data[:] = run.data
            self._register(data)
            with self._lock:
                if self._runs.get(run.id) is run:  # not evicted meanwhile
                    self._runs[run.id] = replace(run, data=data)
        return entered
