"""Folders of 4 bits whose models have states that are matrices, or read pictures, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.int4_folders import How, write

from keepwarm import Engine
from keepwarm.runtime.native.blocks import can_compute

pytestmark = [
    pytest.mark.slow,  # kernels of their own are compiled for these tests
    pytest.mark.skipif(not can_compute(), reason="no C++ compiler"),
    pytest.mark.host_memory("the lean decoder attends to the host's memory"),
]
IDS: list[int] = np.random.default_rng(0).integers(0, 300, 90).tolist()
METHODS = {
    "gptq": How("gptq"),
    "awq": How("awq", 64, symmetric=False),
    "compressed": How("compressed-tensors", 32, symmetric=False, dtype=torch.bfloat16),
}
MATRICES = {  # heads whose states are matrices, as many as a product of 4 bits may have
    "granite4": {"mamba_d_head": 32, "mamba_n_heads": 16},
    "qwen3.5": {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_value_head_dim": 16},
    "qwen3-next": {
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 16,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
}


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed"])
@pytest.mark.parametrize("family", MATRICES)
def test_states_that_are_matrices(tokenizer: Any, tmp_path: Path, family: str, method: str) -> None:
    """Queries of the Qwens' attention and their gates are one product, head by head."""
    made = write(tmp_path / "model", METHODS[method], tokenizer, family=family, config=MATRICES[family])
    with Engine.from_pretrained(made.path, dtype="float32", store=tmp_path / "store") as engine:
        assert engine.pipeline.model.runner.lean is not None, "as it agrees with the modules"
        with torch.inference_mode():
            modules = engine.pipeline.model.model(torch.tensor([IDS])).logits[0].double()
            exact = made.model(torch.tensor([IDS])).logits[0]
        cold, warm = (engine.generate(IDS, max_new_tokens=2, trace=True) for _ in range(2))
        assert (cold.cached_tokens, warm.cached_tokens, warm.exactness) == (0, len(IDS) - 1, "exact")
        assert warm.logits_digest == cold.logits_digest
    assert float((modules - exact).abs().max()) < 1e-3 * float(exact.abs().max())


def test_a_head_is_tied_only_if_it_is_the_table_of_embeddings(tokenizer: Any, tmp_path: Path) -> None:
    """Mistral 3's class ties by default, and configurations leave it out."""

    def beside(tensors: dict[str, torch.Tensor]) -> None:
        for name in [*tensors]:
            tensors[f"language_model.{name}"] = tensors.pop(name)

    made = write(tmp_path / "model", METHODS["awq"], tokenizer, family="mistral", changed=beside)
    text = json.loads((made.path / "config.json").read_text())
    whole = {"model_type": "mistral3", "quantization_config": text.pop("quantization_config"), "text_config": text}
    (made.path / "config.json").write_text(json.dumps(whole))
    with Engine.from_pretrained(made.path, dtype="float32") as engine, torch.inference_mode():
        assert engine.pipeline.model.runner.lean is not None
        modules = engine.pipeline.model.model(torch.tensor([IDS])).logits[0].double()
        exact = made.model(torch.tensor([IDS])).logits[0]
    assert float((modules - exact).abs().max()) < 1e-3 * float(exact.abs().max())


def test_the_language_model_of_a_folder_that_reads_pictures(tokenizer: Any, tmp_path: Path) -> None:
    def beside(tensors: dict[str, torch.Tensor]) -> None:
        for name in [*tensors]:
            tensors[name.replace("model.", "model.language_model.")] = tensors.pop(name)
        tensors["model.visual.blocks.0.attn.proj.weight"] = torch.ones(8, 8)

    made = write(tmp_path / "model", METHODS["awq"], tokenizer, family="qwen3", changed=beside)
    told = json.loads((made.path / "config.json").read_text())
    text = told | {"model_type": "qwen3_vl_text"}
    whole = {"model_type": "qwen3_vl", "text_config": text, "quantization_config": text.pop("quantization_config")}
    (made.path / "config.json").write_text(json.dumps(whole | {"tie_word_embeddings": False}))
    with Engine.from_pretrained(made.path, dtype="float32") as engine:
        model = engine.pipeline.model
        assert (type(model.model).__name__, model.runner.lean is not None) == ("Qwen3ForCausalLM", True)
        with torch.inference_mode():
            modules = model.model(torch.tensor([IDS])).logits[0].double()
            exact = made.model(torch.tensor([IDS])).logits[0]
        assert engine.generate(IDS, max_new_tokens=1).exactness == "exact"
    assert float((modules - exact).abs().max()) < 1e-3 * float(exact.abs().max())
