"""Reads a model and its tokenizer from what a user names: a folder, a GGUF file, a hub id or "demo"."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from keepwarm.config import EngineConfig
from keepwarm.errors import ModelNotFound, UnsupportedModel
from keepwarm.models.hub_gguf import fetched_gguf, gguf_beside, names_hub_gguf
from keepwarm.models.places import downloaded_before, gguf_file, model_folder, snapshot_here
from keepwarm.models.weight_files import missing_weights
from keepwarm.runtime.checkpoint import base_of, tokenizer_on, weights_on
from keepwarm.runtime.demo_model import NAME as DEMO
from keepwarm.runtime.demo_model import demo_model
from keepwarm.runtime.gguf.loading import check_gguf, load_gguf
from keepwarm.runtime.int4.folder import kept_int4
from keepwarm.runtime.narrow_folder import kept_narrow
from keepwarm.runtime.place import device_of, dtype_of
from keepwarm.runtime.probe import first_line


def from_source(
    source: str | Path, config: EngineConfig, progress: Callable[[str], None], *, narrow: bool
) -> tuple[PreTrainedModel, Any, Path | None]:
    """Return a model and its tokenizer from a folder, a GGUF file, a hub id or "demo", and where its files are; None if
    that is not known. With `narrow`, weights of a model in float32 stay in bfloat16 if its folder has them so.

    Raises ModelNotFound, UnsupportedModel, DownloadError.
    """
    if str(source) == DEMO:
        source = demo_model(progress)
    file = gguf_file(source)
    if file is not None or names_hub_gguf(source):
        device = torch.device("cpu") if config.device is None else device_of(config.device)
        dtype = dtype_of(config.dtype, device)
        check_gguf(device, dtype)
        file = file or fetched_gguf(source)
        return *load_gguf(file, device, dtype), file
    here = model_folder(source) or downloaded_before(str(source))
    folder, is_folder = here or Path(source), here is not None
    where = str(folder) if is_folder else str(source)
    remote = config.trust_remote_code
    adapter = is_folder and (folder / "adapter_config.json").exists()
    device = device_of(config.device)
    dtype = dtype_of(config.dtype, device)
    unmapped = ""
    try:
        if is_folder and not adapter:
            _check_files(folder)
            kept, unmapped = kept_int4(folder, device, dtype, trust=remote)
            if kept is not None:
                return kept, tokenizer_on(where, trust_remote_code=remote), folder
        settings = None if adapter else AutoConfig.from_pretrained(where, trust_remote_code=remote)
        if settings is not None and getattr(settings, "is_encoder_decoder", False):
            raise UnsupportedModel(f"{where} is an encoder-decoder model; Keepwarm runs decoder-only models")
        if narrow and not adapter and (found := kept_narrow(folder if is_folder else where, device, dtype)) is not None:
            return found[0], tokenizer_on(where, trust_remote_code=remote), found[1]
        base = base_of(folder) if adapter else where
        model = weights_on(device, base, dtype, settings, trust_remote_code=remote)
        if adapter:
            model.load_adapter(where)
            model.to(device)  # type: ignore[arg-type]  # transformers types its override too narrowly
        tokenizer = tokenizer_on(_tokenizer_folder(folder, model, adapter) or where, trust_remote_code=remote)
    except OSError as error:
        said = first_line(error).rstrip(".") + ("" if is_folder else gguf_beside(where))
        raise ModelNotFound(
            f"cannot load {where!r}: {said}. Expected a folder with config.json, tokenizer and weights, "
            "a hub id (set HF_TOKEN for a private one), or 'demo'"
        ) from error
    except (ValueError, KeyError, ImportError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not unmapped:
            raise
        if "Unrecognized configuration class" in str(error):
            raise UnsupportedModel(f"{where} is not a decoder-only language model: {first_line(error)}") from error
        beside = "" if is_folder else gguf_beside(where)
        raise UnsupportedModel(f"{where} does not load: {first_line(error)}{unmapped}{beside}") from error
    return model, tokenizer, folder if is_folder else _snapshot(model)


def _check_files(folder: Path) -> None:
    """Raise UnsupportedModel if files are missing that an index of weights names."""
    if any(folder.glob("*.index.json")) and (lacking := missing_weights(folder)):
        raise UnsupportedModel(f"{folder}: {lacking}. Fetch it again")


def _tokenizer_folder(folder: Path, model: PreTrainedModel, adapter: bool) -> str | None:
    """Return the base model's folder for an adapter folder without a tokenizer; otherwise None."""
    if adapter and not (folder / "tokenizer_config.json").exists():
        return str(model.config._name_or_path)
    return None


def _snapshot(model: PreTrainedModel) -> Path | None:
    return snapshot_here(model.config._name_or_path, getattr(model.config, "_commit_hash", None))
