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

QUICK = {  # one of each kind; the others take minutes
    "llama",  # on kernels of our own
    "gpt_oss",  # windows
    "deepseek_v3",  # latent attention
    "deepseek_v32",  # index keys
    "dots3_note_text",  # both, windows, and layers of several shapes
    "gemma3n_text",  # layers that read another's
    "qwen4_exp_text",  # index keys that are used before keys and values
    "qwen3_5_text",  # a gated delta net beside attention
    "granitemoehybrid",  # Mamba-2 beside attention
    "falcon_h1",  # both in each layer
    "nemotron_h",  # layers that keep nothing
    "lfm2",  # short convolutions
    "jamba",  # token by token
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
