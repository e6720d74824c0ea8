"""`docs/models.md` lists every class, and agrees with what was recorded and with what `keepwarm size` computes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from tests.families.examine import CACHED
from tests.families.recorded import TABLE, recorded
from tests.families.table import render
from tests.helpers.every_config import CLASSES, MODEL_TYPES, configuration
from tests.helpers.every_model import make

from keepwarm.core.geometry import geometry_of
from keepwarm.core.states import snapshot_size, stateful_layers
from keepwarm.runtime.probe import probe
from keepwarm.runtime.runner import Runner

# whose state `keepwarm size` does not know: several convolutions a layer, caches of their own, compressed keys
UNKNOWN = {
    *("deepseek_v4", "inkling_text", "inkling2_text", "minimax_m3_vl_text", "qwen4_exp", "qwen4_exp_text", "zaya"),
    *("minimax", "rwkv", "xlnet", "xlstm"),
}
KEPT = [name for name, row in recorded().items() if row["cached"] in CACHED and name in CLASSES]


def described(model_type: str) -> dict[str, Any]:
    """As its config.json has it."""
    found: dict[str, Any] = json.loads(json.dumps(configuration(model_type).to_dict(), default=str))
    return found


def test_every_class_has_a_row() -> None:
    rows = recorded()
    assert not set(MODEL_TYPES) - set(rows), "`make models` adds what is missing"
    assert {name: rows[name]["class"] for name in MODEL_TYPES} == CLASSES
    assert all(row.get("reason") for row in rows.values() if row["cached"] not in CACHED)


def test_the_page_shows_what_was_recorded() -> None:
    text = TABLE.read_text(encoding="utf-8")
    version = re.search(r"transformers (\S+) loads", text)
    assert version
    assert text == render(recorded().values(), version[1]), "`make models ARGS=--render` writes it anew"


def test_nearly_all_classes_are_cached() -> None:
    rows = [row for row in recorded().values() if row["class"].endswith("ForCausalLM")]
    classes = {row["class"] for row in rows}
    assert len(classes - {row["class"] for row in rows if row["cached"] not in CACHED}) >= 0.95 * len(classes)


@pytest.mark.parametrize("model_type", KEPT)
def test_size_computes_what_was_measured(model_type: str) -> None:
    row, config = recorded()[model_type], described(model_type)
    assert geometry_of(config, "float32").bytes_per_token == row.get("bytes_per_token", 0)
    assert bool(stateful_layers(config)) == ("state_bytes" in row)
    found = snapshot_size(config, "float32")
    assert (found is not None) == ("state_bytes" in row and model_type not in UNKNOWN)
    if found is not None:
        assert found.nbytes == pytest.approx(row["state_bytes"], abs=40 * found.layers)  # but for the descriptions


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "kimi_linear", "bamba", "jamba", "lfm2", "zamba2"])
def test_a_scan_is_float32_in_any_model(model_type: str) -> None:
    measured = probe(Runner(make(model_type).to(torch.bfloat16), None))
    found = snapshot_size(described(model_type), "bfloat16")
    assert found is not None
    assert found.nbytes == pytest.approx(measured.form.state_bytes, abs=40 * found.layers)
