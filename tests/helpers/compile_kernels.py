"""Compiles every Triton kernel for a GPU that need not be there, and prints how many bytes each takes.

python tests/helpers/compile_kernels.py cuda:90:32
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from keepwarm.runtime.gpu_kernels import attention, products, rows

HEADS = {"HEADS": 8, "KV_HEADS": 2, "DIM": 64, "SIZE": 2}
TILE = {"BY_HAND": False, "ROUND": False, "ROWS": 64, "COLUMNS": 64, "DEPTH": 64}
ROW = {"BLOCK": 1024, "CENTRED": True, "BIASED": True}
INTS = {"width", "x_stride", "y_stride", "rows", "columns", "depth", "layer", "window"}
FLOATS = {"factor", "epsilon", "cap", "scale"}
NUMBERS = {"tokens", "positions", "slots", "regions", "members", "jobs", "pages", "cells", "chosen", "moves"}
NARROW = {"table", "weight", "up", "gate", "bias", "up_bias", "gate_bias", "queries", "out", "like", "sinks", "y"}
# Each kernel with its constants, and the pointers that are float32 in it whatever the model's type.
KERNELS: dict[str, tuple[Any, dict[str, Any], set[str]]] = {
    "embed": (rows.embed, {"BLOCK": 1024}, {"out"}),
    "norm": (rows.norm, ROW | {"ROUND": False}, {"weight", "bias"}),
    "add": (rows.add, ROW | {"NORMED": True}, {"weight", "bias"}),
    "product": (products.product, TILE | {"BIASED": True, "CAPPED": False, "LOGITS": False}, {"y"}),
    "logits": (products.product, TILE | {"BIASED": False, "CAPPED": True, "LOGITS": True}, {"y"}),
    "widen": (products.widen, TILE | {"KIND": 2, "GATED": True, "BIASED": True, "GATE_BIASED": True}, set()),
    "place": (
        attention.place,
        HEADS | {"ROTARY": 32, "INTERLEAVED": True, "ROTATED": True, "NORMED": True, "CENTRED": True, "ROUND": False},
        set(),
    ),
    "attend": (
        attention.attend,
        HEADS | {"GROUP": 4, "WINDOWED": True, "CAPPED": True, "ROUND": False, "BY_HAND": False, "LANES": 64},
        set(),
    ),
    "merge": (attention.merge, {"HEADS": 8, "DIM": 64, "WINDOWED": True, "SINKS": True, "ROUND": False}, set()),
    "move": (attention.move, HEADS | {"ROWS": 32}, set()),
}


def kind(name: str, dtype: str, wide: set[str], constants: dict[str, Any]) -> str:
    """The type of a parameter, as Triton writes it."""
    if name in constants:
        return "constexpr"
    if name in INTS:
        return "i32"
    if name in FLOATS:
        return "fp32"
    if name in NUMBERS:
        return "*i64"
    if name == "x" and "DEPTH" in constants:  # rows that are multiplied
        return f"*{dtype}"
    return f"*{dtype}" if name in NARROW - wide else "*fp32"


def compiled(kernel: Any, constants: dict[str, Any], wide: set[str], dtype: str, target: GPUTarget) -> int:
    """Compile one kernel for a model's type. Return the size of its machine code."""
    given = dict(constants)
    if dtype == "fp32":
        given |= {name: value for name, value in (("SIZE", 4), ("ROWS", 32), ("DEPTH", 32)) if name in given}
        given |= {"LANES": 16} if "LANES" in given else {}
    names = [name for name in kernel.arg_names if name in given]
    signature = {name: kind(name, dtype, wide, given) for name in kernel.arg_names}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): given[name] for name in names})
    options = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
    made = triton.compile(source, target=target, options=options)
    return len(made.asm.get("cubin") or made.asm["hsaco"])


def main() -> None:
    backend, arch, warp = sys.argv[1].split(":")
    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp))
    print(
        json.dumps({
            f"{name}-{dtype}": compiled(kernel, constants, wide, dtype, target)
            for name, (kernel, constants, wide) in KERNELS.items()
            for dtype in ("fp32", "bf16", "fp16")
        })
    )


if __name__ == "__main__":
    main()
