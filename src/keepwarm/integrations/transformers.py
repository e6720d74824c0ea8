"""Plain `model.generate(**inputs)` that reuses the cache: `attach(model, tokenizer, store=...)`.

The stored KV of the prompt is loaded, and transformers' own `generate` does the rest, with its own processors and
decoding. With the model's own kernels the steps before the last are computed on the engine's schedule. With
`kernels="own"` the lean decoder runs every forward pass of the call, decoding too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import wraps
from types import TracebackType
from typing import Any, Literal, Unpack, cast

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from keepwarm.compiler.segment import CompiledPrompt, segment
from keepwarm.core.blocks import token_ids
from keepwarm.core.request import Request
from keepwarm.core.results import Miss
from keepwarm.core.schedule import Breakpoint
from keepwarm.core.settings import EngineArgs
from keepwarm.core.spans import Reuse
from keepwarm.core.uncached import CACHED, Uncached, Why
from keepwarm.engine import Engine
from keepwarm.errors import ConfigError, KeepwarmError, UnsupportedModel
from keepwarm.runtime.arena.arena import ArenaCache
from keepwarm.runtime.runner import CACHE_NAMES, cache_name

log = logging.getLogger(__name__)

_DEFAULT_NEW_TOKENS = 20  # transformers' default, when no length is given
# arguments that do not affect the prompt's KV; any other one (pixels, adapter names, other masks) may affect it
_HARMLESS = {
    "input_ids",
    "attention_mask",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "synced_gpus",
    "streamer",
    "tokenizer",
    *GenerationConfig().to_dict(),
}
# settings with which transformers runs another model or uses its own cache
_FOREIGN = (
    "prompt_lookup_num_tokens",
    "cache_implementation",
    "prefill_chunk_size",
    "penalty_alpha",
    "assistant_early_exit",
    "guidance_scale",
    "custom_generate",
)


class Attached:
    """A model whose `generate` goes through the cache, until `detach` or the end of the `with` block."""

    def __init__(self, engine: Engine, model: PreTrainedModel, *, own_kernels: bool) -> None:
        self.engine = engine
        self._own = own_kernels
        self.cached_tokens = 0  # of the last call
        self.prompt_tokens = 0
        self.exactness = "exact"
        self.uncached_reason = CACHED  # why the last call ran without the cache; empty when it used it
        self.miss: Miss | None = None  # why it reused no more; None if it reused all it could, or without the cache
        self._model = model
        self._generate: Any = model.generate
        model.__dict__["generate"] = self._cached_generate  # an instance attribute hides the class's method

    def detach(self) -> None:
        """Give the model its own `generate` back and close the store. It may be called twice."""
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
        self.cached_tokens, self.miss = 0, None
        self.prompt_tokens = int(ids.shape[-1]) if isinstance(ids, torch.Tensor) else 0
        self.uncached_reason = self._why_uncached(ids, args, kwargs)
        if self.uncached_reason:
            log.info("generate runs uncached: %s", self.uncached_reason)
            return self._generate(inputs, *args, **kwargs)
        assert isinstance(ids, torch.Tensor)
        capacity = self._length_limit(self.prompt_tokens, self._settings(args, kwargs))
        compiled = self._compiled(ids)
        engine = self.engine
        linked = engine.pipeline.linked(compiled)
        if self._own and not engine.pipeline.model.runner.is_invariant:  # linking may have found this
            self.uncached_reason = Uncached.CHANGED.told()
            return self._generate(inputs, *args, **kwargs)
        config = engine.pipeline.config
        with engine.pipeline.lease(linked, config.reuse, capacity, wait=config.device_timeout) as placed:
            cache, plan = placed.arena.cache, placed.plan
            self.cached_tokens, self.exactness = plan.cached_tokens, plan.exactness.label
            for span in plan.computes[:-1]:
                engine.pipeline.model.runner.extend(compiled.tokens[span.start : span.end], cache, span.start)
            placed.arena.states.disown()
            placed.computed_to = plan.computes[-1].start  # transformers runs the last step, so it is not stored
            engine.pipeline.count(self.prompt_tokens, placed.by_tier)
            runner = engine.pipeline.model.runner
            with runner.lock, runner.without_cudnn(), self._own_steps() if self._own else nullcontext():
                given = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}  # those are None
                answer = self._generate(inputs, *args, **given, **{runner.cache_name: cache})
            with suppress(KeepwarmError):  # the answer is valid without an explanation
                engine.pipeline.loader.explain(placed)
            self.miss = placed.miss
            if self._own:
                is_asked = torch.equal(answer[0, : self.prompt_tokens], ids[0])  # else other tokens than named were run
                placed.computed_to = self.prompt_tokens if is_asked else 0
                placed.generated = answer[0, self.prompt_tokens :].tolist()
            return answer

    @contextmanager
    def _own_steps(self) -> Iterator[None]:
        """Let the lean decoder run forward passes over an arena. It wraps the model's `forward`, as `generate` inspects
        its parameters."""
        model, runner = self._model, self.engine.pipeline.model.runner
        replaced = model.__dict__.get("forward")
        theirs = model.forward

        @wraps(theirs)
        def forward(input_ids: Any = None, logits_to_keep: int = 0, **more: Any) -> Any:
            cache = more.get(runner.cache_name)
            if not isinstance(cache, ArenaCache) or not runner.is_invariant:  # a processor's own pass, say
                return theirs(input_ids=input_ids, logits_to_keep=logits_to_keep, **more)
            tokens, start = token_ids(input_ids[0].tolist()), int(cache.get_seq_length())
            if logits_to_keep == 1 or len(tokens) == 1:
                logits = runner.step(tokens, cache, start)[None]
            else:
                logits = runner.step_each(tokens, cache, start)[-logits_to_keep:]
            return CausalLMOutputWithPast(logits=logits[None], **{runner.cache_name: more[runner.cache_name]})

        model.__dict__["forward"] = forward
        try:
            yield
        finally:
            if replaced is None:
                del model.__dict__["forward"]
            else:
                model.__dict__["forward"] = replaced

    def _compiled(self, ids: torch.Tensor) -> CompiledPrompt:
        """Return the prompt with soft cuts before its special tokens, where messages of a rendered chat begin and end.
        The cuts matter only under scheduled arithmetic."""
        compiled = segment(Request(ids[0].tolist()), self.engine.pipeline.tokenizer, self.engine.pipeline.adapter)
        special = self.engine.pipeline.tokenizer.special_ids
        places = [place for place, token in enumerate(compiled.tokens.tolist()) if token in special]
        return replace(compiled, breakpoints=tuple(Breakpoint(place, soft=True) for place in places))

    def _why_uncached(self, ids: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Why:
        if len(args) > 1:
            return Uncached.POSITIONAL.told()
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not ids.shape[1]:
            return Uncached.NO_IDS.told()
        if unknown := sorted(n for n, v in kwargs.items() if v is not None and n not in _HARMLESS):
            return Uncached.UNKNOWN.told(names=", ".join(unknown))
        settings = self._settings(args, kwargs)
        if ids.shape[0] != 1 or (settings.get("num_beams") or 1) > 1 or (settings.get("num_return_sequences") or 1) > 1:
            return Uncached.SEVERAL.told()
        if reason := _why_masked(ids, kwargs.get("attention_mask"), settings):
            return reason
        if given := [name for name in _FOREIGN if settings.get(name) is not None]:
            return Uncached.FOREIGN.told(names=", ".join(given))
        if settings.get("token_healing"):
            return Uncached.HEALED.told()
        if settings.get("use_cache") is False:
            return Uncached.NO_CACHE.told()
        if settings.get("return_dict_in_generate"):
            return Uncached.HANDED_OUT.told()
        if self.engine.pipeline.model.form.own is not None:
            return Uncached.OWN_CACHE.told()
        runner, model = self.engine.pipeline.model.runner, cast(Any, self._model)  # torch types attributes as modules
        if runner.cache_name != cache_name(model.prepare_inputs_for_generation):
            return Uncached.OTHER_ARGUMENT.told()
        if runner.serial:
            return Uncached.SERIAL.told()
        if not self.engine.pipeline.model.geometry.layers:
            return Uncached.STATE_ALONE.told()
        if self._own and (settings.get("output_attentions") or settings.get("output_hidden_states")):
            return Uncached.ATTENTIONS.told()
        if torch.is_autocast_enabled(runner.device.type):
            return Uncached.AUTOCAST.told()
        if self.engine.pipeline.config.reuse is Reuse.OFF:
            return Uncached.REUSE_OFF.told()
        return self.engine.pipeline.uncached_reason(self._length_limit(int(ids.shape[1]), settings))

    def _settings(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return this call's settings: its arguments override the given configuration, which overrides the model's."""
        given = args[0] if args else kwargs.get("generation_config")
        layers = [config.to_dict() for config in (self._model.generation_config, given) if config is not None]
        return {k: v for layer in (*layers, kwargs) for k, v in layer.items() if v is not None}

    def _length_limit(self, length: int, settings: Mapping[str, Any]) -> int:
        """Return the number of positions that this call may need, as transformers counts them."""
        new = settings.get("max_new_tokens")
        if new is not None:
            return length + int(new)
        limit = max(int(settings.get("max_length") or 0), length + _DEFAULT_NEW_TOKENS)
        window = self.engine.pipeline.model.context_window
        return limit if window is None else max(min(limit, window), length + 1)


def _why_masked(ids: torch.Tensor, mask: torch.Tensor | None, settings: Mapping[str, Any]) -> Why:
    """Return why some of the tokens are hidden from the model; empty when none are."""
    if mask is not None:
        return CACHED if bool(mask.all()) else Uncached.PADDED.told()
    pad, ends = settings.get("pad_token_id"), settings.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    if pad is not None and pad not in ends and bool((ids == pad).any()):
        return Uncached.PAD_TOKENS.told()
    return CACHED


def attach(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    kernels: Literal["model", "own"] = "model",
    **settings: Unpack[EngineArgs],
) -> Attached:
    """Let `model.generate(**inputs)` reuse the cache; `settings` are the fields of `EngineConfig` (`store=...`).

    With `kernels="model"` the model's own attention runs. Answers are those of the unattached model up to the prefill
    schedule: equal tokens in float32, and equal bits in a cold and a warm call. Reuse ends at that schedule's steps.
    With `kernels="own"` the engine's decoder runs every forward pass. Reuse ends at the first token that differs,
    answers are stored too, and tokens come at the engine's speed. Bits are equal in a cold and a warm call, and logits
    are those of the unattached model within rounding.

    Calls that cannot be cached (batches, padding, beams, an assistant, their own cache) run as before;
    `uncached_reason` says why. Raises ConfigError when the model is attached already, UnsupportedModel when the
    engine's decoder cannot run this model here, and what `Engine.from_pretrained` raises.
    """
    if "generate" in model.__dict__:
        raise ConfigError("this model's generate is replaced already; detach it first")
    if kernels not in ("model", "own"):
        raise ConfigError(f"kernels is 'model' or 'own', got {kernels!r}")
    wanted: Literal["model", "auto"] = "model" if kernels == "model" else "auto"
    if settings.setdefault("attention", wanted) != wanted:
        raise ConfigError("kernels='model' or 'own' chooses the attention; leave attention out")
    if settings.get("reuse") == Reuse.CHUNKS:
        raise ConfigError("attach does not run reuse='chunks' in this version: pass 'exact' or 'prefix'")
    engine = Engine.from_pretrained((model, tokenizer), **settings)
    if kernels == "own" and not engine.pipeline.model.runner.is_invariant:
        engine.close()
        raise UnsupportedModel(
            f"kernels='own' needs the engine's decoder, which does not run {type(model).__name__} in {model.dtype} on "
            f"{model.device}: leave it out, and the model's own kernels run"
        )
    return Attached(engine, model, own_kernels=kernels == "own")
