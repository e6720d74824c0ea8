"""The address that the service listens on, taken before anything is loaded."""

from __future__ import annotations

import contextlib
import errno
import socket

from keepwarm.errors import CannotListen

BACKLOG = 512  # connections that wait to be accepted
_OWN_HOST = "name an address of this machine with --host, such as 127.0.0.1"
_FREE_PORT = "name another one with --port, or take a free one with --port 0"
_STOP_IT = f"use or stop the Keepwarm that may run there, {_FREE_PORT}"


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on every address of a host; port 0 takes a free one. Raises CannotListen."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise CannotListen(f"server.host: {host!r} is no address ({error.strerror})", _OWN_HOST) from None
    with contextlib.ExitStack() as opened:
        listening = []
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                one = opened.enter_context(contextlib.closing(socket.socket(family, kind, protocol)))
            except OSError:  # a family that this machine does not support
                continue
            _take(one, host, port, address)
            listening.append(one)
        if not listening:
            raise CannotListen(f"server.host: nothing can listen on {host!r} here", _OWN_HOST)
        opened.pop_all()
        return listening


def _take(one: socket.socket, host: str, port: int, address: object) -> None:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if one.family == socket.AF_INET6:
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        one.bind(address)  # type: ignore[arg-type]
        one.listen(BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CannotListen(f"port {port} of {host} is in use already", _STOP_IT, busy=True) from None
        if error.errno == errno.EACCES:
            raise CannotListen(f"port {port} of {host} may not be used by this user", _FREE_PORT) from None
        said = error.strerror or str(error)
        raise CannotListen(f"server.host: cannot listen on {host!r} ({said})", _OWN_HOST) from None
