"""The latest answers of each tenant in numbers, for its page: tokens by tier, times, why reuse ended. No texts."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from keepwarm.core.results import Generation
from keepwarm.serving.protocols import misses
from keepwarm.serving.protocols.errors import Protocol
from keepwarm.serving.tenancy.tenants import Caller

ANSWERS = 200  # of one tenant
TENANTS = 256  # those that are silent longest are forgotten


@dataclass(frozen=True)
class _Kept:
    """Of one tenant."""

    forgot: int = 0  # the last number when it was told to forget
    answers: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=ANSWERS))


class Recent:
    """Threads may share it."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Kept] = OrderedDict()
        self._lock = threading.Lock()
        self._last = 0
        self._start = secrets.token_hex(8)

    def put(self, caller: Caller, protocol: Protocol, result: Generation, model: str | None = None) -> None:
        """Remember an answer, with its model where there are several."""
        with self._lock:
            self._last += 1
            shown = {"number": self._last, "at": time.time(), "protocol": protocol.value} | misses.numbers(result)
            shown |= {} if model is None else {"model": model}
            self._known.setdefault(caller.tenant, _Kept()).answers.append(shown)
            self._known.move_to_end(caller.tenant)
            while len(self._known) > TENANTS:
                self._known.popitem(last=False)

    def since(self, caller: Caller, number: int) -> tuple[str, list[dict[str, Any]]]:
        """Return the name of the series of a tenant's answers, and those after the one with this number, the oldest
        first. Another name says that earlier answers are forgotten: the service started again, or was told to forget.
        """
        with self._lock:
            kept = self._known.get(caller.tenant, _Kept())
            if number > self._last:  # it was given out before a restart
                number = 0
            return f"{self._start}-{kept.forgot}", [one for one in kept.answers if one["number"] > number]

    def forget(self, caller: Caller) -> None:
        with self._lock:
            if caller.tenant in self._known:
                self._known[caller.tenant] = _Kept(self._last)
