"""Every causal language model class of the installed transformers: cached exactly as its row in `docs/models.md` says,
and not cached only for the reason that stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.families.examine import examine
from tests.families.recorded import lasting, recorded
from tests.helpers.every_config import MODEL_TYPES

QUICK = {  # the kinds that differ most; the others take minutes
    "llama",  # on kernels of our own
    "gpt_oss",  # windows
    "deepseek_v32",  # latent attention and index keys
    "gemma3n_text",  # layers that read another's
    "qwen3_5_text",  # a gated delta net beside attention
    "falcon_h1",  # Mamba-2 and attention in each layer
    "xlnet",  # a cache of its own
    "recurrent_gemma",  # not cached: a state in its modules
    "cpmant",  # refused: it does not decode
    "musicgen",  # not run
}


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODEL_TYPES]
)
def test_a_class_does_what_its_row_says(model_type: str, tmp_path: Path) -> None:
    row = recorded().get(model_type)
    assert row is not None, f"{model_type} has no row in docs/models.json: `make models` adds it"
    assert unmeasured(lasting(examine(model_type, tmp_path))) == unmeasured(row)


def unmeasured(row: dict[str, Any]) -> dict[str, Any]:
    """Without the figures in its reason: other processors round otherwise."""
    return row | {"reason": re.sub(r"\d[\d.e-]*", "#", row.get("reason", ""))}
