"""Running a command with all that it starts, so that nothing of it is left beside the next measurement."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MARK = "KEEPWARM_BENCH_STEP"  # in the environment of all that a command starts, whatever session it is in
ENDING = 30  # seconds that a command has to end what it started


def execute(command: Sequence[str], root: Path, environment: Mapping[str, str], log: Any, limit: float) -> str:
    """Run a command in `root` for at most `limit` seconds. Returns how it ended, or "" if all is well."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    process = subprocess.Popen(
        command, cwd=root, env={**environment, MARK: mark}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        code = process.wait(max(limit, 0.1))
    except subprocess.TimeoutExpired:
        return f"ended after {limit / 60:.0f} minutes"
    finally:
        with suppress(subprocess.TimeoutExpired, ProcessLookupError):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(ENDING)
        with suppress(ProcessLookupError):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        sweep(mark)
    return f"ended with {code}" if code else ""


def sweep(mark: str) -> None:
    """End what a command left running: servers are in sessions of their own. Only Linux tells their environment."""
    for told in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{MARK}={mark}\0".encode() in told.read_bytes():
                os.kill(int(told.parent.name), signal.SIGKILL)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: two runs at once would measure each other. Raises SystemExit if another run has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SystemExit(f"another run is under way: it holds {lock.name}") from None
        yield


@contextmanager
def stoppable() -> Iterator[None]:
    """Let a signal that ends this process raise SystemExit, so that a command is ended with all that it started."""

    def stop(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
