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
from transformers import PreTrainedModel

from keepwarm.compiler.segment import CompiledPrompt, segment
from keepwarm.core.request import Request
from keepwarm.core.schedule import Breakpoint
from keepwarm.core.spans import Reuse
from keepwarm.engine import Engine
from keepwarm.errors import ConfigError

log = logging.getLogger("keepwarm.attach")

_DEFAULT_NEW_TOKENS = 20  # transformers' own, when nothing says how long to go on
# arguments under which transformers runs several sequences, another model, or a cache of its own
_FOREIGN = (
    "past_key_values", "inputs_embeds", "assistant_model", "prompt_lookup_num_tokens", "cache_implementation",
    "negative_prompt_ids", "prefill_chunk_size", "penalty_alpha", "custom_generate", "token_type_ids", "position_ids",
)  # fmt: skip


class Attached:
    """A model whose `generate` goes through the cache, until `detach` or the end of the `with` block."""

    def __init__(self, engine: Engine, model: PreTrainedModel) -> None:
        self.engine = engine
        self.cached_tokens = 0  # of the last call
        self.prompt_tokens = 0
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
        capacity = self._length_limit(self.prompt_tokens, kwargs)
        compiled = self._compiled(ids)
        with self.engine.lease(compiled, self.engine.config.reuse, capacity) as placed:
            cache, runner = placed.arena.cache, self.engine.model.runner
            for span in placed.plan.computes[:-1]:
                runner.extend(compiled.tokens[span.start : span.end], cache, span.start)
            output = self._generate(inputs, *args, **kwargs, past_key_values=cache)
            placed.prefilled = True
        self.cached_tokens = placed.plan.cached_tokens
        return output

    def _compiled(self, ids: torch.Tensor) -> CompiledPrompt:
        """The prompt with soft cuts before its special tokens: messages of a rendered chat begin and end there."""
        compiled = segment(Request(ids[0].tolist()), self.engine.tokenizer, self.engine.adapter)
        special = self.engine.tokenizer.special_ids
        places = [place for place, token in enumerate(compiled.tokens.tolist()) if token in special]
        return replace(compiled, breakpoints=tuple(Breakpoint(place, soft=True) for place in places))

    def _why_uncached(self, ids: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        settings = (args[0] if args else kwargs.get("generation_config")) or self._model.generation_config

        def setting(name: str, default: Any = None) -> Any:
            return kwargs.get(name, getattr(settings, name, default))

        if len(args) > 1:
            return "positional arguments after generation_config are not read; pass them by name"
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not ids.shape[1]:
            return "there are no input_ids"
        if ids.shape[0] != 1 or (setting("num_beams") or 1) > 1 or (setting("num_return_sequences") or 1) > 1:
            return "only one sequence at a time is cached, without beams"
        mask = kwargs.get("attention_mask")
        if mask is not None and not bool(mask.all()):
            return "the attention mask hides tokens (padding)"
        if given := [name for name in _FOREIGN if kwargs.get(name) is not None]:
            return f"{', '.join(given)} given"
        if setting("use_cache") is False:
            return "use_cache is off"
        if setting("return_dict_in_generate"):
            return "return_dict_in_generate would hand out the cache's own memory"
        if self.engine.config.reuse is Reuse.OFF:
            return "reuse is off"
        return self.engine.uncached_reason(self._length_limit(int(ids.shape[1]), kwargs))

    def _length_limit(self, length: int, kwargs: Mapping[str, Any]) -> int:
        """Positions this call may need, as transformers counts them."""
        settings = kwargs.get("generation_config") or self._model.generation_config
        new = kwargs.get("max_new_tokens", getattr(settings, "max_new_tokens", None))
        if new is not None:
            return length + int(new)
        limit = kwargs.get("max_length", getattr(settings, "max_length", None))
        return max(int(limit or 0), length + _DEFAULT_NEW_TOKENS)


def attach(model: PreTrainedModel, tokenizer: Any, **settings: Any) -> Attached:
    """Let `model.generate(**inputs)` reuse the cache; `settings` are the fields of `EngineConfig` (`store=...`).

    The model's own attention runs, so answers are those of the unattached model up to the prefill schedule: equal
    tokens in float32, and equal to the bit between a cold and a warm call. Calls that cannot be cached (batches,
    padding, beams, an own cache) run as before; `uncached_reason` says why. Raises ConfigError when the model is
    attached already, and what `Engine.from_pretrained` raises.
    """
    if "generate" in model.__dict__:
        raise ConfigError("this model's generate is replaced already; detach it first")
    settings.setdefault("attention", "model")
    return Attached(Engine.from_pretrained((model, tokenizer), **settings), model)
