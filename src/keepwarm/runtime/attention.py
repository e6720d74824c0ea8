"""Attention of one prefill step: to the prefix and to the step's own tokens, merged by log-sum-exp.

A step `[start, end)` attends without a mask to the `start` positions before it, and causally to itself; the two partial
softmaxes are merged exactly (Hydragen, arXiv:2402.05099, eq. 5). The split is at the step's start, which is one of the
prompt's own cuts, so the arithmetic depends only on the left context. Grouped queries are folded into rows, so keys and
values are never expanded.

It is registered in transformers' attention and mask interfaces under `NAME`. A model is switched to it only while the
engine runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

NAME = "keepwarm_prefix_step"
KERNEL = "prefix+step/cpu-flash-lse"  # part of the arithmetic identity: change it with the arithmetic

# arguments of a model that change the result and that this kernel does not support
_UNSUPPORTED = ("softcap", "sliding_window", "s_aux", "position_bias", "head_mask")


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call torch's CPU flash kernel. Return its output `[B, H, S, D]` and log-sum-exp `[B, H, S]` (float32)."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    return out, lse


def prefix_step_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Compute causal attention of the last S of T positions.

    query `[H, S, D]`, key and value `[H_kv, T, D]`, same dtype, on the CPU; H is a multiple of H_kv. Returns
    `[S, H, D]`, contiguous.
    """
    heads, step, dim = query.shape
    kv_heads, total, _ = key.shape
    groups, prefix = heads // kv_heads, total - step
    folded = query.reshape(1, kv_heads, groups * step, dim)
    if step == 1:  # the one row attends to everything, itself included
        out, _ = _flash(folded, key[None], value[None], causal=False, scale=scale)
        return out.reshape(1, heads, dim)
    own_shape = (kv_heads, groups, step, dim)
    own, own_lse = _flash(
        query.reshape(own_shape),
        key[:, None, prefix:].expand(own_shape),
        value[:, None, prefix:].expand(own_shape),
        causal=True,
        scale=scale,
    )
    if prefix == 0:
        return own.permute(2, 0, 1, 3).reshape(step, heads, dim)
    before, before_lse = _flash(folded, key[None, :, :prefix], value[None, :, :prefix], causal=False, scale=scale)
    weight = torch.sigmoid(before_lse.reshape(own_shape[:3]) - own_lse.reshape(own_shape[:3])).unsqueeze(-1)
    merged = torch.lerp(own.float(), before.reshape(own_shape).float(), weight)
    result = torch.empty(step, kv_heads, groups, dim, dtype=query.dtype)
    result.copy_(merged.permute(2, 0, 1, 3))
    return result.view(step, heads, dim)


def _interface(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Implement transformers' attention interface: query `[1, H, S, D]` in, `[1, S, H, D]` out."""
    if query.shape[0] != 1 or attention_mask is not None or dropout:
        raise ValueError(
            f"{NAME} runs one sequence without mask or dropout, got batch {query.shape[0]}, "
            f"mask {'given' if attention_mask is not None else 'none'}, dropout {dropout}"
        )
    if given := [name for name in _UNSUPPORTED if kwargs.get(name) is not None]:
        raise ValueError(f"{NAME} does not compute {', '.join(given)}")
    return prefix_step_attention(query[0], key[0], value[0], scaling)[None], None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Build no mask: the step is causal by construction."""


AttentionInterface.register(NAME, _interface)
AttentionMaskInterface.register(NAME, _no_mask)


def may_support(model: PreTrainedModel, device: torch.device) -> bool:
    """Whether the kernel may be tried. The check at load makes the final decision."""
    return device.type == "cpu" and bool(getattr(model, "_supports_attention_backend", False))


@contextmanager
def switched(model: PreTrainedModel, name: str | None) -> Iterator[None]:
    """Switch a model to another attention implementation for the `with` block; None leaves it as it is."""
    before = model.config._attn_implementation
    if name is None or name == before:
        yield
        return
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before
