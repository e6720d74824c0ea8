"""The adapter over a tokenizer's own chat template.

Cuts are found on the whole rendered prompt, never by tokenizing parts. Where a part ends is learnt from renderings that
do not contain what follows (so user text cannot move it) and is declared only if the whole prompt really begins with
them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from keepwarm.core.identity import canonical_json, json_digest
from keepwarm.core.spans import SegmentKind
from keepwarm.core.tools import canonical_tools
from keepwarm.errors import PromptError, TemplateError
from keepwarm.models.base import Mark, Message, Rendered
from keepwarm.models.tokenizer import HFTokenizer

# first characters of different classes: what they share with any user text is the template's own
_PROBES = ("Ab", "\n1", " -", "\u4e2d", '{"', "")
_HEADERS_KEPT = 64
_USER_TAG = 64  # characters; what begins a user message is shorter
_FIXED_DATE = "26 Jul 2024"  # Llama's templates fall back to it themselves; today's date would change the key daily


class GenericAdapter:
    """Chat prompts through the tokenizer's template. What it has no place for goes after the system prompt."""

    def __init__(
        self, tokenizer: HFTokenizer, *, tool_order: str = "sorted", template_args: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._by_name = tool_order == "sorted"
        self._variables = _template_variables(tokenizer.template(tools=True) or "")
        self._args = dict(template_args or {})
        if "date_string" in self._variables:
            self._args.setdefault("date_string", _FIXED_DATE)
        self._lock = threading.Lock()
        self._headers: OrderedDict[str, tuple[str, int | None]] = OrderedDict()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        documents: Sequence[Any] | None = None,
        *,
        answer: bool = True,
    ) -> Rendered:
        if self._tokenizer.template() is None:
            raise TemplateError("this tokenizer has no chat template; pass prompt=, or a tokenizer with a template")
        chat, declared = _plain(messages)
        # `cache_control` asks for a cut where the tools end: there is one anyway
        shown = [
            {k: v for k, v in t.items() if k != "cache_control"} if isinstance(t, Mapping) else t for t in tools or ()
        ]
        schemas = canonical_tools(shown, by_name=self._by_name)
        chat, kwargs, inner = self._fold(chat, schemas, [_document(d) for d in documents or ()])
        head = 1 if chat and chat[0]["role"] == "system" else 0
        header = (
            self._header(chat[:head], kwargs) if head or kwargs.get("tools") or kwargs.get("documents") else ("", None)
        )
        if len(chat) == head and not answer:
            marks = self._header_marks(header[0], header, chat, kwargs, inner)
            return Rendered(header[0], tuple(marks), special=False, keep_tokens=header[1])
        text = self._text(chat, kwargs, answer)
        marks = []
        if header[0] and text.startswith(header[0]):
            marks += self._header_marks(text, header, chat, kwargs, inner)
        marks += self._message_marks(text, chat, kwargs, head, declared, offset=len(chat) - len(messages))
        return Rendered(text, tuple(marks), special=False)

    def _text(self, chat: list[Message], kwargs: dict[str, Any], answer: bool) -> str:
        return self._tokenizer.render(chat, add_generation_prompt=answer, **kwargs)

    def _fold(
        self, chat: list[Message], schemas: list[dict[str, Any]], documents: list[tuple[str, str]]
    ) -> tuple[list[Message], dict[str, Any], list[tuple[SegmentKind, str, int]]]:
        """Place tools and documents: template variables where the template has them, else after the system prompt.

        Returns the messages, the template's variables, and the ends of parts inside the system message (kind, name,
        characters of its content).
        """
        kwargs = dict(self._args)
        system = chat[0]["content"] if chat and chat[0]["role"] == "system" else ""
        content, inner = system, [(SegmentKind.SYSTEM, "", len(system))] if system else []
        if schemas and "tools" in self._variables:
            kwargs["tools"] = schemas
        elif schemas:
            content += _spaced(content) + _tools_text(schemas)
            inner.append((SegmentKind.TOOLS, "", len(content)))
        if documents and "documents" in self._variables:
            kwargs["documents"] = [{"title": title, "text": text} for title, text in documents]
        else:
            for title, text in documents:
                content += _spaced(content) + _document_text(title, text)
                inner.append((SegmentKind.DOCUMENT, title, len(content)))
        if content != system:
            rest = chat[1:] if chat and chat[0]["role"] == "system" else chat
            chat = [{"role": "system", "content": content}, *rest]
        return chat, kwargs, inner

    def _header(self, head: list[Message], kwargs: dict[str, Any]) -> tuple[str, int | None]:
        """Text that every prompt with this system message and these tools begins with, whatever the user says.

        Rendered alone where the template can and a special token follows; else what the renderings of different user
        texts share, with the number of tokens that stay the same under all of them.
        """
        try:
            key = json_digest("header", [head, kwargs])
        except (TypeError, ValueError) as error:
            raise PromptError(f"tools, documents and template_args must be plain JSON values: {error}") from None
        with self._lock:
            if key in self._headers:
                self._headers.move_to_end(key)
                return self._headers[key]
        contents = (*_PROBES, *self._tokenizer.splitters[:1])
        probes = [[*head, {"role": "user", "content": content}] for content in contents]
        try:
            alone = self._text(head, kwargs, answer=False)
            found: tuple[str, int | None] = (alone, None)
            following = [self._text(probe, kwargs, answer=True) for probe in probes[:2]]
            if not any(following[0].startswith(alone + splitter) for splitter in self._tokenizer.splitters):
                raise TemplateError("nothing separates the system message from what follows")
            if _common(following) > len(alone) + _USER_TAG:
                raise TemplateError("the template shows some of it with the user's message only")
        except TemplateError:
            found = self._shared_by(probes, kwargs)
        with self._lock:
            self._headers[key] = found
            if len(self._headers) > _HEADERS_KEPT:
                self._headers.popitem(last=False)
        return found

    def _shared_by(self, probes: list[list[Message]], kwargs: dict[str, Any]) -> tuple[str, int | None]:
        """What the renderings of several prompts begin with, as text and in tokens; nothing if the template refuses."""
        try:
            texts = [self._text(probe, kwargs, answer=True) for probe in probes]
        except TemplateError:
            return "", None
        ids = [self._tokenizer.encode(text, add_special_tokens=False)[0] for text in texts]
        return texts[0][: _common(texts)], _common(ids)

    def _header_marks(
        self,
        text: str,
        header: tuple[str, int | None],
        chat: list[Message],
        kwargs: dict[str, Any],
        inner: list[tuple[SegmentKind, str, int]],
    ) -> list[Mark]:
        """The header's end (a hard cut) and, softly, the ends of the parts of the system message inside it."""
        kind, name = SegmentKind.TOOLS if kwargs.get("tools") else SegmentKind.SYSTEM, ""
        if inner and not kwargs.get("tools") and not kwargs.get("documents"):
            *inner, (kind, name, _) = inner  # the last part ends with the header itself
        marks = [Mark(kind, char=len(header[0]), token=header[1], name=name)]
        # the first occurrence is the right one: nothing of a user stands before the system message
        at = text.find(chat[0]["content"]) if inner else -1
        if at >= 0:
            marks += [Mark(part, char=at + end, name=title, soft=True) for part, title, end in inner]
        return marks

    def _message_marks(
        self, text: str, chat: list[Message], kwargs: dict[str, Any], head: int, declared: set[int], offset: int
    ) -> list[Mark]:
        """Each message's end, where the prompt so far is a beginning of the whole."""
        marks = []
        for index in range(head, len(chat)):
            try:
                so_far = self._text(chat[: index + 1], kwargs, answer=False)
            except TemplateError:
                continue  # a template that wants complete turns
            if text.startswith(so_far):
                hard = index - offset in declared
                marks.append(Mark(SegmentKind.MESSAGE, char=len(so_far), name=chat[index]["role"], soft=not hard))
        return marks


def _common(sequences: Sequence[Sequence[Any]]) -> int:
    """Length of the beginning that all sequences share."""
    columns = zip(*sequences, strict=False)
    return sum(1 for _ in takewhile(lambda column: all(item == column[0] for item in column), columns))


def _template_variables(template: str) -> frozenset[str]:
    """Names the template reads from outside."""
    import jinja2
    from jinja2 import meta

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False)
    try:
        parsed = environment.parse(template)
    except jinja2.TemplateError:  # extensions of transformers' own (generation blocks): look at the text instead
        return frozenset(name for name in ("tools", "documents", "date_string") if name in template)
    # a variable that the template also sets itself is not "undeclared": count what it mentions
    return frozenset(meta.find_undeclared_variables(parsed)) | {
        name
        for name in ("date_string",)
        if f"not {name} is defined" in template or f"{name} is not defined" in template
    }


def _plain(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Message], set[int]]:
    """Messages as the template wants them, and the indices whose end the request declares a breakpoint.

    Text parts are joined; `cache_control` on a message or on its last part is the declaration. Raises PromptError for
    what cannot be shown.
    """
    plain: list[Message] = []
    declared: set[int] = set()
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise PromptError(f"messages[{index}] must be an object with 'role' and 'content', got {message!r}")
        copy = dict(message)
        if copy.pop("cache_control", None) is not None:
            declared.add(index)
        content = copy.get("content")
        if isinstance(content, list | tuple):
            texts = []
            for number, part in enumerate(content):
                if not isinstance(part, Mapping) or part.get("type") != "text":
                    raise PromptError(f"messages[{index}].content[{number}] must be a text part, got {part!r}")
                if part.get("cache_control") is not None:
                    if number != len(content) - 1:
                        raise PromptError(
                            f"messages[{index}].content[{number}]: cache_control is taken on a message's last part; "
                            "split the message there"
                        )
                    declared.add(index)
                texts.append(str(part["text"]))
            copy["content"] = "".join(texts)
        elif content is None:
            copy["content"] = ""
        elif not isinstance(content, str):
            raise PromptError(f"messages[{index}].content must be text or a list of text parts, got {content!r}")
        plain.append(copy)
    return plain, declared


def _spaced(content: str) -> str:
    return "\n\n" if content else ""


def _tools_text(schemas: list[dict[str, Any]]) -> str:
    lines = "\n".join(canonical_json(schema) for schema in schemas)
    return (
        'You may call the functions below. To call one, answer with a JSON object with the keys "name" and '
        f'"arguments".\n<tools>\n{lines}\n</tools>'
    )


def _document(document: Any) -> tuple[str, str]:
    """(title, text) of a document given as text or as an object with `text` and optionally `title`."""
    if isinstance(document, str):
        return "", document
    if isinstance(document, Mapping) and isinstance(document.get("text"), str) and set(document) <= {"text", "title"}:
        return str(document.get("title", "")), document["text"]
    raise PromptError(f"a document is a text or an object with 'text' and at most 'title', got {document!r}")


def _document_text(title: str, text: str) -> str:
    label = f" title={canonical_json(title)}" if title else ""
    return f"<document{label}>\n{text}\n</document>"
