"""A caller's request: a prompt, and how its answer is chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict, get_args

from keepwarm.config import ToolOrder
from keepwarm.core.repair import RepairRule
from keepwarm.core.spans import Reuse
from keepwarm.core.texts import StoredText
from keepwarm.core.tools import tool_list
from keepwarm.errors import ConfigError

MAX_LOGPROBS = 100
MAX_STOPS = 64
MAX_STOP_LENGTH = 1000  # characters
MAX_NAMED_TOKENS = 1024  # in `stop_token_ids`, and in `logit_bias`


class PromptArgs(TypedDict, total=False):
    """Keyword arguments that make up a prompt, as `Request` describes them."""

    messages: Sequence[Mapping[str, Any]] | None
    tools: Sequence[Mapping[str, Any]] | Mapping[str, Any] | None
    found_tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Any] | None
    segments: Sequence[str] | None
    salt: str | None
    tool_order: ToolOrder | None
    template_args: Mapping[str, Any] | None
    public_header: bool
    ran: StoredText | None
    cacheable_prefix: int | None
    bases: Sequence[PromptArgs]
    adapter: str | None


class GenerateArgs(PromptArgs, total=False):
    """Keyword arguments of `Engine.generate` and `Engine.stream`, as `Request` and `Decoding` describe them.

    `session` names the session that the request is a turn of.
    """

    session: str | None
    max_new_tokens: int
    reuse: str | None
    temperature: float
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int]
    min_tokens: int
    ignore_eos: bool
    seed: int | None
    trace: bool
    tool_choice: str | Mapping[str, str] | None
    parallel_tool_calls: bool
    response_schema: Mapping[str, Any] | None
    logprobs: int | None
    repair: str | None
    prediction: str | None


@dataclass(frozen=True)
class Request:
    """A prompt: exactly one of `prompt`, `messages` or `segments`.

    `prompt` is text or token ids; `segments` are texts that are joined and cut at each end; `tools` (in OpenAI's,
    Anthropic's or MCP's shape) and `documents` go with `messages`, or alone when warming. Tools are shown to the model
    as they are sent, down to the order of keys. `tool_order="sorted"` shows them by name, with the keys and set-like
    arrays of their schemas sorted, and overrides the engine's for this request. `found_tools` are tools that the
    messages themselves show (`Adapter.found_text`): they change no prompt, and calls of them are read and constrained
    as those of `tools`, which they need beside them. `template_args` are variables of the chat template, which override
    the engine's for this request. Everything under one `salt` is reused only under the same salt. With `public_header`
    the salt begins after the tools, system prompt and documents, whose KV is then
    shared with all tenants. `ran` is a text and the ids it was run as: a prompt that begins with it keeps these ids,
    and only the rest is tokenized.
    `cacheable_prefix` is a hint that this number of leading tokens is worth keeping: there is a cut after them, and
    nothing further is stored. `bases` are prompts of which this one is an edit, the likeliest first. With
    `reuse="chunks"`, the tokens after the edit that both have in common are moved from the KV of the first base that is
    stored, and no other chunks are reused. Bases are under the request's own salt. `adapter` is the name of a LoRA
    adapter (`Engine.adapters`) with which the prompt and its answer are computed; its KV is reused with it alone.
    """

    prompt: str | Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | Mapping[str, Any] | None = None
    found_tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Any] | None = None
    segments: Sequence[str] | None = None
    salt: str | None = None
    tool_order: ToolOrder | None = None
    template_args: Mapping[str, Any] | None = None
    public_header: bool = False
    ran: StoredText | None = None
    cacheable_prefix: int | None = None
    bases: Sequence[PromptArgs] = ()
    adapter: str | None = None
    answer: bool = True  # False: only warm the prompt, without the beginning of an answer

    def __post_init__(self) -> None:
        if self.tool_order not in (None, *get_args(ToolOrder)):
            raise ConfigError(f"tool_order must be 'as_sent' or 'sorted', got {self.tool_order!r}")
        if self.template_args is not None and not isinstance(self.template_args, Mapping):
            raise ConfigError(f"template_args must be an object of template variables, got {self.template_args!r}")
        if self.found_tools and not self.tools:
            raise ConfigError("found_tools come beside tools, which say how a call is written: pass tools=")
        wanted = self.cacheable_prefix
        if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 0):
            raise ConfigError(f"cacheable_prefix must be a number of tokens, got {wanted!r}")
        if not all(isinstance(base, Mapping) for base in self.bases):
            raise ConfigError(f"bases must be prompts, each an object of prompt arguments, got {self.bases!r}")
        if any(name in base for base in self.bases for name in ("salt", "public_header", "adapter")):
            raise ConfigError(
                "bases stand under the request's own salt, without an adapter: leave out their salt, public_header and "
                "adapter"
            )

    @property
    def callable_tools(self) -> Sequence[Any] | Mapping[str, Any] | None:
        """All tools whose calls are read."""
        return [*tool_list(self.tools), *self.found_tools] if self.tools and self.found_tools else self.tools

    @property
    def salted_bases(self) -> tuple[PromptArgs, ...]:
        """The bases under this request's salt, which may be set after they were given."""
        return tuple(PromptArgs(**base, salt=self.salt, public_header=self.public_header) for base in self.bases)


@dataclass(frozen=True)
class Decoding:
    """How the answer's tokens are chosen, and when it ends.

    `temperature` 0 is greedy; then `top_p`, `top_k`, `min_p` and `seed` must not be given. `stop` are strings (at most
    64, of at most 1,000 characters) that end the answer and are not part of it. `stop_token_ids` end the answer too,
    beside the model's own stop tokens, or instead of them with `ignore_eos`. No stop token and no stop string ends the
    answer before it has `min_tokens` tokens; `max_new_tokens` ends it in any case. `presence_penalty` is subtracted
    from the score of each token that the answer already holds; `frequency_penalty` is subtracted once for each time
    that the answer holds it. `logit_bias` maps token ids to numbers from -100 to 100, which are added to their scores.

    `reuse` overrides the engine's weakest allowed label; `"off"` neither looks up nor stores. `trace` digests every
    step's logits. `repair` overrides how blended KV is repaired (`core.repair`).

    `tool_choice` constrains the answer, in the form in which the model's family writes calls: `"required"` to one or
    more calls of listed tools, `{"name": ...}` to one call of that tool, `"auto"` to text in which every call that
    begins is valid, `"none"` to text without calls. If several calls are allowed, the model decides how many it makes.
    With `parallel_tool_calls=False` the answer ends after the first call, under any `tool_choice`; without a
    `tool_choice`, only the form of that call is constrained. `response_schema` constrains the answer to JSON of that
    schema on one line; an empty schema allows any object. Without any of these options nothing is constrained.

    `logprobs` asks for the log-probability of each token and of this number of likeliest tokens, from the model's own
    logits: before constraints, penalties and temperature.

    `prediction` is a text that the answer will mostly repeat, such as a file to be edited. Its tokens are drafted: this
    changes how long the answer takes, and not the answer. Nothing is then drafted from earlier answers.
    """

    max_new_tokens: int = 64
    reuse: str | None = None
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None
    trace: bool = False
    tool_choice: str | Mapping[str, str] | None = None
    parallel_tool_calls: bool = True
    response_schema: Mapping[str, Any] | None = None
    logprobs: int | None = None
    repair: str | None = None
    prediction: str | None = None

    def __post_init__(self) -> None:
        numbers = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        for name in numbers:  # integers are accepted; other values are refused before anything runs
            value = getattr(self, name)
            if value is not None:
                if not _is_number(value) or not math.isfinite(value):
                    raise ConfigError(f"{name} must be a number, got {value!r}")
                object.__setattr__(self, name, float(value))
        if any(not isinstance(text, str) for text in self.stop_strings):
            raise ConfigError(f"stop must be a text or a list of texts, got {self.stop!r}")
        if len(self.stop_strings) > MAX_STOPS:
            raise ConfigError(f"stop may hold {MAX_STOPS} texts, got {len(self.stop_strings)}")
        if (longest := max(map(len, self.stop_strings), default=0)) > MAX_STOP_LENGTH:
            raise ConfigError(f"a stop text may have {MAX_STOP_LENGTH} characters, got one of {longest}")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature < 0:
            raise ConfigError(f"temperature must be 0 (greedy) or positive, got {self.temperature}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k must be at least 1, got {self.top_k}")
        if self.repetition_penalty is not None and self.repetition_penalty <= 0:
            raise ConfigError(f"repetition_penalty must be positive, got {self.repetition_penalty}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p must lie in [0, 1], got {self.min_p}")
        drawn = ("top_p", "top_k", "min_p", "seed")
        if self.temperature == 0 and (given := [name for name in drawn if getattr(self, name) is not None]):
            raise ConfigError(f"{', '.join(given)} need temperature > 0; at temperature 0 decoding is greedy")
        if not isinstance(self.prediction, str | None):
            raise ConfigError(f"prediction must be a text, got {type(self.prediction).__name__}")
        try:
            (self.prediction or "").encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"prediction holds half a surrogate pair, which is no Unicode text: {error}") from None
        self._check_tokens()
        self._check_constraint()
        if self.logprobs is not None and (
            isinstance(self.logprobs, bool)
            or not isinstance(self.logprobs, int)
            or not 0 <= self.logprobs <= MAX_LOGPROBS
        ):
            raise ConfigError(f"logprobs must be a whole number from 0 to {MAX_LOGPROBS}, got {self.logprobs!r}")

    def _check_tokens(self) -> None:
        bias = self.logit_bias or {}
        if not isinstance(bias, Mapping) or isinstance(self.stop_token_ids, str | bytes | int | float):
            raise ConfigError(
                "stop_token_ids must be a list of token ids, and logit_bias an object of numbers by token id; "
                f"got {self.stop_token_ids!r} and {self.logit_bias!r}"
            )
        if any(not _is_whole(token) or token < 0 for token in (*self.stop_token_ids, *bias)):
            raise ConfigError("stop_token_ids and the keys of logit_bias must be token ids: whole numbers from 0 on")
        if any(not _is_number(value) or not -100 <= value <= 100 for value in bias.values()):
            raise ConfigError("the values of logit_bias must be numbers from -100 to 100")
        if max(len(self.stop_token_ids), len(bias)) > MAX_NAMED_TOKENS:
            raise ConfigError(
                f"stop_token_ids and logit_bias may name {MAX_NAMED_TOKENS} tokens each, "
                f"got {len(self.stop_token_ids)} and {len(bias)}"
            )
        if not _is_whole(self.min_tokens) or self.min_tokens < 0:
            raise ConfigError(f"min_tokens must be a whole number from 0 on, got {self.min_tokens!r}")
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        bound = self.tool_choice is not None or not self.parallel_tool_calls or self.response_schema is not None
        if bound and (self.min_tokens or self.ignore_eos or self.stop_token_ids):
            raise ConfigError(
                "min_tokens, ignore_eos and stop_token_ids say when an answer ends, and so do tool_choice, "
                "parallel_tool_calls=False and response_schema: leave out one or the other"
            )

    def _check_constraint(self) -> None:
        if not isinstance(self.parallel_tool_calls, bool):
            raise ConfigError(f"parallel_tool_calls must be True or False, got {self.parallel_tool_calls!r}")
        choice, schema = self.tool_choice, self.response_schema
        named = isinstance(choice, Mapping) and set(choice) == {"name"} and isinstance(choice["name"], str)
        if choice not in (None, "none", "auto", "required") and not named:
            raise ConfigError(
                f"tool_choice must be 'none', 'auto', 'required' or {{'name': the name of a tool}}, got {choice!r}"
            )
        if schema is not None and not isinstance(schema, Mapping):
            raise ConfigError(f"response_schema must be a JSON Schema object, got {type(schema).__name__}")
        if schema is not None and choice not in (None, "none"):
            raise ConfigError(f"response_schema and tool_choice={choice!r} exclude each other: leave out one of them")

    def ends(self, stop_tokens: frozenset[int]) -> frozenset[int]:
        """Return the ids of the tokens that end the answer; `stop_tokens` are the model's own."""
        return (frozenset() if self.ignore_eos else stop_tokens) | frozenset(self.stop_token_ids)

    @property
    def takes_largest(self) -> bool:
        """Whether each token is the one with the largest logit, and nothing else is asked of the logits. A constraint
        is not looked at."""
        penalties = self.presence_penalty, self.frequency_penalty, self.logit_bias, self.min_tokens
        reads = self.trace or self.logprobs is not None or self.repetition_penalty not in (None, 1.0)
        return self.temperature == 0 and not reads and not any(penalties)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        given = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return tuple(text for text in given if text)

    def repair_rule(self, default: str) -> RepairRule:
        return RepairRule.parse(default if self.repair is None else self.repair)

    def reuse_mode(self, default: Reuse) -> Reuse:
        return default if self.reuse is None else Reuse.parse(self.reuse)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_PROMPT_FIELDS = frozenset(PromptArgs.__annotations__)
_DECODING_FIELDS = frozenset(field.name for field in fields(Decoding))


def split(
    prompt: str | Sequence[int] | None, arguments: Mapping[str, Any], *, answer: bool = True, decoding: bool = True
) -> tuple[Request, Decoding]:
    """Return the request and decoding of one call. Raises ConfigError for an unknown argument: none is ignored."""
    known = _PROMPT_FIELDS | _DECODING_FIELDS | {"session"} if decoding else _PROMPT_FIELDS
    if unknown := sorted(arguments.keys() - known):
        raise ConfigError(f"unknown argument {', '.join(unknown)}; known are prompt, {', '.join(sorted(known))}")
    asked = {name: value for name, value in arguments.items() if name in _PROMPT_FIELDS}
    chosen = {name: value for name, value in arguments.items() if name in _DECODING_FIELDS}
    request, choice = Request(prompt, **asked, answer=answer), Decoding(**chosen)
    if choice.tool_choice not in (None, "none") and not request.tools:
        raise ConfigError(f"tool_choice={choice.tool_choice!r} needs tools to choose from: pass tools=")
    if not choice.parallel_tool_calls and not request.tools and decoding:
        raise ConfigError("parallel_tool_calls=False needs tools: pass tools=, or leave it out")
    return request, choice
