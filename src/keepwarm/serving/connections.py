"""Unused connections: how long they may stay open, and how many."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import h11

from keepwarm.serving.settings import LimitsSection


class _State(enum.Enum):
    BUSY = enum.auto()  # a request is being read or answered, within limits of its own
    SILENT = enum.auto()  # between two requests
    HALF = enum.auto()  # only the beginning of a request has come, or nothing yet
    UNREAD = enum.auto()  # the client does not read what was sent


_PROGRESS = 1 << 14  # bytes; a client that reads this many in time is only slow


class Connections:
    """Watches uvicorn's connections. The event loop looks at them now and then."""

    def __init__(self, limits: LimitsSection) -> None:
        self._limits = limits
        self._since: dict[Any, tuple[tuple[_State, int, int], float]] = {}  # state, and since when

    def look(self, there: Iterable[Any], now: float) -> None:
        """Close connections that are too slow, and the longest idle ones beyond the number that may be open."""
        open_ones = [one for one in there if one.transport is not None]
        unread = {one: one.transport.get_write_buffer_size() // _PROGRESS for one in open_ones}
        seen = {one: (_state(one), id(one.cycle), unread[one]) for one in open_ones}
        before = self._since
        self._since = {
            one: before[one] if one in before and before[one][0] == state else (state, now)
            for one, state in seen.items()
        }
        for one, ((state, *_), since) in self._since.items():
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
    if transport.is_closing() or (transport.get_write_buffer_size() if answered else connection.flow.write_paused):
        return _State.UNREAD
    if not answered:
        return _State.BUSY
    # uvicorn stops its own clock as soon as a byte of the next request has come; part of a body may also be missing
    waits = connection.timeout_keep_alive_task is not None and connection.conn.their_state is h11.IDLE
    return _State.SILENT if waits else _State.HALF
