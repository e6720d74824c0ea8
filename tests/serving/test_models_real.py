"""Two real models take turns: the embedded one, and the same with other weights in a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
import transformers
from tests.helpers.inside import serving, states
from tests.helpers.processes import DEADLINE

TEXT = "The archive keeps what was computed, and nothing of it is lost when another model is asked. " * 40


def compared(url: str, model: str) -> dict[str, Any]:
    """A question with a long system prompt, computed cold and with what is stored."""
    messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": "What does the archive keep?"}]
    asked = {"messages": messages, "max_new_tokens": 8, "model": model}
    found = httpx.post(f"{url}/query/compare", json=asked, timeout=DEADLINE)
    return dict(found.raise_for_status().json())


@pytest.mark.slow
def test_changing_real_models_and_back_costs_no_prefill(demo_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight.mul_(0.5)
    model.save_pretrained(other)
    transformers.AutoTokenizer.from_pretrained(demo_folder).save_pretrained(other)
    del model
    settings: dict[str, Any] = {"models": {"demo": "demo", "other": str(other)}, "server__model_memory": "600MB"}
    with serving(tmp_path / "store", engine__dtype="float32", **settings) as (url, _):
        first = {name: compared(url, name) for name in ("demo", "other")}
        assert states(url) == {"demo": "unloaded", "other": "loaded"}
        assert first["demo"]["cold"]["answer"] != first["other"]["cold"]["answer"]
        for name in ("demo", "other"):
            again = compared(url, name)
            assert again["bit_identical"], name
            assert again["warm"]["cached_tokens"] == again["warm"]["prompt_tokens"] - 1
            assert again["warm"]["exactness"] == "exact"
            assert again["cold"]["answer"] == first[name]["cold"]["answer"]
            assert again["warm"]["cached_by_tier"]["disk"] == again["warm"]["cached_tokens"], "it came from the store"
