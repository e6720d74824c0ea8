"""Compares two ways to run a model, when the model is loaded."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from transformers.cache_utils import Cache

from keepwarm.core.blocks import token_ids
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.lora import Lora
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.dispatch import rounds_float32
from keepwarm.runtime.probe import Kept, first_line
from keepwarm.runtime.runner import Runner

_COMPARED = 48  # tokens
_FARTHEST, _BEHIND = 256, 32  # tokens: the comparison passes the end of windows up to the first length, by the second
_NEAR = 0.05  # as a share of a row's largest logit
_FAR = 2 * _NEAR  # what is farther away is no rounding
_NEAR_FLOAT32 = 2e-4  # on the host, unless it rounds to fewer bits
_NEAR_EXPERTS = 0.15
_NEAR_EIGHT_BITS = 0.1  # with operands rounded to 8 bits, logits of random weights differ by up to 6 %


def disagreement(ours: Runner, own: Runner, kept: Kept, lora: Lora | None = None) -> str:
    """Return why two runners differ on a short sequence, run in two steps and one token; empty when they agree. `ours`
    runs it with the adapter `lora`, which the model of `own` has in itself.

    In half precision, or in 8 bits, the two may choose different experts for a row whose scores are nearly equal. Then
    the logits of this row differ by much. So for a model with experts the median of the last rows is compared, instead
    of the worst row.

    Some models amplify rounding: computed token by token, Gemma 3 270M through transformers in bfloat16 differs from
    itself by 6 %. So two runners may be up to twice as far apart as usual, if each is as far from the exact result as
    the reference is from itself.
    """
    lean = ours.lean
    routed = lean is not None and lean.is_routed and (lean.in_blocks or lean.dtype is torch.bfloat16)
    size = min(_COMPARED if ours.lean is None else reach(kept.geometry), own.vocabulary)
    tokens = token_ids([i * 7919 % own.vocabulary for i in range(size)])
    ends = [0, size // 2, size - 1, size]

    def run(runner: Runner, cache: Cache) -> torch.Tensor:
        step = runner.step_each if routed else runner.step
        parts = [step(tokens[a:b], cache, a).float() for a, b in pairwise(ends)]
        return torch.cat(parts)[-_BEHIND:] if routed else torch.stack(parts)

    def one_by_one() -> torch.Tensor:
        cache = reference()
        rows = [own.step(tokens[at : at + 1], cache, at).float() for at in range(size)]
        return torch.stack([rows[end - 1] for end in ends[1:]])

    def reference() -> Cache:
        return Arena(kept.geometry, size, own.port, form=replace(kept.form, kernel_states=())).cache

    try:
        states = () if ours.lean is None else ours.lean.states
        arena = Arena(kept.geometry, size, ours.port, form=replace(kept.form, kernel_states=states))
        arena.lora = lora
        mine = run(ours, arena.cache)
        theirs = run(own, reference())
    except (ValueError, RuntimeError, MemoryError, TypeError, IndexError) as error:
        return first_line(error)
    if theirs.isfinite().all() and not mine.isfinite().all():
        return "some logits are not finite"
    scales = theirs.abs().amax(-1)
    scales[scales == 0] = 1
    apart = (mine - theirs).abs().amax(-1)
    shares = (apart / scales).nan_to_num(nan=torch.inf)
    row = int(shares.argsort()[len(shares) // 2 if routed else -1])
    bound = _NEAR_EXPERTS if routed else _bound(ours, own)
    if bound == _NEAR < shares[row] < _FAR:
        bound = max(bound, 2 * float(((one_by_one() - theirs).abs().amax(-1) / scales).max()))
    if shares[row] <= bound:
        return ""
    allowed = bound * scales[row]
    return f"logits differ by {apart[row]:.3g} at a scale of {scales[row]:.3g}, where {allowed:.3g} may be"


def _bound(ours: Runner, own: Runner) -> float:
    """Return the largest difference, as a share of a row's largest logit, between runners without experts."""
    if ours.lean is not None and ours.lean.in_blocks:
        return _NEAR_EIGHT_BITS
    whole = own.model.dtype is torch.float32 and not rounds_float32(own.device)
    return _NEAR_FLOAT32 if own.port.is_host and whole else _NEAR


def reach(geometry: KVGeometry) -> int:
    """Return how many tokens a comparison needs to pass the end of the longest window that has at most `_FARTHEST`
    positions."""
    windows = [layer.window for layer in geometry.layers if layer.window and layer.window <= _FARTHEST]
    return max([_COMPARED, *(window + _BEHIND for window in windows)])
