"""Compiles Triton kernels for a GPU that need not be there, as `launch` has them compiled. Prints what came out.

python tests/helpers/compile_kernels.py cuda:90:32 [KERNEL ...]
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from keepwarm.runtime.gpu_kernels import attention, products, rows
from keepwarm.runtime.gpu_kernels.launch import attending, tiled
from keepwarm.runtime.gpu_kernels.tiles import Tiles

GROUP = 4
HEADS = {"HEADS": 8, "KV_HEADS": 2, "DIM": 64}
ROW = {"BLOCK": 1024, "CENTRED": True, "BIASED": True}
INTS = {"width", "x_stride", "y_stride", "rows", "columns", "depth", "layer", "window"}
FLOATS = {"factor", "epsilon", "cap", "scale"}
NUMBERS = {"tokens", "positions", "slots", "regions", "members", "jobs", "pages", "cells", "chosen", "moves"}
NARROW = {"table", "weight", "up", "gate", "bias", "up_bias", "gate_bias", "queries", "out", "like", "sinks", "y"}
EVEN = {"width", "columns", "depth", "x_stride", "y_stride"}  # multiples of 16 in most models
WIDE = 40_000  # columns
TILES = {"product": 7, "widen": 6}  # that half precision may take
# Bytes for a program, by NVIDIA's architecture.
SHARED: dict[object, int] = {89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
# Each kernel with its constants, and the pointers that are float32 in it whatever the model's type.
KERNELS: dict[str, tuple[Any, dict[str, Any], set[str]]] = {
    "embed": (rows.embed, {"BLOCK": 1024}, {"out"}),
    "norm": (rows.norm, ROW | {"ROUND": False}, {"weight", "bias"}),
    "add": (rows.add, ROW | {"NORMED": True}, {"weight", "bias"}),
    "product": (products.product, {"BIASED": True, "CAPPED": False, "LOGITS": False, "ROUND": False}, {"y"}),
    "logits": (products.product, {"BIASED": False, "CAPPED": True, "LOGITS": True, "ROUND": False}, {"y"}),
    "widen": (products.widen, {"KIND": 2, "GATED": True, "BIASED": True, "GATE_BIASED": True, "ROUND": False}, set()),
    "place": (
        attention.place,
        HEADS | {"ROTARY": 32, "INTERLEAVED": True, "ROTATED": True, "NORMED": True, "CENTRED": True, "ROUND": False},
        set(),
    ),
    "merge": (attention.merge, {"HEADS": 8, "DIM": 64, "WINDOWED": True, "SINKS": True, "ROUND": False}, set()),
    "move": (attention.move, HEADS | {"ROWS": 32}, set()),
}
ATTEND = HEADS | {"GROUP": GROUP, "WINDOWED": True, "CAPPED": True, "ROUND": False, "BY_HAND": False}
KERNELS |= {f"{name}-{number}": KERNELS[name] for name, many in TILES.items() for number in range(many)}
KERNELS |= {f"attend-{dim}": (attention.attend, ATTEND | {"DIM": dim}, set()) for dim in (64, 128, 256)}


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


def given(name: str, constants: dict[str, Any], dtype: torch.dtype, arch: object) -> dict[str, Any]:
    """A kernel's constants and options for a model's type and an architecture."""
    tiles = Tiles.of(dtype, GROUP, SHARED.get(arch, 0))
    kernel, _, number = name.partition("-")
    if kernel in ("product", "logits", "widen"):
        weights = 2 if kernel == "widen" else 1
        all_rows = tiles.of_all(WIDE, weights)
        return constants | tiled(tiles.sizes[weights - 1][int(number)] if number and tiles.sizes else all_rows)
    more: dict[str, Any] = {"SIZE": dtype.itemsize, "enable_fp_fusion": False, "num_warps": 4}
    if name.startswith("attend"):
        more |= {"LANES": tiles.lanes} | attending(constants["DIM"], dtype)
    return constants | more


def compiled(name: str, dtype: torch.dtype, target: GPUTarget) -> dict[str, Any]:
    """Compile one kernel for a model's type. Return what it needs, and Triton's name of it."""
    kernel, constants, wide = KERNELS[name]
    all_of_it = given(name, constants, dtype, target.arch)
    constants = {each: value for each, value in all_of_it.items() if each in kernel.arg_names}
    options = {each: value for each, value in all_of_it.items() if each not in constants and each.islower()}
    short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    signature = {each: kind(each, short, wide, constants) for each in kernel.arg_names}
    at = {each: (number,) for number, each in enumerate(kernel.arg_names)}
    even = {at[each]: [["tt.divisibility", 16]] for each, of in signature.items() if of[0] == "*" or each in EVEN}
    source = ASTSource(kernel, signature, {at[each]: value for each, value in constants.items()}, even)
    made = triton.compile(source, target=target, options=options)
    code = made.asm.get("cubin") or made.asm["hsaco"]
    return {"bytes": len(code), "shared": made.metadata.shared, "hash": made.hash}


def main() -> None:
    backend, arch, warp = sys.argv[1].split(":")
    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp))
    print(
        json.dumps({
            f"{name}-{str(dtype).removeprefix('torch.')}": compiled(name, dtype, target)
            for name in sys.argv[2:] or KERNELS
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        })
    )


if __name__ == "__main__":
    main()
