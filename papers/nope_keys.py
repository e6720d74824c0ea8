"""Keys without positions: captured before the rotary embedding, rotated later, composed in any order.

Sarkar, "ContextCache" (2026), equations 2 and 3, composes tools whose keys and values were each computed alone. The
rotation is exact; the composition is not what a model computes over the whole prompt, because keys and values of every
layer above the first depend on all tokens before them. This module is the instrument that measures it (`nope.md`);
the engine never answers from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from keepwarm.core.blocks import TokenIds
from keepwarm.errors import UnsupportedModel
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.runner import Runner

_CHANGING_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class NopeKV:
    """KV of one text, computed alone: keys before rotation and values, by layer, each `[kv_heads, n, dim]`."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    def __len__(self) -> int:
        return self.keys[0].shape[1]

    def tail(self, start: int) -> NopeKV:
        """What follows the first `start` tokens."""
        return NopeKV(tuple(k[:, start:] for k in self.keys), tuple(v[:, start:] for v in self.values))


class Rotary:
    """The rotary embedding of one model, applied to keys that were captured without it."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises UnsupportedModel for a model without one, or with one that depends on the sequence's length."""
        self._module: Any = getattr(model.get_decoder(), "rotary_emb", None)
        if self._module is None:
            raise UnsupportedModel(f"{type(model).__name__} has no rotary embedding: nothing can be deferred")
        parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
        kind = parameters.get("rope_type", "default")
        if kind in _CHANGING_ROPE:
            raise UnsupportedModel(f"a rotary embedding of type {kind!r} depends on the sequence's length")

    def __call__(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys `[kv_heads, n, dim]` rotated to `positions` `[n]`, in the keys' dtype (equation 3)."""
        cosine, sine = self._module(keys, positions[None].to(keys.device))
        half = keys.shape[-1] // 2
        turned = torch.cat((-keys[..., half:], keys[..., :half]), dim=-1)
        rotated: torch.Tensor = keys * cosine + turned * sine
        return rotated


def capture(runner: Runner, tokens: TokenIds) -> NopeKV:
    """KV of `tokens` computed alone through the model's own modules, its keys before rotation.

    Raises UnsupportedModel for models whose keys do not pass one module on their way to the rotation.
    """
    return _captured(runner, tokens)[0]


def verify_rotation(runner: Runner, tokens: TokenIds) -> list[float]:
    """By layer, the largest difference between rotated captured keys and the keys the model cached itself."""
    nope, cached = _captured(runner, tokens)
    rotary = Rotary(runner.model)
    positions = torch.arange(len(tokens))
    with torch.inference_mode():
        return [
            float((rotary(keys, positions).float() - own.float()).abs().max())
            for keys, own in zip(nope.keys, cached, strict=True)
        ]


def compose(arena: Arena, rotary: Rotary, parts: Sequence[NopeKV]) -> int:
    """Put parts one after another in an arena, their keys rotated to where they now stand. Returns the length."""
    length = sum(len(part) for part in parts)
    positions = torch.arange(length)
    arena.seek(0)
    with torch.inference_mode():
        for number, layer in enumerate(arena.layers):
            layer.plane(0).put(0, rotary(torch.cat([part.keys[number] for part in parts], dim=1), positions))
            layer.plane(1).put(0, torch.cat([part.values[number] for part in parts], dim=1))
    arena.seek(length)
    return length


def _captured(runner: Runner, tokens: TokenIds) -> tuple[NopeKV, list[torch.Tensor]]:
    model = runner.model
    body: Any = model.get_decoder()
    cache = DynamicCache(config=model.config)
    ids = torch.from_numpy(tokens.astype("int64"))[None].to(runner.device)
    with runner.lock, torch.inference_mode(), _listening(model) as heard:
        body(input_ids=ids, past_key_values=cache, use_cache=True)
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    if len(layers) != len(heard) or any(layer.keys is None or layer.values is None for layer in layers):
        raise UnsupportedModel(f"{type(model).__name__} does not keep plain keys and values in every layer")
    cached = [layer.keys[0] for layer in layers if layer.keys is not None]
    values = [layer.values[0] for layer in layers if layer.values is not None]
    keys = [
        raw.reshape(len(tokens), own.shape[0], own.shape[2]).transpose(0, 1)
        for raw, own in zip(heard, cached, strict=True)
    ]
    return NopeKV(tuple(keys), tuple(values)), cached


@contextmanager
def _listening(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Collects, layer by layer, what the last module before the rotation gives out: the key norm, else the projection.

    Modules are listened to, not weights: so it holds for quantized weights too.
    """
    modules = [_key_module(layer) for layer in getattr(model.get_decoder(), "layers", ())]
    if not modules or None in modules:
        raise UnsupportedModel(
            f"{type(model).__name__} has no key projection of its own in each layer (expected self_attn.k_proj, as in "
            "Llama, Mistral and Qwen)"
        )
    heard: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, inputs: Any, result: torch.Tensor) -> None:
        heard.append(result.detach())

    handles = [module.register_forward_hook(keep) for module in modules if module is not None]
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def _key_module(layer: Any) -> torch.nn.Module | None:
    attention = getattr(layer, "self_attn", None)
    found = getattr(attention, "k_norm", None) or getattr(attention, "k_proj", None)
    return found if isinstance(found, torch.nn.Module) else None
