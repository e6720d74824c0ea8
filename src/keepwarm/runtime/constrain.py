"""Constrained decoding through llguidance: it decides at every step which tokens may come next.

A constraint affects only the choice of tokens, after the forward pass. It changes neither what is computed, reused and
stored, nor a bit of any logit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from keepwarm.config import ToolOrder
from keepwarm.core.deadline import go_on
from keepwarm.core.recent import Recent
from keepwarm.core.request import Decoding, Request
from keepwarm.core.tools import shown_tools, tool_name
from keepwarm.errors import ConfigError, PromptError
from keepwarm.models.base import Tools
from keepwarm.models.generic import GenericAdapter
from keepwarm.models.grammar import answer_grammar, inside
from keepwarm.models.schemas import check_schema, json_path
from keepwarm.models.tokenizer import HFTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

_TRIES = 100  # at most this many schemas are compiled one by one to find the faulty one
_KEPT = 4 << 20  # matchers are kept for grammars of this many characters in all


class Constraint:
    """What may follow in one answer. It changes with every token, so it is not shared."""

    def __init__(self, matcher: LLMatcher, size: int) -> None:
        self._matcher = matcher
        self._words = np.empty((size + 31) // 32, dtype=np.int32)  # one bit per token of the tokenizer
        self.ended = False  # True: nothing may follow, the answer is complete

    def allowed(self, size: int) -> npt.NDArray[np.bool_]:
        """Return which of `size` tokens may come next, `[size]`. Raises PromptError when none may."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        bits = np.unpackbits(self._words.view(np.uint8), count=min(size, 8 * self._words.nbytes), bitorder="little")
        if self._matcher.is_error() or not bits.any():
            raise PromptError(f"the constraint cannot be followed: {_reason(self._matcher.get_error())}")
        return np.pad(bits, (0, size - len(bits))).view(np.bool_)

    def take(self, token: int) -> None:
        """Record the chosen token."""
        if not self._matcher.consume_token(token):
            raise PromptError(f"the constraint cannot be followed: {_reason(self._matcher.get_error())}")
        self.ended = self._matcher.is_stopped()


@dataclass(frozen=True)
class _Tables:
    """llguidance's tables for a tokenizer."""

    tokenizer: LLTokenizer
    special: frozenset[int]  # tokens that cannot be written as text, except those that end an answer


class Constraints:
    """Makes the constraints of one engine's requests. Threads may share it."""

    def __init__(self, tokenizer: HFTokenizer, adapter: GenericAdapter, stop_tokens: frozenset[int], size: int) -> None:
        """`size` is the number of tokens that the model knows; `stop_tokens` end an answer."""
        self._tokenizer = tokenizer
        self._adapter = adapter
        self._stop_tokens = stop_tokens
        self._size = size
        self._lock = threading.Lock()
        self._known: _Tables | None = None
        self._made: Recent[str, LLMatcher] = Recent(_KEPT)
        self.tables_ms = 0.0  # time that the tokenizer's tables took; the first constraint builds them

    def of(self, request: Request, decoding: Decoding) -> Constraint | None:
        """Return the constraint that a request needs; None for none. Raises PromptError and ConfigError."""
        choice, schema = decoding.tool_choice, decoding.response_schema
        if schema is not None:
            return self._answer(schema)
        tools = request.callable_tools
        if not tools or (choice is None and decoding.parallel_tool_calls):
            return None
        return self._calls(tools, choice, decoding.parallel_tool_calls, request.tool_order)

    def forget(self) -> None:
        """Forget the schemas of earlier requests."""
        self._made.clear()

    def _answer(self, schema: Mapping[str, Any]) -> Constraint:
        try:
            content = json.dumps(schema)  # keeps the order of keys, which is the order in the answer
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError(f"response_schema must hold plain JSON values: {error}") from None

        def grammar() -> str:
            check_schema(schema, "response_schema")
            return answer_grammar(schema)

        return self._constraint(f"answer {content}", grammar, lambda: [("response_schema", "$", schema)])

    def _calls(
        self, tools: Tools, choice: str | Mapping[str, str] | None, several: bool, order: ToolOrder | None
    ) -> Constraint:
        """Return the constraint for calls. Without a `choice` it fixes only the form of a call, not its arguments, so
        it refuses no schema."""
        adapter, tables, free = self._adapter, self._tables(), choice is None

        def special(text: str) -> int | None:
            number = self._tokenizer.token_id(text)
            return number if number is not None and tables.tokenizer.is_special_token(number) else None

        return self._constraint(
            f"calls {adapter.tools_key(tools, order)} {choice} {several}",
            lambda: adapter.call_grammar(
                tools, choice or "auto", special, tables.special, several=several, free=free, tool_order=order
            ),
            lambda: [
                (f"tool {tool_name(tool)!r}", "$.parameters", tool["function"]["parameters"])
                for tool in shown_tools(tools)
                if tool["function"].get("parameters")
            ],
        )

    def _constraint(
        self, content: str, grammar: Callable[[], str], schemas: Callable[[], list[tuple[str, str, Mapping[str, Any]]]]
    ) -> Constraint:
        """Return a constraint with a copy of the grammar's matcher, which is compiled the first time.

        `schemas` are the possible causes of an error: a description, a path and the schema for each.
        """
        tables, size = self._tables(), self._size
        key = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
        made = self._made.get(key)
        if made is None:
            text = grammar()
            made = _guide().LLMatcher(tables.tokenizer, text, log_level=0)
            if made.is_error():
                raise PromptError(_blamed(made.get_error(), schemas()))
            if not any(made.compute_bitmask()) or made.is_error():
                raise PromptError("the constraint cannot be followed: no answer satisfies it")
            self._made.put(key, made, len(text))
        return Constraint(made.deep_copy(), max(size, tables.tokenizer.vocab_size))

    def prepare(self) -> None:
        """Build the tokenizer's tables now instead of in a request. Raises ConfigError as a request would."""
        self._tables()

    def _tables(self) -> _Tables:
        """Return the tokenizer's tables. Building them once takes about a second for 128,000 tokens."""
        with self._lock:
            if self._known is None:
                started = time.perf_counter()
                described = self._tokenizer.description()
                if described is None:
                    raise ConfigError(
                        "this model's tokenizer has no fast form (tokenizer.json), which tool_choice and "
                        "response_schema need: leave them out, or convert the tokenizer"
                    )
                known = self._described(described)
                added = self._tokenizer.added_ids - self._stop_tokens
                self._known = _Tables(known, frozenset(n for n in added if known.is_special_token(n)))
                self.tables_ms = (time.perf_counter() - started) * 1e3
                log.info("tables for constrained decoding built in %.0f ms", self.tables_ms)
            return self._known

    def _described(self, tokenizer: str) -> LLTokenizer:
        make = partial(_guide().LLTokenizer, tokenizer, eos_token=sorted(self._stop_tokens) or None)
        found: LLTokenizer
        try:
            found = make(n_vocab=self._size)
        except ValueError:  # it has more tokens than the model knows; those are not chosen
            found = make()
        return found


def _guide() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ConfigError(
            "tool_choice and response_schema need the package llguidance: pip install 'keepwarm[constrain]'"
        ) from None
    return llguidance


def _blamed(error: str, schemas: list[tuple[str, str, Mapping[str, Any]]]) -> str:
    """Return a message for a grammar's error, with the deepest part of a schema that causes it on its own."""
    tries = iter(range(_TRIES))
    for where, root, schema in schemas:
        names = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
        if found := _refusal(schema, names, (), tries):
            path, reason = found
            return f"{where}: {json_path(path, root)} cannot be followed by constrained decoding: {reason}"
    return f"the constraint cannot be compiled: {_reason(error)}"


def _refusal(
    schema: Mapping[str, Any], names: Mapping[str, Any], path: tuple[str | int, ...], tries: Iterator[int]
) -> tuple[tuple[str | int, ...], str] | None:
    """Return where in a schema, and why, it cannot be compiled; None when it can, or when no `tries` are left. `names`
    are the root's definitions."""
    if next(tries, None) is None:
        return None
    go_on()
    error = _guide().LLMatcher.validate_grammar(answer_grammar({**names, **schema} if path else schema))
    if not error or error.startswith("WARNING"):
        return None
    for step, child in inside(schema):
        deeper = _refusal(child, names, (*path, *step), tries) if isinstance(child, Mapping) and child else None
        if deeper is not None:
            return deeper
    return path, _reason(error)


def _reason(error: str) -> str:
    """Return the first words of llguidance's message, without the grammar and the parser's state."""
    text = error.partition("\n   1 |")[0].partition("\n<state>")[0].rpartition("failed to compile JSON schema: ")[2]
    text = " ".join(text.partition(" Enable '")[0].split())
    return text if len(text) <= 300 else f"{text[:300]}..."
