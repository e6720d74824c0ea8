"""Connections that are of no use are closed: idle ones over the limit, half requests, answers that nobody reads."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest
from tests.helpers.connecting import connect
from tests.helpers.processes import DEADLINE, ServerProcess

pytestmark = pytest.mark.slow

WHOLE = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
MOST = 6


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One that has little patience, and room for few."""
    limits = {"MAX_CONNECTIONS": MOST, "HEADER_TIMEOUT": 1, "SEND_TIMEOUT": 1, "BODY_TIMEOUT": 2}
    environment = {f"KEEPWARM__LIMITS__{name}": str(value) for name, value in limits.items()}
    process = ServerProcess(tiny_model, tmp_path_factory.mktemp("store"), environment=environment).ready()
    yield process
    assert process.stop() == 0


def until(condition: Callable[[], bool], why: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, why
        time.sleep(0.05)


def is_closed(one: socket.socket) -> bool:
    """Reads what there is."""
    one.setblocking(False)
    try:
        while one.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def answered(one: socket.socket) -> None:
    one.settimeout(DEADLINE)
    assert one.recv(1 << 16).startswith(b"HTTP/1.1 200")


def open_ones(server: ServerProcess) -> int:
    found = psutil.Process(server.pid).net_connections("tcp")
    return sum(one.status in ("ESTABLISHED", "CLOSE_WAIT") for one in found)


def test_idle_connections_over_the_limit_are_closed(server: ServerProcess) -> None:
    idle = [connect(server.url) for _ in range(3 * MOST)]
    for one in idle:
        one.sendall(WHOLE)
        answered(one)
    until(lambda: sum(not is_closed(one) for one in idle) <= MOST, "idle connections stay open")
    assert httpx.get(f"{server.url}/health", timeout=DEADLINE).status_code == 200
    for one in idle:
        one.close()


def test_half_a_request_is_not_waited_for(server: ServerProcess) -> None:
    head = b"POST /query HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
    for first in (b"", WHOLE):
        for half in (WHOLE[:12], head + b'{"que', head.replace(b"application/json", b"text/plain") + b"x"):
            with connect(server.url) as one:
                if first:
                    one.sendall(first)
                    answered(one)
                one.sendall(half)
                until(lambda: is_closed(one), f"{half!r} after {first!r} is waited for")


def test_what_is_sent_byte_by_byte_is_not_waited_for(server: ServerProcess) -> None:
    """Each byte after a whole request makes uvicorn's own clock forget."""
    with connect(server.url) as one:
        one.sendall(WHOLE)
        answered(one)
        end = time.monotonic() + DEADLINE
        while not is_closed(one):
            assert time.monotonic() < end
            try:
                one.setblocking(True)
                one.sendall(b"G")
            except OSError:
                break
            time.sleep(0.2)


def test_an_answer_that_nobody_reads_is_given_up(server: ServerProcess) -> None:
    until(lambda: open_ones(server) == 0, "others are still open")
    with connect(server.url) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        ask = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"
        one.sendall(ask)
        answered(one)
        one.sendall(ask * 300)  # whose answers are more than all buffers on the way hold
        assert open_ones(server) == 1
        until(lambda: open_ones(server) == 0, "it stays open")
