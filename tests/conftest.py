"""Models for the tests: the embedded SmolLM2, and tiny random-weight models of the real classes with its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # torch programs side by side wait for each other at every barrier
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers

from keepwarm.runtime.demo_model import demo_model
from keepwarm.runtime.device import PORTS
from keepwarm.testing.device import AdversarialPort

VOCABULARY = 49152  # the tokenizer's
_SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _SHAPE),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _SHAPE),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _SHAPE),
    "mistral": ("MistralConfig", "MistralForCausalLM", _SHAPE | {"sliding_window": None}),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 2048, "bos_token_id": 1,
         "eos_token_id": 2},
    ),
}  # fmt: skip


def tiny(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A random-weight model of a real class; the same seed gives the same weights."""
    config_class, model_class, settings = FAMILIES[family]
    config = getattr(transformers, config_class)(**(settings | changes))
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = getattr(transformers, model_class)(config)
        for parameter in model.parameters():  # larger than the usual start, so that logits differ and attention matters
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    finally:
        torch.random.set_rng_state(state)
    return model.to(dtype).eval()


# ---- the adversarial device ----


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("cpu", "adversarial"),
        default="cpu",
        help="adversarial: engines on the processor keep KV on a device of `keepwarm.testing.device`",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On the adversarial device, tests of what only the host's memory has are left out, with their own reasons."""
    if config.getoption("--device") == "adversarial":
        for item in items:
            if marker := item.get_closest_marker("host_memory"):
                item.add_marker(pytest.mark.skip(reason=f"not on this device: {marker.args[0]}"))


@pytest.fixture(scope="session", autouse=True)
def ports(request: pytest.FixtureRequest) -> Iterator[list[AdversarialPort]]:
    """Those that engines were given instead of the processor's; none without `--device adversarial`."""
    made: list[AdversarialPort] = []

    def make(device: torch.device) -> AdversarialPort:
        made.append(AdversarialPort(device))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--device") == "adversarial":
            patch.setitem(PORTS, "cpu", make)
        yield made


@pytest.fixture(autouse=True)
def no_faults(ports: list[AdversarialPort]) -> Iterator[None]:
    """Nothing was copied that was not waited for."""
    yield
    faults = [fault for port in ports for fault in port.faults]
    for port in ports:
        port.faults.clear()
    assert not faults


# ---- models ----


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """Folder of the embedded model."""
    return demo_model()


@pytest.fixture(scope="session")
def tokenizer(demo_folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(demo_folder)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Callable[..., Path]:
    """Saves a tiny model with a tokenizer in a folder of its own, as `save_pretrained` does."""

    def save(family: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
        folder = tmp_path_factory.mktemp(family)
        tiny(family, dtype, **settings).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save
