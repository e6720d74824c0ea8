"""The adapter over a tokenizer's own chat template.

Cuts are found on the whole rendered prompt, never by tokenizing parts. The end of a part is learnt from renderings that
do not contain what follows (so user text cannot move it). It is declared only if the whole prompt really begins with
them. What was learnt about a header or a conversation's beginning is remembered for the next request that has it.
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from keepwarm.config import ToolOrder
from keepwarm.core.identity import digest, json_digest, json_text
from keepwarm.core.recent import Recent, common_length
from keepwarm.core.spans import SegmentKind
from keepwarm.core.tools import ToolCall, declared_ends, shown_tools, tool_name
from keepwarm.errors import ConfigError, PromptTooLong, TemplateError
from keepwarm.models import toolcalls
from keepwarm.models.base import Mark, Message, Rendered, Tools
from keepwarm.models.calls import SampledCalls
from keepwarm.models.grammar import calls_grammar
from keepwarm.models.marks import PROBES, Beginnings
from keepwarm.models.messages import check_roles, document_pair, document_text, plain
from keepwarm.models.schemas import check_tool
from keepwarm.models.template import RESERVED, Drawn, frozen, template_variables
from keepwarm.models.tokenizer import HFTokenizer

_PROBE_TOOL = {"name": "a_tool", "description": "A tool.", "parameters": {"type": "object", "properties": {}}}
_KEPT = 8 << 20  # characters of what is remembered of tools, of checked tools and of headers, each
_TOOL_ENDS = 8  # most ends of tools that are looked for per request; each takes some renderings
_USER_TAG = 64  # characters; the template's text before a user's own is shorter
_NO_TEMPLATE = "the model has no chat template: give a text (prompt=, /v1/completions, keepwarm run --raw)"
_FIXED_DATE = "26 Jul 2024"  # Llama's templates fall back to it themselves; today's date would change the key daily


@dataclass(frozen=True, eq=False)
class _Shown:
    """A request's tools as they are rendered."""

    schemas: Sequence[dict[str, Any]] = ()
    ends: tuple[int, ...] = ()  # numbers of leading tools after which the request asks for a cut
    key: str = ""  # digest of their texts, in order


@dataclass(frozen=True, eq=False)
class _Header:
    """The part of a prompt before the first message, which does not depend on what the user says."""

    head: list[Message]  # the system message, if there is one
    kwargs: dict[str, Any]  # the template's variables
    key: bytes
    text: str = ""
    tokens: int | None = None  # how many leading tokens stay the same under any user text; None: all of `text`'s
    marks: tuple[Mark, ...] = ()


class GenericAdapter:
    """Renders chat prompts with the tokenizer's template. What it has no place for goes after the system prompt."""

    forms: tuple[toolcalls.Form, ...] = (toolcalls.tagged, toolcalls.mistral, toolcalls.python_tag, toolcalls.bare)
    ends: tuple[str, ...] = ()  # tokens that end an answer in this family, besides those its template shows

    def __init__(
        self,
        tokenizer: HFTokenizer,
        *,
        tool_order: ToolOrder = "as_sent",
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._order = tool_order
        self._template = tokenizer.template(tools=True) or ""
        self._variables = template_variables(self._template)
        self._args = self.template_defaults() | dict(template_args or {})
        self._tools: Recent[bytes, _Shown] = Recent(_KEPT)
        self._checked: Recent[str, bool] = Recent(_KEPT)
        self._headers: Recent[bytes, _Header] = Recent(_KEPT)
        self._beginnings = Beginnings(tokenizer)
        tools = [None, shown_tools([_PROBE_TOOL])][: 1 + (tokenizer.template() != tokenizer.template(tools=True))]
        renders = [partial(self._text, kwargs=self._args | {"tools": each}, answer=False) for each in tools]
        self._calls = SampledCalls(renders, partial(self._calls_in, names=None), self._template)

    @cached_property
    def identity(self) -> str:
        """Hex digest of what shapes a prompt besides the request: template, its variables, the adapter's kind."""
        return json_digest("adapter", [type(self).__name__, self._template, self._args])

    def forget(self) -> None:
        """Forget the texts of earlier prompts, here and in the tokenizer."""
        for memory in (self._tools, self._checked, self._headers):
            memory.clear()
        for part in (self._beginnings, self._calls, self._tokenizer):
            part.forget()

    # ---- what families override ----

    def template_defaults(self) -> dict[str, Any]:
        """Variables of the template that are set unless the caller sets them."""
        return {"date_string": _FIXED_DATE} if "date_string" in self._variables else {}

    def tools_text(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """The tools as text, for templates without a place for them."""
        lines = "\n".join(map(json_text, schemas))
        return (
            'You may call the functions below. To call one, answer with a JSON object with the keys "name" and '
            f'"arguments".\n<tools>\n{lines}\n</tools>'
        )

    def found_text(self, tools: Tools, tool_order: ToolOrder | None = None) -> str:
        """The same for every family: how a call is written has been said with the first tools."""
        lines = "\n".join(map(json_text, self._shown(tools, tool_order).schemas))
        return f"You may call the functions below, too, as those above.\n<tools>\n{lines}\n</tools>"

    @property
    def written(self) -> toolcalls.Written:
        """How constrained decoding writes calls; one of the `forms` reads it."""
        return toolcalls.Written()

    def history(self, chat: list[Message]) -> list[Message]:
        """Messages as the family's template wants them."""
        return self._calls.shown(chat)

    # ---- the answer ----

    @cached_property
    def stop_tokens(self) -> frozenset[int]:
        found = {self._tokenizer.token_id(text) for text in (*self.ends, *self._shown_end())}
        return frozenset(number for number in found if number is not None)

    def _shown_end(self) -> tuple[str, ...]:
        """The special token that the template puts right after what an assistant said."""
        try:
            text = self._text([{"role": "user", "content": "Ab"}, {"role": "assistant", "content": "Zq"}], {}, False)
        except TemplateError:
            return ()
        after = text.rpartition("Zq")[2]
        return tuple(token for token in self._tokenizer.splitters if after.startswith(token))

    def call_parser(self, tools: Tools) -> Callable[[str], list[ToolCall]]:
        return partial(self._calls_in, names={tool_name(schema) for schema in self._shown(tools, None).schemas})

    def parse_tool_calls(self, text: str, tools: Tools | None = None) -> list[ToolCall]:
        return self._calls_in(text, None) if tools is None else self.call_parser(tools)(text)

    def _calls_in(self, text: str, names: set[str] | None) -> list[ToolCall]:
        said = toolcalls.answered(text)
        for form in self.forms:
            if calls := form(said, names):
                return calls if names is None else [call for call in calls if call.name in names]
        return []

    def tools_key(self, tools: Tools, tool_order: ToolOrder | None = None) -> str:
        """Hex digest of these tools as they are shown, in their order."""
        return self._shown(tools, tool_order).key

    def call_grammar(
        self,
        tools: Tools,
        choice: str | Mapping[str, str],
        special: Callable[[str], int | None],
        specials: Iterable[int],
        *,
        several: bool = True,
        free: bool = False,
        tool_order: ToolOrder | None = None,
    ) -> str:
        schemas = self._shown(tools, tool_order).schemas
        if free:
            schemas = [{"type": "function", "function": {"name": tool_name(schema)}} for schema in schemas]
            schemas = [s | {"function": s["function"] | {"parameters": {"type": "object"}}} for s in schemas]
        return calls_grammar(self.written, schemas, choice, special, specials, several=several)

    # ---- the prompt ----

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Tools | None = None,
        documents: Sequence[Any] | None = None,
        *,
        answer: bool = True,
        tool_order: ToolOrder | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> Rendered:
        if self._tokenizer.template() is None:
            raise TemplateError(_NO_TEMPLATE)
        chat, declared = plain(messages)
        check_roles(chat, self._template)
        chat = self.history(chat)
        first = 1 if chat and chat[0]["role"] == "system" else 0
        header = self._header(chat[:first], self._shown(tools, tool_order), documents, template_args or {})
        if len(chat) == first and not answer:
            return Rendered(header.text, header.marks, special=False, keep_tokens=header.tokens)
        whole = [*header.head, *chat[first:]]
        drawn = self._tokenizer.draw(whole, add_generation_prompt=answer, **header.kwargs)
        if not answer and whole[-1]["role"] == "assistant":
            stays = self._beginnings.followed(whole, header.kwargs)
            if stays and not stays.startswith(drawn.text):
                drawn = Drawn(stays)
        in_place = drawn.text.startswith(header.text)
        moved = len(whole) - len(messages)  # 1 for a system message that only holds what was folded into it
        hard = {index + moved for index in declared}
        ends = self._beginnings.marks(drawn, whole, len(header.head), header.kwargs, header.key, hard, in_place)
        return Rendered(drawn.text, (*(header.marks if in_place else ()), *ends), special=False)

    def _text(self, chat: list[Message], kwargs: dict[str, Any], answer: bool) -> str:
        return self._tokenizer.render(chat, add_generation_prompt=answer, **kwargs)

    def _shown(self, tools: Tools | None, order: ToolOrder | None) -> _Shown:
        if not tools:
            return _Shown()
        order = order or self._order
        request: Any = (order, tools)
        try:
            sent = marshal.dumps(request, 2)
        except ValueError:  # not only plain dictionaries and lists
            sent = None
        shown = self._tools.get(sent) if sent else None
        if shown is None:
            schemas = shown_tools(tools, order)
            self._check(schemas)
            asked = declared_ends(tools)
            ends = tuple(number for number, schema in enumerate(schemas, 1) if tool_name(schema) in asked)
            key = digest("shown", json_text([schemas, ends])).hex()
            shown = _Shown(frozen(schemas), ends, key) if schemas else _Shown()
            if sent:
                self._tools.put(sent, shown, 2 * len(sent))
        return shown

    def _check(self, schemas: Sequence[dict[str, Any]]) -> None:
        """Refuse tools whose parameters are not a JSON Schema. Each tool is checked once."""
        for schema in schemas:
            text = json_text(schema)
            if self._checked.get(text) is None:
                check_tool(schema)
                self._checked.put(text, True, len(text))

    def reads(self, name: str) -> bool:
        return name in self._variables and name not in RESERVED

    def _args_text(self, given: Mapping[str, Any]) -> str:
        """Return a request's own variables as JSON. Raises ConfigError."""
        if unknown := [name for name in given if not self.reads(name)]:
            raise ConfigError(
                f"template_args name {', '.join(map(repr, unknown))}, which a request cannot set or the model's chat "
                "template does not read: leave it out"
            )
        try:
            return json_text(dict(given))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"template_args must hold JSON values: {error}") from None

    def _header(
        self, first: list[Message], shown: _Shown, documents: Sequence[Any] | None, given: Mapping[str, Any]
    ) -> _Header:
        pairs = [document_pair(document) for document in documents or ()]
        asked = marshal.dumps((first, shown.key, pairs, self._args_text(given)), 2)
        header = self._headers.get(asked)
        if header is None:
            header = self._learn(first, shown, pairs, self._args | dict(given), hashlib.sha256(asked).digest())
            size = len(asked) + len(header.text) + sum(len(message["content"]) for message in header.head)
            self._headers.put(asked, header, size)
        return header

    def _learn(
        self, first: list[Message], shown: _Shown, documents: list[tuple[str, str]], args: dict[str, Any], key: bytes
    ) -> _Header:
        head, kwargs, inner = self._fold(first, shown.schemas, documents, args)
        if not head and not kwargs.get("tools") and not kwargs.get("documents"):
            return _Header(head, kwargs, key)
        text, tokens = self._leading(head, kwargs)
        if not text:
            return _Header(head, kwargs, key)
        kind, name, own = SegmentKind.TOOLS if kwargs.get("tools") else SegmentKind.SYSTEM, "", 0
        if inner and not kwargs.get("tools") and not kwargs.get("documents"):
            *inner, (kind, name, own) = inner  # the last part ends with the header itself
        at = text.find(head[0]["content"]) if head else -1
        begins = [at, *(at + end for _, _, end in inner)]
        content = (begins[-1], at + own) if own and at >= 0 else None
        marks = [Mark(kind, char=len(text), token=tokens, name=name, content=content)]
        if at >= 0:
            marks += [
                Mark(part, char=at + end, name=title, soft=True, content=(begin, at + end))
                for begin, (part, title, end) in zip(begins, inner, strict=False)
            ]
        marks += self._tool_marks(first, shown, documents, args, text, tokens)
        return _Header(head, kwargs, key, text, tokens, tuple(marks))

    def _fold(
        self,
        first: list[Message],
        schemas: Sequence[dict[str, Any]],
        documents: list[tuple[str, str]],
        args: dict[str, Any],
    ) -> tuple[list[Message], dict[str, Any], list[tuple[SegmentKind, str, int]]]:
        """Place tools and documents in template variables where the template has them, else after the system prompt.

        Returns the system message, the template's variables, and the ends of parts inside the system message (kind,
        name, characters of its content).
        """
        kwargs = dict(args)
        system = first[0]["content"] if first else ""
        content, inner = system, [(SegmentKind.SYSTEM, "", len(system))] if system else []
        if schemas and "tools" in self._variables:
            kwargs["tools"] = schemas
        elif schemas:
            content += _spaced(content) + self.tools_text(schemas)
            inner.append((SegmentKind.TOOLS, "", len(content)))
        if documents and "documents" in self._variables:
            kwargs["documents"] = [{"title": title, "text": text} for title, text in documents]
        else:
            for title, text in documents:
                content += _spaced(content) + document_text(title, text)
                inner.append((SegmentKind.DOCUMENT, title, len(content)))
        return [{"role": "system", "content": content}] if content != system else first, kwargs, inner

    def _leading(self, head: list[Message], kwargs: dict[str, Any]) -> tuple[str, int | None]:
        """Return the text that every prompt with this system message and these tools begins with, for any user text.

        It is rendered alone where the template can do so and a special token follows. Else it is the common beginning
        of renderings with different user texts, with the number of tokens that are the same in all of them. It is empty
        if the template refuses.
        """
        contents = (*PROBES, *self._tokenizer.splitters[:1])
        probes = [[*head, {"role": "user", "content": content}] for content in contents]
        try:
            alone = self._text(head, kwargs, answer=False)
            following = [self._text(probe, kwargs, answer=True) for probe in probes[:2]]
            if (
                any(following[0].startswith(alone + splitter) for splitter in self._tokenizer.splitters)
                and common_length(*following) <= len(alone) + _USER_TAG  # else some is shown with a user message
                and all(message["content"].strip() in alone for message in head)
            ):
                return alone, None
        except TemplateError:
            pass
        try:
            texts = [self._text(probe, kwargs, answer=True) for probe in probes]
        except TemplateError:
            return "", None
        try:
            ids = [self._tokenizer.compile(text, special=False).ids for text in texts]
        except PromptTooLong:  # so is every prompt with this beginning: there is nothing to learn
            return "", None
        shortest = min(texts, key=lambda text: common_length(texts[0], text))
        return (
            texts[0][: common_length(texts[0], shortest)],
            min(common_length(ids[0].tobytes(), other.tobytes()) // ids[0].itemsize for other in ids),
        )

    def _tool_marks(
        self,
        first: list[Message],
        shown: _Shown,
        documents: list[tuple[str, str]],
        args: dict[str, Any],
        text: str,
        tokens: int | None,
    ) -> list[Mark]:
        """Return the ends of the tools after which the request asks for a cut.

        A list of tools is rendered with nothing, another tool or different user texts after it. It ends where these
        renderings diverge, so its end is the same whatever follows.
        """
        if not shown.ends:
            return []
        ends = shown.ends[:_TOOL_ENDS]
        another = frozen(shown_tools([_PROBE_TOOL]))
        marks = []
        try:
            ids = self._tokenizer.compile(text, special=False).ids[:tokens]
        except PromptTooLong:
            return []
        for count in ends:
            leading = shown.schemas[:count]

            def said(content: str, *more: dict[str, Any], leading: Sequence[dict[str, Any]] = leading) -> str:
                head, kwargs, _ = self._fold(first, [*leading, *more], documents, args)
                return self._text([*head, {"role": "user", "content": content}], kwargs, answer=True)

            try:
                texts = [said(PROBES[0]), said(PROBES[0], *another), said(PROBES[1])]
                if common_length(*texts[:2]) + _USER_TAG > common_length(texts[0], texts[2]):
                    texts += [said(content) for content in PROBES[2:]]  # user text may reach the tools' end
                found = [self._tokenizer.compile(each, special=False).ids.tobytes() for each in texts]
            except (TemplateError, PromptTooLong):
                continue
            end = min(common_length(found[0], other) for other in found) // ids.itemsize
            if ids[:end].tobytes() == found[0][: end * ids.itemsize]:
                marks.append(Mark(SegmentKind.TOOLS, token=end, name=tool_name(leading[-1])))
        return marks


def _spaced(content: str) -> str:
    return "\n\n" if content else ""
