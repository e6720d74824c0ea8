"""Plain `model.generate(**inputs)` that reuses the cache: `attach(model, tokenizer, store=...)`.

The prompt's cached steps are loaded, the missing ones but the last are computed on the engine's schedule with the
model's own attention, and transformers' own `generate` does the rest, with its own processors and decoding.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from keepwarm.compiler.segment import CompiledPrompt, segment
from keepwarm.core.request import Request
from keepwarm.core.schedule import Breakpoint
from keepwarm.core.spans import Reuse
from keepwarm.engine import Engine
from keepwarm.errors import ConfigError

log = logging.getLogger("keepwarm.attach")

_DEFAULT_NEW_TOKENS = 20  # transformers' own, when nothing says how long to go on
# arguments that leave the KV of the prompt alone; any other (pixels, adapter names, masks of a kind) may shape it
_HARMLESS = {
    "input_ids", "attention_mask", "generation_config", "logits_processor", "stopping_criteria",
    "prefix_allowed_tokens_fn", "synced_gpus", "streamer", "tokenizer", *GenerationConfig().to_dict(),
}  # fmt: skip
# settings under which transformers runs another model or a cache of its own
_FOREIGN = (
    "prompt_lookup_num_tokens", "cache_implementation", "prefill_chunk_size", "penalty_alpha", "assistant_early_exit",
    "guidance_scale", "custom_generate",
)  # fmt: skip


class Attached:
    """A model whose `generate` goes through the cache, until `detach` or the end of the `with` block."""

    def __init__(self, engine: Engine, model: PreTrainedModel) -> None:
        self.engine = engine
        self.cached_tokens = 0  # of the last call
        self.prompt_tokens = 0
        self.exactness = "exact"
        self.uncached_reason = ""  # why the last call ran without the cache; empty when it did not
        self._model = model
        self._generate: Any = model.generate
        model.__dict__["generate"] = self._cached_generate  # the instance's, in front of the class's

    def detach(self) -> None:
        """Give the model its own `generate` back and close the store. Safe to call twice."""
        self._model.__dict__.pop("generate", None)
        self.engine.close()

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def _cached_generate(self, inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids") if inputs is None else inputs
        self.cached_tokens = 0
        self.prompt_tokens = int(ids.shape[-1]) if isinstance(ids, torch.Tensor) else 0
        self.uncached_reason = self._why_uncached(ids, args, kwargs)
        if self.uncached_reason:
            log.info("generate runs uncached: %s", self.uncached_reason)
            return self._generate(inputs, *args, **kwargs)
        assert isinstance(ids, torch.Tensor)
        capacity = self._length_limit(self.prompt_tokens, self._settings(args, kwargs))
        compiled = self._compiled(ids)
        engine = self.engine
        with engine.lease(engine.linked(compiled), engine.config.reuse, capacity) as placed:
            cache, plan = placed.arena.cache, placed.plan
            self.cached_tokens, self.exactness = plan.cached_tokens, plan.exactness.label
            for span in plan.computes[:-1]:
                engine.model.runner.extend(compiled.tokens[span.start : span.end], cache, span.start)
            placed.computed_to = plan.computes[-1].start  # the last step is transformers' own: it is not stored
            engine.count(self.prompt_tokens, placed.by_tier)
            with engine.model.runner.lock:
                return self._generate(inputs, *args, **{**kwargs, "past_key_values": cache})

    def _compiled(self, ids: torch.Tensor) -> CompiledPrompt:
        """The prompt with soft cuts before its special tokens: messages of a rendered chat begin and end there."""
        compiled = segment(Request(ids[0].tolist()), self.engine.tokenizer, self.engine.adapter)
        special = self.engine.tokenizer.special_ids
        places = [place for place, token in enumerate(compiled.tokens.tolist()) if token in special]
        return replace(compiled, breakpoints=tuple(Breakpoint(place, soft=True) for place in places))

    def _why_uncached(self, ids: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        if len(args) > 1:
            return "positional arguments after generation_config are not read; pass them by name"
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not ids.shape[1]:
            return "there are no input_ids"
        if unknown := sorted(n for n, v in kwargs.items() if v is not None and n not in _HARMLESS):
            return f"{', '.join(unknown)} given, which may shape the prompt's KV"
        settings = self._settings(args, kwargs)
        if ids.shape[0] != 1 or (settings.get("num_beams") or 1) > 1 or (settings.get("num_return_sequences") or 1) > 1:
            return "only one sequence at a time is cached, without beams"
        if reason := _why_masked(ids, kwargs.get("attention_mask"), settings):
            return reason
        if given := [name for name in _FOREIGN if settings.get(name) is not None]:
            return f"{', '.join(given)} given"
        if settings.get("use_cache") is False:
            return "use_cache is off"
        if settings.get("return_dict_in_generate"):
            return "return_dict_in_generate would hand out the cache's own memory"
        if torch.is_autocast_enabled(self.engine.model.runner.device.type):
            return "autocast is on, which computes in another precision"
        if self.engine.config.reuse is Reuse.OFF:
            return "reuse is off"
        return self.engine.uncached_reason(self._length_limit(int(ids.shape[1]), settings))

    def _settings(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What this call generates with: its arguments, over the given configuration, over the model's."""
        given = args[0] if args else kwargs.get("generation_config")
        layers = [config.to_dict() for config in (self._model.generation_config, given) if config is not None]
        return {k: v for layer in (*layers, kwargs) for k, v in layer.items() if v is not None}

    def _length_limit(self, length: int, settings: Mapping[str, Any]) -> int:
        """Positions this call may need, as transformers counts them."""
        new = settings.get("max_new_tokens")
        if new is not None:
            return length + int(new)
        limit = max(int(settings.get("max_length") or 0), length + _DEFAULT_NEW_TOKENS)
        window = self.engine.model.context_window
        return limit if window is None else max(min(limit, window), length + 1)


def _why_masked(ids: torch.Tensor, mask: torch.Tensor | None, settings: Mapping[str, Any]) -> str:
    """Why some of the tokens are hidden from the model; empty when none is."""
    if mask is not None:
        return "" if bool(mask.all()) else "the attention mask hides tokens (padding)"
    pad, ends = settings.get("pad_token_id"), settings.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    if pad is not None and pad not in ends and bool((ids == pad).any()):
        return "without an attention mask, transformers takes the pad tokens in the prompt for padding"
    return ""


def attach(model: PreTrainedModel, tokenizer: Any, **settings: Any) -> Attached:
    """Let `model.generate(**inputs)` reuse the cache; `settings` are the fields of `EngineConfig` (`store=...`).

    The model's own attention runs, so answers are those of the unattached model up to the prefill schedule: equal
    tokens in float32, and equal to the bit between a cold and a warm call. Calls that cannot be cached (batches,
    padding, beams, an own cache) run as before; `uncached_reason` says why. Raises ConfigError when the model is
    attached already, and what `Engine.from_pretrained` raises.
    """
    if "generate" in model.__dict__:
        raise ConfigError("this model's generate is replaced already; detach it first")
    if settings.setdefault("attention", "model") != "model":
        raise ConfigError("attach runs the model's own attention; leave attention out")
    if settings.get("reuse") == Reuse.CHUNKS:
        raise ConfigError("attach does not run reuse='chunks' in this version: pass 'exact' or 'prefix'")
    return Attached(Engine.from_pretrained((model, tokenizer), **settings), model)
