"""Finds out what a loaded model keeps of a sequence, and whether it continues correctly from that. It runs the model
itself and trusts no class name."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median_high
from typing import Any

import numpy as np
import torch
import transformers
from transformers import DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from keepwarm.core.blocks import TokenIds, token_ids
from keepwarm.core.geometry import KVGeometry, LayerGeometry
from keepwarm.core.identity import json_digest
from keepwarm.core.uncached import CACHED, Uncached, Why
from keepwarm.errors import UnsupportedModel
from keepwarm.models.weight_files import read_cache, write_cache
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.arena.form import PLAIN, CacheForm, LayerForm
from keepwarm.runtime.arena.state_bytes import OwnCache, attributes, outline, state_bytes, tensors
from keepwarm.runtime.arena.states import Snapshot, States
from keepwarm.runtime.arithmetic import KERNELS, installed
from keepwarm.runtime.device import port_to
from keepwarm.runtime.dispatch import devices, rounds_float32
from keepwarm.runtime.identity import config_digest, quantization_of
from keepwarm.runtime.runner import CACHE_NAMES, Runner

_TRIED = "keepwarm probe 3"  # change it with what is tried
_VERDICTS = ("parts", "serial", "not", "alone")
_OWN = (*CACHE_NAMES, "state", "mems")  # models' names for their own cache
_FEW = 3  # tokens that show what a layer keeps
_TOKENS = 48  # tokens that show whether parts agree with the whole; more to go beyond a short window
_OTHERS = 4  # other prompts that are tried if experts may have been chosen otherwise
_WINDOW = 64
_EMPTY = getattr(cache_utils, "DummyLayer", None)  # what keeps nothing, from transformers 5.23 on
_HYBRID = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)
_KEPT = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, *_HYBRID)
_FAILURES = (ValueError, RuntimeError, TypeError, IndexError, AttributeError, AssertionError)  # of a model's own code
# the difference of logits, relative to their scale, that rounding explains
_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-9, torch.float16: 0.02, torch.bfloat16: 0.05}
_ROUTED = 0.15  # the same for models with experts, in half precision


@dataclass(frozen=True)
class Kept:
    """What is kept of a model per token and per position, or why nothing is."""

    geometry: KVGeometry
    form: CacheForm = PLAIN
    serial: bool = False  # see `Runner`
    uncached_reason: Why = CACHED
    alone: bool = False  # part of a sequence's state is in the model's modules: only one may run at a time


def probe(runner: Runner) -> Kept:
    """Return KV geometry and recurrent state as the model really produces them, and why they cannot be cached (empty
    when they can).

    Runs a few tokens through transformers' own cache. All KV of a windowed layer is kept, so that a prompt can continue
    at every cut. Raises UnsupportedModel for a model that does not use transformers' Cache at all.
    """
    model = runner.model
    ids = torch.zeros(1, _FEW, dtype=torch.long, device=runner.device)
    try:
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(input_ids=ids, use_cache=True, **{runner.cache_name: cache})
    except _FAILURES as error:
        if (own := _own_cache(runner, ids)) is not None:
            return own
        raise _no_kv(model, f"does not run with transformers' Cache ({first_line(error)})") from error
    kept = _read_off(runner, cache)
    if not kept.geometry.layers and not any(_holds_some(layer) for layer in cache.layers):
        if (own := _own_cache(runner, ids)) is not None:
            return own
        raise _no_kv(model, "left its cache empty")
    return kept


def checked(own: Runner, kept: Kept, weights: str = "", known: Path | None = None) -> Kept:
    """Check that the model continues from what was kept as if it had not been interrupted. Return `kept` if it does,
    with several tokens at a time or, as a serial model, one by one; otherwise the reason why nothing of it is cached.
    `own` runs the model's own kernels.

    This runs once for a model (`weights` is its digest) and the same libraries, and is noted in the file `known`. It
    runs each time if modules have hooks.
    """
    if kept.uncached_reason:
        return kept
    if any(module._forward_hooks or module._forward_pre_hooks for module in own.model.modules()):
        known = None
    key = _key(own.model, weights)
    noted = None if known is None else read_cache(known).get(key)
    found, _, why = str(noted).partition(":")
    if found in _VERDICTS:
        return _judged(kept, own.model, found, why)
    verdict, reason = _verdict(own, kept)
    if known is not None and verdict == "parts":  # another verdict may have a temporary cause, so it is tried again
        write_cache(known, key, f"{verdict}:{reason}")
    return _judged(kept, own.model, verdict, reason)


def _key(model: PreTrainedModel, weights: str) -> str:
    """Return a key over all that may change how a model continues."""
    libraries = [torch.__version__, transformers.__version__, installed(KERNELS)]
    where: list[Any] = [
        sorted({str(device) for device in devices(model).values()}),
        str(model.dtype),
        str(model.config._attn_implementation),
    ]
    return json_digest(_TRIED, [weights, config_digest(model), quantization_of(model), libraries, where])


def _judged(kept: Kept, model: PreTrainedModel, verdict: str, reason: str) -> Kept:
    if verdict == "parts":
        return kept
    if verdict == "serial":
        return replace(kept, serial=True)
    none = KVGeometry((), kept.geometry.dtype)
    alone = verdict == "alone"
    why = Uncached.IN_MODULES if alone else Uncached.NOT_CONTINUED
    return Kept(none, uncached_reason=why.told(model=type(model).__name__, seen=reason), alone=alone)


def _verdict(own: Runner, kept: Kept) -> tuple[str, str]:
    """Return how a model continues, one of `_VERDICTS`, and why not. "alone" is "not" when requests disturb each
    other."""
    amiss = _amiss(own, kept)
    if not amiss:
        return "parts", ""
    if kept.form.has_states:
        serial = Runner(own.model, None, port=own.port, serial=True)
        if not _amiss(serial, kept):
            return "serial", ""
    return ("alone" if _is_disturbed(own) else "not"), amiss


def _is_disturbed(own: Runner) -> bool:
    """Whether a sequence in transformers' own cache continues differently after another one was computed in between.

    Raises UnsupportedModel for a model that cannot continue from that cache at all: it cannot decode either.
    """
    tokens = token_ids([i * 7919 % own.vocabulary for i in range(_TOKENS)])

    def after(other: TokenIds | None) -> torch.Tensor:
        cache = DynamicCache(config=own.model.config)
        own.extend(tokens[:-1], cache, 0)
        if other is not None:
            own.extend(other, DynamicCache(config=own.model.config), 0)
        return own.step(tokens[-1:], cache, len(tokens) - 1)

    try:
        return not torch.equal(after(None), after(tokens[::-1].copy()))
    except _FAILURES as error:
        raise UnsupportedModel(
            f"{type(own.model).__name__} does not go on from a prompt in transformers' cache ({first_line(error)}), so "
            "it cannot answer token by token"
        ) from error


def _read_off(runner: Runner, cache: DynamicCache) -> Kept:
    """Return what each layer of a cache holds after a few tokens, and on which device."""
    model = runner.model
    layers: list[LayerGeometry] = []
    forms: list[LayerForm] = []
    dtypes: set[torch.dtype] = set()

    def add(keys: Any, values: Any, window: int | None = None) -> int:
        layers.append(LayerGeometry(keys.shape[1], keys.shape[3], values.shape[3], window))
        dtypes.update((keys.dtype, values.dtype))
        return len(layers) - 1

    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        window = getattr(layer, "sliding_window", None)
        if type(layer) is _EMPTY or (type(layer) in _KEPT[:3] and keys is None):
            forms.append(LayerForm())
        elif type(layer) in _KEPT and _is_per_token(keys, values, window):
            at = add(keys, values, window)
            index = getattr(layer, "indexer_keys", None)
            if index is not None:
                first, second = index[:, None].split([-(-index.shape[2] // 2), index.shape[2] // 2], dim=-1)
                positions = getattr(layer, "indexer_position_ids", None)
                forms.append(
                    LayerForm(at, add(first, second), position_rows=0 if positions is None else len(positions))
                )
            else:
                states = getattr(layer, "number_of_states", None) if type(layer) in _HYBRID else None
                forms.append(LayerForm(at, states=states))
        else:
            forms.append(LayerForm(states=0))
        forms[-1] = forms[-1]._replace(device=_elsewhere(layer, runner.device))
    if len(dtypes) > 1:
        named = ", ".join(sorted(map(str, dtypes)))
        none = KVGeometry((), str(model.dtype).removeprefix("torch."))
        return Kept(none, uncached_reason=Uncached.SEVERAL_DTYPES.told(dtypes=named))
    dtype = str(next(iter(dtypes), model.dtype)).removeprefix("torch.")
    plain = all(form == LayerForm(at) for at, form in enumerate(forms))
    stateful = [layer for layer, form in zip(cache.layers, forms, strict=True) if form.states is not None]
    others = {each.device: port_to(each.device) for each in forms if each.device is not None}
    made = CacheForm(
        tuple(forms), partial(_fresh, model.config), state_bytes(stateful), tuple(map(outline, stateful)), others=others
    )
    form = PLAIN if plain else made
    return Kept(KVGeometry(tuple(layers), dtype), form)


def _own_cache(runner: Runner, ids: torch.Tensor) -> Kept | None:
    """Return what a model keeps in a cache that it makes itself (MiniMax, xLSTM, RWKV, XLNet), all of it as state; None
    if it has no such cache."""
    model: Any = runner.model
    taken = inspect.signature(model.forward).parameters
    try:
        with torch.inference_mode():
            found = model(input_ids=ids, use_cache=True)
    except _FAILURES:
        return None
    for name in _OWN:
        value = getattr(found, name, None) if name in taken else None
        if value is not None and type(value) is not DynamicCache:
            own = OwnCache(name, copy.deepcopy(value))
            own.value = value
            form = CacheForm((LayerForm(states=0),), state_bytes=state_bytes([own]), outlines=(outline(own),), own=own)
            return Kept(KVGeometry((), str(model.dtype).removeprefix("torch.")), form)
    return None


def _elsewhere(layer: Any, home: torch.device) -> torch.device | None:
    """Return the device of a layer's content; None when that is `home`, or when it keeps nothing."""
    kept = {name: value for name, value in vars(layer).items() if name in ("keys", "values")} or vars(layer)
    device = next((tensor.device for tensor in tensors(kept) if tensor.numel()), home)
    return None if device == home else device


def _holds_some(layer: Any) -> bool:
    return any(tensor.numel() > 1 for tensor in tensors(vars(layer)))


def _is_per_token(keys: Any, values: Any, window: int | None) -> bool:
    """Whether a layer has keys and values for each token."""
    rows = _FEW if window is None else min(_FEW, window - 1)
    return all(
        isinstance(each, torch.Tensor) and each.dim() == 4 and each.shape[2] == rows and each.shape[3] > 0
        for each in (keys, values)
    )


def _fresh(config: Any) -> Sequence[Any]:
    return DynamicCache(config=config).layers


def _amiss(runner: Runner, kept: Kept) -> str:
    """Return how a prompt in parts differs from one pass; empty when it does not. Between parts all that is kept moves
    as the store would move it, and another sequence is computed."""
    windows = [layer.window for layer in kept.geometry.layers if layer.window is not None and layer.window <= _WINDOW]
    size = max(_TOKENS, *(2 * window + 9 for window in windows)) if windows else _TOKENS
    tokens = token_ids([i * 7919 % runner.vocabulary for i in range(size)])
    try:
        whole = _logits(runner, kept, tokens, [0, size])
        first, *others = _splits(size, windows, thorough=kept.form.has_states)
        for split in (first, *others):
            parts = _logits(runner, kept, tokens, split)
            apart, scale = _apart(whole, parts)
            if not apart <= _rounding(runner) * scale and not _is_routing(runner, kept, tokens, split):
                return f"logits of a prompt in parts differ by {apart:.3g} at a scale of {scale:.3g}"
            if split is not first:
                continue
            if kept.form.has_states and torch.equal(parts, _logits(runner, kept, tokens, split, blank=True)):
                return "the recurrent state makes no difference to what follows it: it is not read"
            if not torch.equal(parts, _logits(runner, kept, tokens, split, other=tokens[::-1].copy())):
                return "what is computed in between changes what follows: part of the state is kept elsewhere"
    except _FAILURES as error:
        return first_line(error)
    return ""


def _apart(whole: torch.Tensor, parts: torch.Tensor) -> tuple[float, float]:
    """Return the largest difference of logits, and their scale."""
    return (parts - whole).abs().nan_to_num(nan=torch.inf).max().item(), whole.abs().max().item() or 1.0


def _is_routing(runner: Runner, kept: Kept, tokens: TokenIds, split: Sequence[int]) -> bool:
    """Whether rounding may explain a difference, since it has a row choose other experts where scores are nearly equal.
    Then most other prompts differ by less."""
    experts = any(type(module).__name__.endswith("Experts") for module in runner.model.modules())
    if not experts or _rounding(runner) < _ROUNDING[torch.float16]:
        return False
    shares = []
    for number in range(1, _OTHERS + 1):
        other = (tokens + np.uint32(number)) % np.uint32(runner.vocabulary)
        apart, scale = _apart(_logits(runner, kept, other, [0, len(other)]), _logits(runner, kept, other, split))
        shares.append(apart / scale)
    return median_high(shares) <= _ROUTED


def _rounding(runner: Runner) -> float:
    dtype = runner.model.dtype
    is_rounded = dtype is torch.float32 and rounds_float32(runner.device)
    return _ROUNDING.get(torch.bfloat16 if is_rounded else dtype, 0.05)


def _splits(size: int, windows: Sequence[int], *, thorough: bool) -> Iterator[list[int]]:
    yield [0, size // 2, size - 1, size]
    if thorough:
        yield [0, 3, size // 2, size]
        yield [0, 1, size - 3, size]
    for window in sorted(set(windows)):
        yield [0, window - 1, window + 1, size]


def _logits(
    runner: Runner,
    kept: Kept,
    tokens: TokenIds,
    ends: Sequence[int],
    *,
    blank: bool = False,
    other: TokenIds | None = None,
) -> torch.Tensor:
    """Return the logits after the last token of a prompt computed in parts, each in a new arena. With `blank` the
    recurrent state is set to zeros; `other` is computed in between."""
    arena = Arena(kept.geometry, len(tokens), runner.port, form=kept.form)
    logits = torch.empty(0)
    for start, end in pairwise(ends):
        if start:
            snapshot = arena.states.take() if arena.states else None
            following = Arena(kept.geometry, len(tokens), runner.port, form=kept.form)
            following.take_over(arena, start)
            following.seek(start)
            arena = following
            if other is not None:
                beside = Arena(kept.geometry, len(tokens), runner.port, form=kept.form)
                runner.extend(other[: start + 1], beside.cache, 0)
            if snapshot is not None:
                _put(arena.states, snapshot, blank=blank)
        if end < len(tokens):
            runner.extend(tokens[start:end], arena.cache, start)
        else:
            logits = runner.step(tokens[start:end], arena.cache, start)
    return logits.float().cpu()


def _put(states: States, snapshot: Snapshot, *, blank: bool) -> None:
    states.put(snapshot)
    if blank:
        for layer in states.layers:
            recurrent = [*tensors(getattr(layer, "recurrent_states", None))]
            for tensor in recurrent or tensors([getattr(layer, name) for name in attributes(layer)]):
                if tensor.is_floating_point():
                    tensor.zero_()


def _no_kv(model: PreTrainedModel, seen: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{type(model).__name__} {seen}: its state is not key/value pairs per token, so there is nothing Keepwarm "
        "could store"
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
