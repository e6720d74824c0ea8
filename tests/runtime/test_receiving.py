"""Receiving from a server that stalls: signals are heeded, and what came in pieces is what was sent."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import xxhash

from keepwarm.core.reads import Reads, Replies
from keepwarm.runtime.native.reads import cached_reads

native = cached_reads()
pytestmark = pytest.mark.skipif(native is None, reason="no C++ compiler")
SIZE = 1000


def wanted(count: int, deadline: float, fd: int) -> tuple[Reads, Replies, list[np.ndarray], list[bytes]]:
    """So many units of one reply and one part each; where they go, and what is to be sent."""
    sent = [bytes([number % 256]) * SIZE for number in range(count)]
    targets = [np.zeros(SIZE, np.uint8) for _ in range(count)]
    parts = np.array([(0, SIZE, target.ctypes.data) for target in targets], Reads.PART)
    tasks = np.empty(count, Reads.TASK)
    units = np.empty(count, Replies.UNIT)
    for at, data in enumerate(sent):
        digest = xxhash.xxh3_128_intdigest(data)
        tasks[at] = (0, Reads.IN_PLACE, at, at + 1, digest & (1 << 64) - 1, digest >> 64)
        units[at] = (4 * at, 4 * at + 4, at, at + 1, at, at + 1, at, at + 1)
    sizes, order = np.full(count, SIZE, np.int64), np.arange(count, dtype=np.int32)
    replies = Replies(b"ASK\n" * count, sizes, order, units, fd, deadline)
    return Reads(parts, tasks, list(targets)), replies, targets, sent


@pytest.mark.parametrize("team", [1, 2])
def test_what_comes_in_pieces(team: int) -> None:
    """Pieces end anywhere, and some come later than the library waits at a time."""
    assert native is not None
    ours, theirs = socket.socketpair()
    reads, replies, targets, sent = wanted(12, time.monotonic() + 120, ours.fileno())
    whole = b"".join(b"$%d\r\n%b\r\n" % (SIZE, data) for data in sent)

    def serve() -> None:
        for at in range(0, len(whole), 997):
            theirs.sendall(whole[at : at + 997])
            time.sleep(0.15 if at % 5 == 0 else 0.01)

    server = threading.Thread(target=serve)
    server.start()
    assert native.receive(reads, replies, team=team)
    server.join()
    assert [target.tobytes() for target in targets] == sent
    ours.close(), theirs.close()


def test_it_ends_when_nobody_wants_it() -> None:
    assert native is not None
    ours, theirs = socket.socketpair()
    reads, replies, _, _ = wanted(1, time.monotonic() + 600, ours.fileno())
    asked = iter([True, True, False])
    with pytest.raises(TimeoutError):
        native.receive(reads, replies, go_on=lambda: next(asked))
    ours.close(), theirs.close()


STALLED = """
import socket, sys, time
from tests.runtime.test_receiving import native, wanted
ours, theirs = socket.socketpair()
reads, replies, _, _ = wanted(3, time.monotonic() + 600, ours.fileno())
trickles = sys.argv[1] == "trickles"
if trickles:
    import threading
    def trickle():
        theirs.sendall(b"$1000\\r\\n")
        while True:
            theirs.sendall(b"x")
            time.sleep(0.6)
    threading.Thread(target=trickle, daemon=True).start()
print("waiting", flush=True)
native.receive(reads, replies)
"""


@pytest.mark.parametrize("server", ["stalls", "trickles"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_process_that_waits(server: str, number: signal.Signals) -> None:
    handler = "import signal\ndef end(*_): raise SystemExit(3)\nsignal.signal(signal.SIGTERM, end)\n"
    command = [sys.executable, "-c", handler + STALLED, server]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == (3 if number is signal.SIGTERM else -signal.SIGINT), errors
    assert number is signal.SIGTERM or "KeyboardInterrupt" in errors
