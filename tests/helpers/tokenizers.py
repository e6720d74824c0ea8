"""The real tokenizers that tests use, where this machine has them."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from keepwarm.models.tokenizer import HFTokenizer
from keepwarm.runtime.demo_model import demo_model

NAMES = ("smollm2", "tok-qwen3", "tok-llama3.2", "tok-mistral-nemo")


def models() -> Path:
    """Folder of tokenizers for development; `$KEEPWARM_DEV_MODELS` names another."""
    return Path(os.environ.get("KEEPWARM_DEV_MODELS", Path.home() / ".cache" / "keepwarm-dev" / "models"))


@cache
def loaded(name: str) -> Any:
    """Skips the test where the tokenizer is not there."""
    from transformers import AutoTokenizer

    if name == "smollm2":
        return AutoTokenizer.from_pretrained(demo_model())
    if not (models() / name).exists():
        pytest.skip(f"needs the tokenizer {name}: put its files in {models()}, or set KEEPWARM_DEV_MODELS")
    return AutoTokenizer.from_pretrained(models() / name)


def wrapped(name: str) -> HFTokenizer:
    """One without memories."""
    return HFTokenizer(loaded(name))
