"""A tokenizer's chat template, rendered as transformers renders it, without doing the same work for every request.

For a request with tools, most of the time goes into copying the schemas and writing them as JSON, once per rendering.
Here schemas remember their JSON texts (`frozen`), and the compiled template of transformers is called directly.
Anything unusual goes through the tokenizer's own `apply_chat_template`.
"""

from __future__ import annotations

import marshal
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from keepwarm.core.deadline import go_on
from keepwarm.errors import TemplateError
from keepwarm.models.watched import Watch, WatchedMessages

RESERVED = frozenset({  # variables that a request cannot set: they hold its own messages, or the tokenizer's tokens
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "chat_template",
    "conversation",
    "bos_token",
    "eos_token",
})
_TESTED = re.compile(r"(?<![\w.])([A-Za-z_]\w*)\s+is\s+(?:not\s+)?defined\b")
_ORDINARY = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})  # keys that are passed as they are
_LOOP = frozenset({"first", "last", "index", "index0", "length", "revindex", "revindex0", "depth", "depth0"})
_END = f"\x00{secrets.token_hex(16)}\x00"  # in no user's text
_ROUND = f"\x00{secrets.token_hex(16)}\x00"  # in no user's text
_WRITTEN = secrets.token_hex(16)  # in no user's text
_NAMED = re.compile(rf'"{_WRITTEN}(\d+)\."')
_SHOWN = "Petrel"  # a text that templates may print
_LEVELS = 8  # most objects and lists around a WrittenObject: messages, their calls, and what templates put around them
_PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]


@dataclass(frozen=True)
class Drawn:
    """A rendered prompt, and what is known of its parts without rendering any of them again."""

    text: str
    said: int | None = None  # characters before the beginning of an answer; None: not known
    ends: Sequence[int | None] = ()  # characters at which each message has ended, whatever follows it; None: not known


class JsonObject(dict[str, Any]):
    """An object that is never changed again, and the JSON texts it was written as."""

    __slots__ = ("_texts",)


class JsonArray(list[Any]):
    """A list that is never changed again, and the JSON texts it was written as."""

    __slots__ = ("_texts",)


class WrittenObject(dict[str, Any]):
    """An object that templates print as the text it was read from."""

    __slots__ = ("written",)

    def __init__(self, value: Mapping[str, Any], written: str) -> None:
        super().__init__(value)
        self.written = written

    def __str__(self) -> str:
        return self.written


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a list of parts."""
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def message_bytes(message: dict[str, Any]) -> bytes:
    """Return bytes that are equal only for messages which are rendered equally."""
    try:
        return marshal.dumps(message, 2)
    except ValueError:  # a WrittenObject in a call; no message holds a tuple
        return marshal.dumps(_replaced(message, lambda part: (part.written,)), 2)


def frozen(value: Any) -> Any:
    """Return a deep copy of a JSON value whose objects and lists remember how they were written. Never change it."""
    if isinstance(value, Mapping):
        copy: Any = JsonObject((key, frozen(item)) for key, item in value.items())
    elif isinstance(value, list | tuple):
        copy = JsonArray(frozen(item) for item in value)
    else:
        return value
    copy._texts = {}
    return copy


class ChatTemplate:
    """The chat templates of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._names: dict[str, str] = dict(getattr(tokenizer, "special_tokens_map", {}))  # that templates mention
        self._compiled: dict[str, Any] = {}  # None for a template that must be rendered by the tokenizer itself
        self._in_parts: dict[str, bool] = {}  # whether a template takes contents as lists of parts alone

    def source(self, *, tools: bool = False) -> str | None:
        """Source of the template; None when the tokenizer has none. Some have a separate one for tools."""
        template = getattr(self._tokenizer, "chat_template", None)
        if isinstance(template, dict):
            template = (template.get("tool_use") if tools else None) or template.get("default")
        return template if isinstance(template, str) else None

    def render(self, messages: Sequence[dict[str, Any]], **kwargs: Any) -> str:
        """Return the rendered text. Raises TemplateError with the template's own words."""
        return self.draw(messages, **kwargs).text

    def draw(self, messages: Sequence[dict[str, Any]], **kwargs: Any) -> Drawn:
        """Render messages as `render` does. Return the text with what is known of its parts."""
        import jinja2

        go_on()
        source = self.source(tools=bool(kwargs.get("tools")))
        try:
            if source is not None and self._takes_parts(source):
                messages = [*map(_in_parts, messages)]
            elif source is not None and messages and all(_ORDINARY.issuperset(message) for message in messages):
                if source not in self._compiled:
                    self._compiled[source] = self._prepare(source)
                if self._compiled[source] is not None:
                    with suppress(AttributeError, TypeError, ValueError):  # the template needs a real list
                        return self._direct(self._compiled[source], messages, kwargs)
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, chat_template=source, **kwargs
            )
            return Drawn(text)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the model's chat template does not compile (line {error.lineno}: {error.message}): mend it, or give "
                "a text (prompt=, /v1/completions, keepwarm run --raw)"
            ) from error
        except (
            jinja2.TemplateError,
            TypeError,
            KeyError,
            IndexError,
            AttributeError,
            ValueError,
            RecursionError,
        ) as error:
            raise TemplateError(f"the model's chat template refused the messages: {error}") from error

    def _takes_parts(self, source: str) -> bool:
        """Whether a template passes over a content that is a text, and shows one that is a list with a part of text. So
        do those of some models that read pictures."""
        if source not in self._in_parts:
            asked = {"role": "user", "content": _SHOWN}
            self._in_parts[source] = not self._shows(source, asked) and self._shows(source, _in_parts(asked))
        return self._in_parts[source]

    def _shows(self, source: str, message: dict[str, Any]) -> bool:
        with suppress(Exception):  # whatever a template raises, it does not show the text
            return _SHOWN in self._tokenizer.apply_chat_template([message], tokenize=False, chat_template=source)
        return False

    def _direct(self, compiled: Any, messages: Sequence[dict[str, Any]], kwargs: dict[str, Any]) -> Drawn:
        given = self._names | {"tools": None, "documents": None, "add_generation_prompt": False, **kwargs}
        watch = Watch([{key: value for key, value in message.items() if value is not None} for message in messages])
        pieces: list[str] = []
        said = None
        for piece in compiled.generate(messages=WatchedMessages(watch), **given):
            if _ROUND in piece:
                watch.rounds += piece.count(_ROUND)
                piece = piece.replace(_ROUND, "")
            if _END in piece:
                before, _, piece = piece.partition(_END)
                said = watch.written + len(before)
                piece = before + piece
            watch.written += len(piece)
            pieces.append(piece)
        return Drawn("".join(pieces), said, watch.ends)

    def _prepare(self, source: str) -> Any:
        """Return the compiled template with a `tojson` that remembers; None unless it renders as the tokenizer does."""
        try:
            from transformers.utils.chat_template_utils import _compile_jinja_template

            shared = _compile_jinja_template(source).environment
        except (ImportError, AttributeError):  # another version of transformers
            return None
        environment = shared.overlay()
        write = shared.filters["tojson"]

        def tojson(value: Any, *args: Any, **kwargs: Any) -> Any:
            texts = getattr(value, "_texts", None)
            if texts is None:
                return _as_written(value, lambda plain: write(plain, *args, **kwargs))
            form = repr((args, kwargs))
            if form not in texts:
                texts[form] = write(value, *args, **kwargs)
            return texts[form]

        environment.filters = {**shared.filters, "tojson": tojson}
        _quicken(environment)
        compiled = _marked(environment, source)
        tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
        for more in ({}, {"tools": tools}):
            for chat in (_PROBE, [{"role": "system", "content": "s"}, *_PROBE]):
                if not self._agrees(compiled, source, chat, more):
                    return None
        return compiled

    def _agrees(self, compiled: Any, source: str, chat: list[dict[str, Any]], more: dict[str, Any]) -> bool:
        import jinja2

        try:
            theirs = self._tokenizer.apply_chat_template(chat, tokenize=False, chat_template=source, **more)
        except (jinja2.TemplateError, TypeError, KeyError, IndexError, AttributeError, ValueError):
            return True  # refused, as ours will be
        try:
            return self._direct(compiled, chat, frozen(more)).text == str(theirs)
        except (jinja2.TemplateError, TypeError, KeyError, IndexError, AttributeError, ValueError):
            return False


def _as_written(value: Any, write: Callable[[Any], str]) -> str:
    """Write a value as JSON, the WrittenObjects in it as the texts they were read from."""
    texts: list[str] = []

    def named(part: WrittenObject) -> str:
        texts.append(part.written)
        return f"{_WRITTEN}{len(texts) - 1}."

    copy = _replaced(value, named)
    return _NAMED.sub(lambda found: texts[int(found[1])], write(copy)) if texts else write(value)


def _replaced(value: Any, put: Callable[[WrittenObject], Any], levels: int = _LEVELS) -> Any:
    """Return a copy of a value with something else for each WrittenObject in it."""
    if isinstance(value, WrittenObject):
        return put(value)
    if levels and type(value) is dict:
        return {key: _replaced(item, put, levels - 1) for key, item in value.items()}
    return [_replaced(item, put, levels - 1) for item in value] if levels and type(value) is list else value


def _quicken(environment: Any) -> None:
    """Let a sandboxed environment give out the plain attributes of `loop`, which it always allows, without its checks:
    most templates ask for one in every round, and the checks take half the time of rendering."""
    from jinja2.runtime import LoopContext

    checked = environment.getattr

    def unchecked(value: Any, name: str) -> Any:
        return getattr(value, name) if type(value) is LoopContext and name in _LOOP else checked(value, name)

    environment.getattr = unchecked


def _marked(environment: Any, source: str) -> Any:
    """Return the compiled template, which also writes `_ROUND` at the end of each round of an outer loop.

    If the beginning of an answer is the last thing it writes, it writes `_END` before that.
    """
    from jinja2 import Template, nodes

    parsed = environment.parse(source)
    asked = [name for name in parsed.find_all(nodes.Name) if name.name == "add_generation_prompt"]
    last = parsed.body[-1] if parsed.body else None
    if not asked:
        parsed.body.append(nodes.Output([nodes.TemplateData(_END)]))
    elif isinstance(last, nodes.If) and asked == [last.test] and not last.elif_ and not last.else_:
        parsed.body.insert(-1, nodes.Output([nodes.TemplateData(_END)]))
    for loop in _outer_loops(parsed.body):
        loop.body.append(nodes.Output([nodes.TemplateData(_ROUND)]))
    return Template.from_code(environment, environment.compile(parsed), environment.make_globals(None))


def _outer_loops(body: Sequence[Any]) -> Iterator[Any]:
    """Yield the loops that write their text at once: not inside another loop, a macro or a block."""
    from jinja2 import nodes

    for node in body:
        if isinstance(node, nodes.For):
            yield node
        elif isinstance(node, nodes.If):
            yield from _outer_loops([*node.body, *node.elif_, *node.else_])


def template_variables(template: str) -> frozenset[str]:
    """Return the names that the template reads from outside."""
    import jinja2
    from jinja2 import meta

    # a variable that the template also sets itself is not "undeclared": count those it tests for being defined
    tested = frozenset(_TESTED.findall(template))
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False)
    try:
        read = meta.find_undeclared_variables(environment.parse(template))
    except jinja2.TemplateError:  # transformers' own extensions (generation blocks), or unknown filters: see the text
        return tested | {name for name in ("tools", "documents", "date_string", "enable_thinking") if name in template}
    return tested | read
