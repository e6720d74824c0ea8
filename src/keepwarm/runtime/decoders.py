"""Makes the decoder of ours that runs a model, if one does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from keepwarm.core.geometry import KVGeometry
from keepwarm.errors import KeepwarmError, UnsupportedModel
from keepwarm.runtime.agreement import disagreement
from keepwarm.runtime.arena.form import CacheForm, LayerForm
from keepwarm.runtime.capture import ALONE
from keepwarm.runtime.filling import packed
from keepwarm.runtime.gpu_kernels.reasons import device_of_weights, missing, uncovered
from keepwarm.runtime.native.build import kernels
from keepwarm.runtime.native.decoder import LeanDecoder, unsupported
from keepwarm.runtime.native.proof import variance
from keepwarm.runtime.probe import Kept, first_line
from keepwarm.runtime.runner import Runner
from keepwarm.runtime.stepping import Decoder

log = logging.getLogger(__name__)

_CURE = "take attention='auto', which runs it through transformers"
_PROVEN = 300  # rows on a GPU: more than one part of attention, and products in large tiles
_SEEN = ((9, 0),)  # compute capabilities of the GPUs on which the Triton kernels were seen to be right (docs/gpu.md)


def is_for_kernels(form: CacheForm) -> bool:
    """Whether each layer has either plain keys and values, in order, or a state alone, or keeps nothing."""
    numbers = [layer.kv for layer in form.each if layer.kv is not None]
    usual = (LayerForm(), LayerForm(None, states=0), *map(LayerForm, numbers))
    return form.own is None and numbers == sorted(numbers) and all(layer in usual for layer in form.each)


def lean_decoder(model: PreTrainedModel, geometry: KVGeometry) -> LeanDecoder | None:
    """Return the lean decoder for a model on the processor; None if it does not run it."""
    windows = [layer.window for layer in geometry.layers]
    if reason := unsupported(model, windows):
        log.info("every step runs through transformers: %s", reason)
        return None
    in_blocks = packed(model)
    found = kernels(in_blocks=in_blocks)
    adapted = partial(kernels, in_blocks=in_blocks, adapters=True)
    return None if found is None else LeanDecoder(model, found, windows, adapted)


def triton_decoder(model: Any, geometry: KVGeometry) -> Decoder:
    """Return the Triton decoder for a model. Raises ValueError, with the reason, if it does not run it."""
    windows = [layer.window for layer in geometry.layers]
    if reason := missing(device_of_weights(model)) or uncovered(model, windows):
        raise ValueError(reason)
    try:
        from keepwarm.runtime.gpu_kernels.decoder import TritonDecoder  # only here is Triton imported
    except ImportError as error:
        raise ValueError(f"Triton cannot be imported ({first_line(error)})") from error
    return TritonDecoder(model, windows)


def again(decoder: Decoder, model: PreTrainedModel, geometry: KVGeometry) -> Decoder | None:
    """Return a decoder of the same kind for a model that was changed; None if it no longer runs it."""
    if decoder.name == "lean":
        return lean_decoder(model, geometry)
    if (device := device_of_weights(model)).type == "cuda":
        with ALONE:
            torch.cuda.synchronize(device)  # steps of other streams read what the decoder takes with it
    try:
        return triton_decoder(model, geometry)
    except ValueError as reason:
        log.warning("every step runs through transformers now: %s", reason)
        return None


def seen_on_triton(own: Runner, kept: Kept) -> Runner | None:
    """Return a runner with the Triton decoder for a GPU on which it was seen; None if it is another one, or if the
    decoder does not run the model. The log says why. Products of float32 are slow there, and left to transformers."""
    if not was_seen(own.device) or own.model.dtype is torch.float32:
        if own.device.type == "cuda":
            log.info("every step runs through transformers; attention='triton' tries our kernels for GPUs")
        return None
    windows = [layer.window for layer in kept.geometry.layers]
    if reason := missing(own.device) or uncovered(own.model, windows):
        log.info("every step runs through transformers: %s", reason)
        return None
    log.info("loading the kernels for GPUs; the first time on a machine they are compiled")
    try:
        return on_triton(own, kept, "")
    except UnsupportedModel as error:
        log.warning("every step runs through transformers: %s", str(error).removesuffix(f": {_CURE}"))
        return None


def was_seen(device: torch.device) -> bool:
    """Whether the Triton decoder was seen to be right on such a device."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) in _SEEN


def on_triton(own: Runner, kept: Kept, reason: str) -> Runner:
    """Return a runner with the Triton decoder. `reason` is why nothing of ours runs the model, or empty. Raises
    UnsupportedModel, with the reason, if the decoder does not run it, or is wrong for it."""
    if not reason and not (is_for_kernels(kept.form) and not kept.serial):
        reason = "layers with more than keys and values"
    if reason:
        raise _refused(reason)
    with _failing(), own.port.memory_for("the kernels' first steps"):
        try:
            runner = Runner(own.model, None, triton_decoder(own.model, kept.geometry), own.port)
        except ValueError as error:
            raise _refused(str(error)) from None
        assert runner.lean is not None
        least = _PROVEN if own.device.type == "cuda" else 0
        how: dict[str, Any] = {"form": kept.form, "port": own.port, "least": least}
        if reason := variance(runner.lean, kept.geometry, runner.vocabulary, **how):
            reason = f"rows of the kernels are not invariant ({reason})"
        elif reason := disagreement(runner, own, kept):
            reason = f"the kernels do not agree with transformers ({reason})"
    if reason:
        raise _refused(f"{reason}. Please report this")
    log.info("every step runs on the kernels for GPUs")
    return runner


@contextmanager
def _failing() -> Iterator[None]:
    """Raise UnsupportedModel for an error of Triton or its compiler; they have no type in common."""
    try:
        yield
    except KeepwarmError:
        raise
    except Exception as error:
        raise _refused(f"the kernels fail ({_told(error)}). Please report this") from error


def _told(error: Exception) -> str:
    """Return what an error says. Triton's compiler says first where, and last what is wrong there."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1 if lines[0].startswith('at ') else 0].strip()}"


def _refused(reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"attention='triton' does not run this model here: {reason}: {_CURE}")
