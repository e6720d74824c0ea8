"""The acceptance script of GPUs, on the adversarial device: its checks, and that its times can be taken."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import gpu
from benchmarks.acceptance.models import FAMILIES

from keepwarm.runtime.device import PORTS
from keepwarm.runtime.device.copies import Copies
from keepwarm.runtime.device.port import Stream
from keepwarm.testing.device import AdversarialPort

pytestmark = [pytest.mark.slow, pytest.mark.host_memory("the script takes that device itself")]


def run(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    ended = gpu.main(["--device", "adversarial", "--attention", "model", "--output", str(folder), *arguments])
    return ended, [json.loads(line) for line in (folder / "gpu-adversarial.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_answer_from_the_cache_is_right(family: str, tmp_path: Path) -> None:
    before = dict(PORTS)
    ended, lines = run(tmp_path, "--part", "checks", "--family", family, "--dtype", "bfloat16")
    assert ended == 0
    (found,) = lines[1:]
    assert found["right"]["plain: disk"] == 9
    assert found["right"]["batch of 32"] == 32
    assert before == PORTS


@pytest.mark.skipif(find_spec("triton") is not None, reason="Triton is installed")
def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    _, lines = run(tmp_path, "--part", "checks", "--attention", "triton")
    assert [line["attention"] for line in lines[1:]] == ["triton"]
    assert "not installed" in lines[1]["left_out"]


def test_a_missing_wait_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_all = AdversarialPort.copy_all

    def hasty(port: AdversarialPort, copies: Copies, stream: Stream, pinned: list[Any]) -> None:
        copy_all(port, copies, stream, pinned)
        for staged in pinned:
            staged[...] = 0  # before the copy is done

    monkeypatch.setattr(AdversarialPort, "copy_all", hasty)
    ended, lines = run(tmp_path, "--part", "checks", "--family", "dense", "--dtype", "float32")
    assert ended == 1
    assert lines[-1]["wrong"] == "plain: RAM"


def test_times_are_taken_by_tier(tmp_path: Path) -> None:
    ended, lines = run(tmp_path, "--part", "times", "--size", "tiny", "--length", "1100")
    assert ended == 0
    assert {*lines[2]["ttft_ms"]} == {"cold", "device", "ram", "disk"}
    assert lines[-1]["requests"] == 32


def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert gpu.main(["--output", str(tmp_path)]) == 2
    assert "--device adversarial" in capsys.readouterr().err
