"""Compiles the kernels of experts for a GPU that need not be there, by `tests/helpers/compile_kernels.py`.

python tests/triton/compile_experts.py cuda:90:32 [KERNEL ...]
"""

from __future__ import annotations

from typing import Any

import torch
from tests.helpers import compile_kernels as others

from keepwarm.runtime.gpu_kernels import products, routes

USUAL = others.given
ROUTED = {"LANES": 128}
WIDE = {"CHOSEN": 8, "ROUND": False}
# The products of most models, and of gpt-oss, whose weights are turned, have biases, and have gates and ups in turn. A
# product with one column is a shared expert's gate. Triton has numbers that are 1 as constants.
KERNELS: dict[str, tuple[Any, dict[str, Any], set[str]]] = {
    "choose": (routes.choose, ROUTED | {"CHOSEN": 8, "OVER_ALL": True}, set()),
    "group": (routes.group, ROUTED | {"ROWS": 64, "BLOCK": 1024}, set()),
    "widen": (routes.widen, WIDE | {"KIND": 2, "BIASED": False, "ACROSS": 2048, "ALONG": 1, "BIAS_ACROSS": 0}, set()),
    "widen-turned": (
        routes.widen,
        WIDE | {"KIND": 5, "BIASED": True, "ACROSS": 2, "ALONG": 5760, "BIAS_ACROSS": 2},
        set(),
    ),
    "narrow": (routes.narrow, {"BIASED": False, "ACROSS": 768, "ALONG": 1}, {"y"}),
    "narrow-turned": (routes.narrow, {"BIASED": True, "ACROSS": 1, "ALONG": 2880}, {"y"}),
    "collect": (routes.collect, {"CHOSEN": 8, "OWN": True, "GATED": True, "BLOCK": 1024}, {"gate", "y"}),
    "gate": (
        products.product,
        {"BIASED": False, "CAPPED": False, "LOGITS": False, "ROUND": False, "columns": 1, "y_stride": 1},
        {"y"},
    ),
}
PRODUCTS = {"widen": "widen", "narrow": "product", "gate": "product"}  # how `others` names what is compiled alike


def given(name: str, constants: dict[str, Any], dtype: torch.dtype, arch: object) -> dict[str, Any]:
    return USUAL(PRODUCTS.get(name.split("-")[0], name), constants, dtype, arch)


if __name__ == "__main__":
    others.KERNELS, others.given = KERNELS, given
    others.INTS |= {"count", "pairs", "apart", "bias_apart"}
    others.EVEN |= {"apart"}
    others.FLOATS |= {"alpha", "limit"}
    others.NUMBERS |= {"counts", "experts", "order", "tiles"}
    others.main()
