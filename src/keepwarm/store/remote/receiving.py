"""Receive large values from Redis directly into their final buffers."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import redis

from keepwarm.errors import CorruptRun
from keepwarm.store.remote.backend import remaining
from keepwarm.store.runfile.source import Gone

_LINE = 64  # bytes read ahead to see a reply's first line
_Command = tuple[Any, ...]


class _Receiving:
    """Methods that are added to a connection of redis-py."""

    _sock: socket.socket
    socket_timeout: float

    @property
    def descriptor(self) -> int:
        """The socket's file descriptor."""
        return self._sock.fileno()

    def bound(self, seconds: float) -> None:
        """Set the time limit for the next receive."""
        self._sock.settimeout(seconds)

    def receive(self, commands: Sequence[_Command], buffers: list[memoryview], deadline: float) -> None:
        self.send_packed_command(self.pack_commands(commands))  # type: ignore[attr-defined]
        ahead = b""
        waiting = list(buffers)
        for _, _, first, last in commands:
            while b"\r\n" not in ahead:
                ahead += self._some(_LINE, deadline)
            line, _, ahead = ahead.partition(b"\r\n")
            if line[:1] == b"-":
                raise self._parser.parse_error(line[1:].decode(errors="replace"))  # type: ignore[attr-defined]
            if line in (b"$0", b"$-1"):
                raise Gone("its bytes are gone")
            if line != b"$%d" % (last - first + 1):
                raise CorruptRun(f"a piece has other bytes than it should: expected {last - first + 1}, got {line!r}")
            left = last - first + 1
            while left:
                target = waiting[0][:left]
                if ahead:
                    count = min(len(ahead), len(target))
                    target[:count] = ahead[:count]
                    ahead = ahead[count:]
                else:
                    self.bound(remaining(deadline, "receiving a body"))
                    count = self._sock.recv_into(target)
                    if not count:
                        raise redis.exceptions.ConnectionError("closed while receiving")
                left -= count
                waiting[0] = waiting[0][count:]
                if not waiting[0]:
                    waiting.pop(0)
            while len(ahead) < 2:
                ahead += self._some(_LINE, deadline)
            if ahead[:2] != b"\r\n":
                raise CorruptRun("a reply is longer than it said")
            ahead = ahead[2:]
        self.bound(self.socket_timeout)

    def _some(self, count: int, deadline: float) -> bytes:
        self.bound(remaining(deadline, "receiving a body"))
        data = self._sock.recv(count)
        if not data:
            raise redis.exceptions.ConnectionError("closed while receiving")
        return data


def receiving(kind: type[Any]) -> type[Any]:
    """Return a subclass of a connection class of redis-py that can also `receive`."""
    return type(f"Receiving{kind.__name__}", (_Receiving, kind), {})
