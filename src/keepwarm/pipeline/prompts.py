"""The pipeline's first stage: the arguments of a request, checked and compiled into tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Unpack

import numpy as np

from keepwarm.compiler.segment import CompiledPrompt, render, segment
from keepwarm.config import EngineConfig
from keepwarm.core.blocks import TokenIds, token_ids
from keepwarm.core.request import Decoding, GenerateArgs, Request, split
from keepwarm.core.spans import Reuse
from keepwarm.core.tools import ToolCall
from keepwarm.errors import ConfigError, PromptError, PromptTooLong
from keepwarm.linker.text import TextPolicy
from keepwarm.models.base import Adapter
from keepwarm.models.tokenizer import HFTokenizer
from keepwarm.pipeline.prepared import Prepared
from keepwarm.runtime.constrain import Constraints
from keepwarm.runtime.execute import Times
from keepwarm.runtime.loader import LoadedModel

_CHARACTERS = 16  # of a prediction that are read for each token of the answer: few tokens are longer


class Prompts:
    """Checks and compiles the requests to one model. Threads may share it."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        tokenizer: HFTokenizer,
        adapter: Adapter,
        constraints: Constraints,
    ) -> None:
        self._model, self._config = model, config
        self._tokenizer, self._adapter, self._constraints = tokenizer, adapter, constraints
        self.closed = False  # True: every request is refused

    def prepare(
        self,
        prompt: str | Sequence[int] | None,
        arguments: Mapping[str, Any],
        started: float,
        epoch: int,
        *,
        answers: bool = True,
        room: int | None = None,
    ) -> Prepared:
        """Check and compile the arguments of a request. Its clock started at `started`, at this `epoch` of the store.
        Without `answers` it is only looked up: no constraint is built, and there need be room for an answer only if
        the arguments name its length. With `room`, an answer that does not fit with its prompt into this number of
        tokens, or into the context window, is shortened until it fits. Raises PromptError and ConfigError."""
        request, decoding = split(prompt, arguments)
        self._check_named(decoding)
        reuse = decoding.reuse_mode(self._config.reuse)
        if request.adapter is not None:
            _check_prefix(reuse)
        if decoding.repair is not None:
            decoding.repair_rule(self._config.repair)
        if room is None:
            compiled = self.compile(request, decoding.max_new_tokens if answers or "max_new_tokens" in arguments else 0)
        else:
            compiled = self.compile(request, 1)
            left = min(room, self._model.context_window or room) - len(compiled.tokens)
            decoding = replace(decoding, max_new_tokens=max(1, min(decoding.max_new_tokens, left)))
        constrained = time.perf_counter()
        constraint = self._constraints.of(request, decoding) if answers else None
        ready = time.perf_counter()
        times = Times(started, ready, constrain_ms=(ready - constrained) * 1e3)
        calls = decoding.tool_choice != "none" and decoding.response_schema is None
        return Prepared(
            compiled,
            decoding,
            reuse,
            times,
            epoch,
            constraint,
            request.salted_bases,
            self._predicted(decoding),
            self._parser(request) if calls else None,
        )

    def _predicted(self, decoding: Decoding) -> TokenIds | None:
        """Return the tokens of a request's prediction, as far as its answer may reach."""
        if decoding.prediction is None:
            return None
        most = decoding.max_new_tokens
        ids = self._tokenizer.encode(decoding.prediction[: most * _CHARACTERS], add_special_tokens=False)[0][:most]
        return token_ids([*takewhile(self._model.runner.vocabulary.__gt__, ids)])  # a tokenizer may have more ids

    def _check_named(self, decoding: Decoding) -> None:
        """Raise ConfigError for token ids that the model does not have."""
        largest = max((*decoding.stop_token_ids, *(decoding.logit_bias or ())), default=0)
        if largest >= (vocabulary := self._model.runner.vocabulary):
            raise ConfigError(
                f"stop_token_ids or logit_bias name token {largest}; the model's vocabulary has {vocabulary}"
            )

    def _parser(self, request: Request) -> Callable[[str], list[ToolCall]] | None:
        return self._adapter.call_parser(tools) if (tools := request.callable_tools) else None

    def compiled(self, prompt: str | Sequence[int] | None, arguments: Mapping[str, Any]) -> CompiledPrompt:
        """Compile a prompt for `warm`: as given, without the beginning of an answer."""
        request = split(prompt, arguments, answer=False, decoding=False)[0]
        if request.adapter is not None:
            _check_prefix(self._config.reuse)
        return self.compile(request, 0)

    def count_tokens(self, prompt: str | Sequence[int] | None = None, **arguments: Unpack[GenerateArgs]) -> int:
        """Return how many tokens a prompt has for `generate`. It may exceed the context window."""
        request = split(prompt, arguments)[0]
        try:
            return len(self._segmented(request).tokens)
        except PromptTooLong:
            rendered = render(request, self._adapter)
            return self._tokenizer.count(rendered.text, special=rendered.special)

    def compile(self, request: Request, max_new_tokens: int) -> CompiledPrompt:
        compiled = self._segmented(request)
        self._check_fits(compiled, max_new_tokens)
        return compiled

    def _segmented(self, request: Request) -> CompiledPrompt:
        if self.closed:
            raise ConfigError("this engine is closed; make a new one")
        lora = self._model.adapters.get(request.adapter)
        policy = TextPolicy(self._tokenizer, request.ran, least_share=self._config.least_text_share)
        compiled = segment(request, policy, self._adapter)
        return compiled if lora is None else replace(compiled, lora=lora)

    def _check_fits(self, compiled: CompiledPrompt, max_new_tokens: int) -> None:
        length, window = len(compiled.tokens), self._model.context_window
        least = min(1, max_new_tokens)
        if window is not None and length + least > window:
            raise PromptTooLong(
                f"the prompt is too long: {length} tokens > {window - least} maximum (the context window is {window}, "
                "and an answer needs a token of it): shorten the prompt",
                length,
            )
        if window is not None and length + max_new_tokens > window:
            raise PromptTooLong(
                f"the prompt has {length} tokens and {max_new_tokens} new ones are asked for, but the context window "
                f"is {window}: shorten the prompt or lower max_new_tokens",
                length,
            )
        vocabulary = self._model.runner.vocabulary
        if (largest := int(np.maximum.reduce(compiled.tokens))) >= vocabulary:
            raise PromptError(
                f"token id {largest} is outside the model's vocabulary of {vocabulary}: "
                "was the prompt made with this model's tokenizer?"
            )


def _check_prefix(reuse: Reuse) -> None:
    """Raise ConfigError for a way of reuse that requests with an adapter do not have."""
    if reuse is Reuse.CHUNKS:
        raise ConfigError("reuse='chunks' is for requests without an adapter: take reuse='exact', or leave adapter out")
