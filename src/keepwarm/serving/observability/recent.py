"""The latest answers of each tenant in numbers, for its page: tokens by tier, times, why reuse ended. No texts."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from typing import Any

from keepwarm.core.results import Generation
from keepwarm.serving.protocols import misses
from keepwarm.serving.protocols.errors import Protocol
from keepwarm.serving.tenancy.tenants import Caller

ANSWERS = 200  # of one tenant
TENANTS = 256  # those that are silent longest are forgotten


class Recent:
    """Threads may share it."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, deque[dict[str, Any]]] = OrderedDict()
        self._lock = threading.Lock()
        self._last = 0

    def put(self, caller: Caller, protocol: Protocol, result: Generation, model: str | None = None) -> None:
        """Remember an answer, with its model where there are several."""
        with self._lock:
            self._last += 1
            shown = {"number": self._last, "at": time.time(), "protocol": protocol.value} | misses.numbers(result)
            shown |= {} if model is None else {"model": model}
            self._known.setdefault(caller.tenant, deque(maxlen=ANSWERS)).append(shown)
            self._known.move_to_end(caller.tenant)
            while len(self._known) > TENANTS:
                self._known.popitem(last=False)

    def since(self, caller: Caller, number: int) -> list[dict[str, Any]]:
        """Return a tenant's answers after the one with this number, the oldest first."""
        with self._lock:
            return [one for one in self._known.get(caller.tenant, ()) if one["number"] > number]

    def forget(self, caller: Caller) -> None:
        with self._lock:
            self._known.pop(caller.tenant, None)
