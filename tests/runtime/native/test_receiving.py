"""Receiving from a server that stalls: signals are heeded, and what came in pieces is what was sent."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from tests.helpers.receiving import SIZE, native, wanted

pytestmark = pytest.mark.skipif(native is None, reason="no C++ compiler")


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
from tests.helpers.receiving import native, wanted
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


@pytest.mark.slow
@pytest.mark.parametrize("server", ["stalls", "trickles"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_process_that_waits(server: str, number: signal.Signals) -> None:
    handler = (  # who starts in the background ignores SIGINT from birth
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def end(*_): raise SystemExit(3)\nsignal.signal(signal.SIGTERM, end)\n"
    )
    command = [sys.executable, "-c", handler + STALLED, server]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == (3 if number is signal.SIGTERM else -signal.SIGINT), errors
    assert number is signal.SIGTERM or "KeyboardInterrupt" in errors
