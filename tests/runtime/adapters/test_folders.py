"""What a PEFT folder may hold: what the kernels do not compute is refused, with a message that says what was seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.adapters import adapter, saved
from tests.helpers.models import tiny

from keepwarm.errors import ConfigError, ModelNotFound
from keepwarm.models.lora_folders import settings_of
from keepwarm.runtime.adapters.peft_folder import read
from keepwarm.runtime.adapters.registry import _check_shapes
from keepwarm.runtime.native.families import described
from keepwarm.runtime.native.low_rank import Places

Q = "base_model.model.model.layers.0.self_attn.q_proj"
PAIR = {f"{Q}.lora_A.weight": torch.ones(8, 64), f"{Q}.lora_B.weight": torch.ones(64, 8)}


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 1.0),
        ({"lora_alpha": 32}, 4.0),
        ({"lora_alpha": 32, "use_rslora": True}, 32 / 8**0.5),
        ({"lora_alpha": 32, "alpha_pattern": {"q_proj": 4}}, 0.5),
        ({"lora_alpha": 32, "alpha_pattern": {"o_proj": 4}}, 4.0),
        ({"r": 3, "rank_pattern": {r"layers\.\d+\.self_attn\.q_proj": 8}}, 1.0),
        ({"lora_dropout": 0.1, "target_modules": "all-linear", "bias": "none", "modules_to_save": None}, 1.0),
        ({"init_lora_weights": False}, 1.0),
        ({"init_lora_weights": True}, 1.0),
        ({"init_lora_weights": "gaussian"}, 1.0),
    ],
)
def test_scales(settings: dict[str, Any], scale: float, tmp_path: Path) -> None:
    settings_of(saved(tmp_path, PAIR, **settings))
    (low,) = read(tmp_path).values()
    assert low.scale == pytest.approx(scale)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "LOHA"}, "expected peft_type 'LORA', got 'LOHA'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"something_new": 3}, "something_new is 3"),
        ({"init_lora_weights": "pissa_niter_4"}, "may change the model's own weights"),
        ({"init_lora_weights": ["pissa"]}, "may change the model's own weights"),
    ],
)
def test_settings_that_compute_something_else(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    saved(tmp_path, PAIR, **settings)
    for refuse in (settings_of, read):
        with pytest.raises(ConfigError, match=message):
            refuse(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        ({"base_model.model.lm_head.weight": torch.ones(2, 2)}, {}, "holds 'base_model.model.lm_head.weight'"),
        ({f"{Q}.lora_A.weight": torch.ones(8, 64)}, {}, "lora_A alone"),
        (PAIR, {"r": 4}, "has rank 8, and adapter_config.json says 4"),
        (PAIR, {"r": "8"}, "has rank 8, and adapter_config.json says '8'"),
        (PAIR | {f"{Q}.lora_B.weight": torch.ones(64, 7)}, {}, r"lora_A of shape \[8, 64\] and lora_B of \[64, 7\]"),
        (PAIR | {f"{Q}.lora_B.weight": torch.full((64, 8), torch.inf)}, {}, "not finite"),
        (PAIR | {f"{Q}.lora_B.weight": torch.ones(64, 8, dtype=torch.int8)}, {}, r"lora_B of torch\.int8"),
        (PAIR, {"lora_alpha": "much"}, "expected a number as lora_alpha"),
        (PAIR, {"lora_alpha": 1e300}, "expected a number as lora_alpha, got 1e\\+300"),
        (PAIR, {"lora_alpha": 10**400}, "expected a number as lora_alpha, got 1000"),
        (PAIR, {"lora_alpha": float("nan")}, "expected a number as lora_alpha, got nan"),
        (PAIR, {"rank_pattern": {"(": 3}}, "is no pattern"),
        (PAIR | {f"{Q.partition('.model.')[2]}.lora_B.weight": torch.ones(64, 8)}, {}, "lora_B of model.* twice"),
        ({}, {}, "holds no weights"),
    ],
)
def test_weights_that_are_no_adapter(
    tensors: dict[str, torch.Tensor], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved(tmp_path, tensors, **settings)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path)


def test_numbers_that_torch_does_not_have(tmp_path: Path) -> None:
    saved(tmp_path, PAIR)
    head = json.dumps({f"{Q}.lora_A.weight": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "adapter_model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(2))
    with pytest.raises(ConfigError, match="cannot be read: 'F4'"):
        read(tmp_path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"adapter_config\.json cannot be read"):
        settings_of(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ModelNotFound, match=r"no adapter_model\.safetensors"):
        settings_of(tmp_path)
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(ModelNotFound, match="is a pickle"):
        settings_of(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_text("nothing of the kind")
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        settings_of(tmp_path)


def test_another_models_adapter(tmp_path: Path) -> None:
    model = tiny("llama")
    shapes = Places(model, described(model)).shapes
    assert shapes["model.layers.1.mlp.down_proj"] == (64, 96)
    assert not any("lm_head" in name or "embed" in name for name in shapes)
    wider = adapter(tmp_path / "wider", tiny("llama", hidden_size=128))
    with pytest.raises(ConfigError, match="made for another model"):
        _check_shapes(wider, read(wider), shapes)
    deeper = adapter(tmp_path / "deeper", tiny("llama", num_hidden_layers=3))
    with pytest.raises(ConfigError, match=r"adapts 'model\.layers\.2\..*no module of this model"):
        _check_shapes(deeper, read(deeper), shapes)
    head = adapter(tmp_path / "head", model, ("lm_head",))
    with pytest.raises(ConfigError, match="not experts, embeddings or the head"):
        _check_shapes(head, read(head), shapes)
