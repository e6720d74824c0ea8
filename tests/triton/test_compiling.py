"""Triton compiles every kernel for GPUs, without one: for NVIDIA's and AMD's, as far as this Triton has their tools."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from triton.compiler.errors import CompilationError

from keepwarm.runtime import decoders

PROGRAM = Path(__file__).parents[1] / "helpers" / "compile_kernels.py"
OF_EXPERTS = Path(__file__).with_name("compile_experts.py")
TILES = [*(f"product-{number}" for number in range(7)), *(f"widen-{number}" for number in range(6))]
ATTEND = [f"attend-{dim}" for dim in (64, 128, 256)]
NARROW = ("embed", "norm", "add", "product", "logits", "widen", "place", "merge", "move")
KERNELS = {
    PROGRAM: (*NARROW, *TILES, *ATTEND),
    OF_EXPERTS: ("choose", "group", "widen", "widen-turned", "narrow", "narrow-turned", "collect", "gate"),
}
DTYPES = ("float32", "bfloat16", "float16")


def compiled(
    target: str, folder: Path, *names: str, program: Path = PROGRAM, **around: str
) -> dict[str, dict[str, Any]]:
    """Compile in a process of its own, since here kernels are interpreted."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, program, target, *names],
        env=kept | {"TRITON_CACHE_DIR": str(folder)} | around,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("program", KERNELS, ids=lambda program: program.stem)
@pytest.mark.parametrize(
    ("target", "shared"), [("cuda:89:32", 99), ("cuda:90:32", 227), ("cuda:100:32", 227), ("hip:gfx942:64", 64)]
)
def test_all_kernels_compile_and_fit(target: str, shared: int, program: Path, tmp_path: Path) -> None:
    """A GPU has `shared` KiB of shared memory for a program."""
    found = compiled(target, tmp_path, program=program)
    assert set(found) == {f"{kernel}-{dtype}" for kernel in KERNELS[program] for dtype in DTYPES}
    assert {name: each["shared"] for name, each in found.items() if each["shared"] > shared << 10} == {}


@pytest.mark.slow
def test_the_name_of_a_compiled_kernel_covers_what_compiles_it(tmp_path: Path) -> None:
    names = {
        compiled(target, tmp_path / str(number), "embed", **around)["embed-float32"]["hash"]
        for number, (target, around) in enumerate([
            ("cuda:90:32", {}),
            ("cuda:90:32", {"TRITON_DUMP_DIR": str(tmp_path)}),  # this changes no code
            ("cuda:89:32", {}),
            ("cuda:90:32", {"DISABLE_LLVM_OPT": "1"}),
        ])
    }
    assert len(names) == 3


def test_an_error_of_the_compiler_says_what_is_wrong() -> None:
    """It begins with a place in the kernel's code, and shows that code."""
    source = "def kernel(x):\n    return x @ 1"
    error = CompilationError(source, ast.parse(source).body[0], "no such operator")
    assert decoders._told(error) == "CompilationError: no such operator"
    assert decoders._told(RuntimeError("out of memory\nmore")) == "RuntimeError: out of memory"
