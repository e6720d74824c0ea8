"""The manual's quickstart for vLLM, followed to the letter, but for the model, the port, and how vLLM is called."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.helpers.remotes import free_port

pytest.importorskip("vllm")

PAGE = Path(__file__).parents[2] / "docs" / "quickstart" / "vllm.md"
INSTALL, SERVE, ASK = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
PROGRAM = f"{sys.executable} -m vllm.entrypoints.openai.api_server --model"  # the CPU build's `vllm` finds no version


@contextmanager
def served(model: Path, port: int, folder: Path) -> Iterator[None]:
    """The server of the page's second step, until Ctrl-C."""
    command = SERVE.replace(f"vllm serve {MODEL}", f"exec {PROGRAM} {model} --served-model-name {MODEL} --port {port}")
    log = folder / f"{port}.log"
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("w") as said:
        child = subprocess.Popen(command, shell=True, cwd=folder, stdout=said, stderr=said, env=environment)
    try:
        until = time.monotonic() + 300
        while "Application startup complete" not in log.read_text():
            assert child.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until
            time.sleep(0.5)
        yield
    finally:
        child.send_signal(2)
        assert child.wait(120) == 0


def cached(port: int) -> int:
    """What the page's third step shows."""
    done = subprocess.run(ASK.replace(":8000", f":{port}"), shell=True, capture_output=True, text=True, check=False)
    numbers = re.findall(r'"cached_tokens":(\d+)', done.stdout)
    return int(numbers[0]) if numbers else 0


@pytest.mark.slow
def test_a_restarted_server_finds_what_was_asked(demo_folder: Path, tmp_path: Path) -> None:
    assert INSTALL.startswith("KEEPWARM_WHEEL=none pip install ")
    with served(demo_folder, port := free_port(), tmp_path):
        assert cached(port) == 0
    with served(demo_folder, port := free_port(), tmp_path):
        assert cached(port) > 1000
