"""Acceptance on one device: what must be equal to the bit, then what it costs. About twenty minutes on one GPU.

    python -m benchmarks.gpu [--device cuda] [--part checks times] [--size 0.6b 8b] [--output benchmarks/results-gpu]

Run it from the checkout; it needs torch, transformers and Keepwarm's few pure packages, no network and no weights.
`checks` stops at the first answer that differs from the one without the cache (`--keep-going`: it goes on, and says so
at the end). There memory is filled with NaN before
it is given out, and on CUDA every copy and every write is made late (`torch.cuda._sleep`), so that a missing wait
shows. `times` runs models of real shapes with random weights: time to the first token by tier and length, beside the
copy's ceiling, a bare step and transformers. Writes `gpu-NAME.jsonl`. It ends with 1 when something was wrong.
Both are done through transformers and, where Triton is, with `attention="triton"`.

`--device adversarial --size tiny` tries all of it on a machine without a GPU (`keepwarm.testing.device`).
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks.acceptance.checks import DTYPES, Case, Checks, Subject, answer_child, subjects
from benchmarks.acceptance.models import FAMILIES, SIZES
from benchmarks.acceptance.times import ceilings, measured

from keepwarm.runtime.device import PORTS
from keepwarm.runtime.device.cuda import CudaPort
from keepwarm.runtime.gpu_kernels.reasons import missing

ATTENTION = ("model", "triton")  # through transformers, and by the kernels for GPUs
_LATE = 400_000  # cycles, some 0.2 ms
_POISONED = 1 << 30  # bytes at most


class LateCudaPort(CudaPort):
    """CUDA whose copies and writes begin late, as they may on a busy device."""

    def _copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        with self.on(stream):
            torch.cuda._sleep(_LATE)
        super()._copy(target, source, stream)

    def write(self, target: torch.Tensor, rows: torch.Tensor, at: torch.Tensor | None = None) -> None:
        torch.cuda._sleep(_LATE)
        super().write(target, rows, at)


def poison() -> None:
    """Fill the free memory of the CUDA device that torch gives out next with NaN."""
    if torch.cuda.is_available():
        size = min(torch.cuda.mem_get_info()[0] // 2, _POISONED)
        kept = [torch.full((size >> shift,), 0xFF, dtype=torch.uint8, device="cuda") for shift in range(1, 8)]
        torch.cuda.synchronize()
        del kept


def use(device: str) -> None:
    """Let engines keep KV on the device that is to be checked."""
    if device == "adversarial":
        from keepwarm.testing.device import AdversarialPort

        PORTS["cpu"] = AdversarialPort
    elif device == "cuda":
        PORTS["cuda"] = LateCudaPort


def machine(device: str) -> dict[str, Any]:
    found = {
        "device": device,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "name": properties.name,
            "capability": list(torch.cuda.get_device_capability()),
            "memory": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return found


def checks(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a line for each check, with how many of its cases were right; then stop if one was wrong."""
    before = PORTS["cuda"], PORTS["cpu"]
    use(options.device)
    try:
        with tempfile.TemporaryDirectory() as work:
            for attention in options.attention:
                if reason := why_not(attention, options.device):
                    yield {"attention": attention, "left_out": reason}
                    continue
                for subject in subjects(options.device, options.family, options.dtype, Path(work), attention):
                    checked = Checks(subject, poison)
                    try:
                        yield from lines(subject, checked.every())
                    finally:
                        checked.close()
    finally:
        PORTS["cuda"], PORTS["cpu"] = before


def why_not(attention: str, device: str) -> str:
    """Why steps do not run so on a device; empty if they do."""
    return missing(torch.device("cpu" if device == "adversarial" else device)) if attention == "triton" else ""


def lines(subject: Subject, cases: Iterator[Case]) -> Iterator[dict[str, Any]]:
    started, counts = time.perf_counter(), dict[str, int]()
    for case in cases:
        if not case.ok:
            yield {"wrong": case.check, "case": case.case, "detail": case.detail}
            continue  # where the run is to go on
        counts[case.check] = counts.get(case.check, 0) + 1
    seconds = round(time.perf_counter() - started, 1)
    yield {
        "attention": subject.attention,
        "family": subject.family,
        "dtype": subject.dtype,
        "right": counts,
        "seconds": seconds,
    }


def times(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    place = "cpu" if options.device == "adversarial" else options.device
    ceiling = ceilings(place)
    yield ceiling
    for attention in options.attention:
        if not why_not(attention, options.device):
            for size in options.size:
                yield from measured(size, place, options.length, ceiling, attention)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Callable[[argparse.Namespace], Iterator[dict[str, Any]]]] = {"checks": checks, "times": times}
    parser.add_argument("--device", choices=("cuda", "mps", "cpu", "adversarial"), default="cuda")
    parser.add_argument("--part", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16", "float32", "float16"])
    parser.add_argument("--attention", nargs="+", choices=ATTENTION, default=list(ATTENTION))
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["0.6b", "8b"])
    parser.add_argument("--length", nargs="+", type=int, default=[2048, 8192, 32_768])
    parser.add_argument("--keep-going", action="store_true", help="go on behind an answer that is wrong")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results-gpu")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        (device, family, dtype, work, attention), store, prompt = json.loads(options.child)
        use(device)
        print(json.dumps(answer_child(Subject(device, family, dtype, Path(work), attention), Path(store), prompt)))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device here; --device adversarial tries the script without one", file=sys.stderr)
        return 2
    about = machine(options.device)
    name = re.sub(r"\W+", "-", str(about.get("name", options.device))).lower()
    options.output.mkdir(parents=True, exist_ok=True)
    with (options.output / f"gpu-{name}.jsonl").open("w", encoding="utf-8") as file:
        _say(about, file)
        wrong = 0
        for part in options.part:
            for line in parts[part](options):
                _say(line, file)
                wrong += "wrong" in line
                if wrong and not options.keep_going:
                    return 1
    return min(wrong, 1)


def _say(line: dict[str, Any], file: Any) -> None:
    text = json.dumps(line)
    print(text, flush=True)
    file.write(text + "\n")
    file.flush()


if __name__ == "__main__":
    sys.exit(main())
