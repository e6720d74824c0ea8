"""vLLM's own router in a process of its own, before replicas that run."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
from tests.helpers.remotes import free_port

SECONDS = 180.0


@contextmanager
def routing(program: Path, policy: str, replicas: Sequence[str], *options: str) -> Iterator[str]:
    """Start the router before replicas, and yield its address."""
    port = free_port()
    own = ["--port", str(port), "--policy", policy, "--prometheus-port", str(free_port())]
    process = subprocess.Popen(
        [str(program), *own, *options, "--worker-urls", *replicas], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield reached(f"http://127.0.0.1:{port}", process)
    finally:
        process.terminate()
        process.wait(SECONDS)


def reached(url: str, process: subprocess.Popen[bytes]) -> str:
    """Wait until models are listed there. Raises AssertionError when the process ends, or after minutes."""
    until = time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < until:
        try:
            if httpx.get(f"{url}/v1/models", timeout=SECONDS).status_code == 200:
                return url
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"nothing answers at {url}")
