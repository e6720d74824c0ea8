"""Connections that nobody uses: how long they may stay open, and how many."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

from keepwarm.serving.settings import LimitsSection


class _State(enum.Enum):
    BUSY = enum.auto()  # a request is being read or answered, within limits of its own
    SILENT = enum.auto()  # between two requests
    HALF = enum.auto()  # the beginning of a request came, or nothing ever
    UNREAD = enum.auto()  # answered, or given up, and the client does not read what was sent


class Connections:
    """What is known of uvicorn's connections. Looked at now and then, by the event loop."""

    def __init__(self, limits: LimitsSection) -> None:
        self._limits = limits
        self._since: dict[Any, tuple[tuple[_State, int], float]] = {}  # in this state since when

    def look(self, there: Iterable[Any], now: float) -> None:
        """Close who is too slow, and of the idle ones beyond what may be open who have been so longest."""
        open_ones = [one for one in there if one.transport is not None]
        seen = {one: (_state(one), id(one.cycle)) for one in open_ones}
        before = self._since
        self._since = {
            one: before[one] if one in before and before[one][0] == state else (state, now)
            for one, state in seen.items()
        }
        for one, ((state, _), since) in self._since.items():
            if state is _State.HALF and now - since > self._limits.header_timeout:
                one.transport.close()
            elif state is _State.UNREAD and now - since > self._limits.send_timeout:
                one.transport.abort()  # closing would wait until all is read
        idle = [one for one in open_ones if seen[one][0] in (_State.SILENT, _State.HALF)]
        over = len(open_ones) - self._limits.max_connections
        for one in sorted(idle, key=lambda one: self._since[one][1])[: max(0, over)]:
            one.transport.close()


def _state(connection: Any) -> _State:
    cycle, transport = connection.cycle, connection.transport
    answered = cycle is None or cycle.response_complete
    if transport.is_closing() or (answered and transport.get_write_buffer_size()):
        return _State.UNREAD
    if not answered:
        return _State.BUSY
    # uvicorn gives up waiting for the next request as soon as a byte of it has come
    return _State.HALF if connection.timeout_keep_alive_task is None else _State.SILENT
