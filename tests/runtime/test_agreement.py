"""The comparison at load: which wrong descriptions of a model it finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.lean import compiled, windows
from tests.helpers.lean_families import lean_family

from keepwarm.runtime.agreement import disagreement
from keepwarm.runtime.native.decoder import LeanDecoder
from keepwarm.runtime.probe import probe
from keepwarm.runtime.runner import Runner

pytestmark = [
    pytest.mark.skipif(compiled is None, reason="no C++ compiler: steps run through transformers"),
    pytest.mark.host_memory("the lean decoder attends to the host's memory"),
]


def found(family: str, dtype: torch.dtype, **wrong: Any) -> str:
    """What the comparison says of a model whose kernels were made of another one's configuration."""
    assert compiled is not None
    own = Runner(lean_family(family, dtype), None)
    kept = probe(own)
    lean = LeanDecoder(lean_family(family, dtype, **wrong), compiled, windows(kept.geometry))
    return disagreement(Runner(own.model, None, lean), own, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gpt-oss", "qwen3-moe"])
def test_a_model_agrees_with_itself(family: str, dtype: torch.dtype) -> None:
    assert found(family, dtype) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("qwen3-moe", {"norm_topk_prob": False}),
        ("qwen3-moe", {"num_experts_per_tok": 2}),
        ("gpt-oss", {"swiglu_limit": 0.5}),
        ("ministral", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    ],
)
def test_what_is_wrong_is_found(family: str, wrong: dict[str, Any], dtype: torch.dtype) -> None:
    assert "differ" in found(family, dtype, **wrong)
