"""Bodies of OpenAI's Responses protocol. The type of a parameter that accepts only one value says so."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator

from keepwarm.serving.schemas.common import AsSent, Body, KeepwarmShown, Shown, text_only
from keepwarm.serving.schemas.openai import CacheDiagnostics, Choosing, Conversing, JsonFormat, TextFormat

LEFT_OUT = ("web_search", "web_search_preview", "custom", "local_shell", "namespace", "tool_search", "image_generation")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
ResponseId = Annotated[str, Field(min_length=1, max_length=100)]


def _form(value: Any) -> str:
    """Return whether a value is a text or a list. Only this shape is tried, and its first fault is reported without
    these names."""
    return "<list>" if isinstance(value, list) else "<text>"


# ---- items ----


class InputText(Body):
    type: Literal["input_text"]
    text: str


class OutputText(Body):
    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(Body):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[InputText | OutputText | Refusal, Field(discriminator="type")]
Content = Annotated[Annotated[str, Tag("<text>")] | Annotated[list[Part], Tag("<list>")], Discriminator(_form)]
Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: Content
    id: str | None = None
    status: Status | None = None
    phase: str | None = None

    _texts = field_validator("content", mode="before")(text_only)


class CallItem(Body):
    type: Literal["function_call"]
    call_id: str
    name: str = Field(min_length=1, max_length=256)
    arguments: str
    id: str | None = None
    status: Status | None = None
    caller: dict[str, Any] | None = None
    namespace: None = None


class CallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: Status | None = None
    caller: dict[str, Any] | None = None
    name: str | None = None
    namespace: None = None

    _texts = field_validator("output", mode="before")(text_only)


class ReasoningText(Body):
    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(Body):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[dict[str, Any]] = Field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


def _item_kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return f"<{kind or 'message'}>"


def _known_item(item: Any) -> Any:
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    if kind in _ITEMS:
        return item
    cure = "send the item itself" if kind == "item_reference" else "leave it out, or send its text as a message"
    raise ValueError(f"items of type {kind!r} are not taken, but {', '.join(_ITEMS)} are: {cure}")


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(_item_kind),
    BeforeValidator(_known_item),
]


# ---- tools ----


class FunctionTool(AsSent):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="true: a call that is begun is valid")
    defer_loading: Literal[False] | None = None

    @property
    def shown(self) -> dict[str, Any]:
        """The tool as the engine takes it, with its keys in the order in which it was sent."""
        return {key: value for key, value in self.sent.items() if key != "defer_loading"}


class OtherTool(AsSent):
    """A tool that this service cannot run. Clients always send some. It is left out, and the answer says so."""

    model_config = AsSent.model_config | {"extra": "allow"}
    type: Literal[
        "web_search", "web_search_preview", "custom", "local_shell", "namespace", "tool_search", "image_generation"
    ]
    name: str | None = None


def _known_tool(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, dict) else "function"
    if kind == "function" or kind in LEFT_OUT:
        return tool
    raise ValueError(
        f"tools of type {kind!r} are not supported: give a tool of type 'function', and run it where the client is"
    )


Tool = Annotated[FunctionTool | OtherTool, Field(discriminator="type"), BeforeValidator(_known_tool)]


class NamedChoice(Body):
    type: Literal["function"]
    name: str


def _known_choice(choice: Any) -> Any:
    if not isinstance(choice, dict) or choice.get("type") == "function":
        return choice
    raise ValueError(
        f"a choice of type {choice.get('type')!r} is not supported: give 'auto', 'none', 'required', or one function "
        'as {"type": "function", "name": ...}'
    )


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedChoice, BeforeValidator(_known_choice)]


# ---- the request ----


class SchemaFormat(Body):
    type: Literal["json_schema"]
    name: str
    json_schema: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(AsSent):
    format: Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: str | None = Field(None, max_length=64, description="given to the chat template, if that reads it")


class Reasoning(Body):
    effort: str | None = Field(None, max_length=64, description="given to the chat template, if that reads it")
    summary: str | None = Field(None, max_length=32, description="has no effect; the answer says so")
    generate_summary: str | None = Field(None, max_length=32)


class StreamOptions(Body):
    include_obfuscation: bool | None = Field(None, description="changes nothing: nothing is added to hide lengths")


class ResponsesRequest(Choosing, Conversing):
    input: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[Item], Field(min_length=1), Tag("<list>")], Discriminator(_form)
    ]
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    store: bool | None = Field(None, description="false: nothing of it is kept but KV")
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: the answer ends after one call")
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    stream_options: StreamOptions | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncation: Literal["disabled"] | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    client_metadata: dict[str, Any] | None = Field(None, description="Codex sends it; it is not kept")
    background: Literal[False] | None = None
    conversation: None = None
    max_tool_calls: None = None
    prompt: None = None

    @field_validator("truncation", mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        if value == "auto":
            raise ValueError("only 'disabled' is supported: send fewer items when the context window is full")
        return value


# ---- the answer ----


class InputDetails(Shown):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Shown):
    reasoning_tokens: int


class Usage(Shown):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Diagnostics(CacheDiagnostics):
    """Diagnostics in OpenAI's form, if it has a word for the reason. `keepwarm.miss` has every reason."""

    type: Literal["cache_hit", "cache_miss", "comparison_response_not_found", "unavailable"]  # type: ignore[assignment]


class ResponseShown(Shown):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    output: list[dict[str, Any]]
    usage: Usage
    store: bool = Field(description="whether it is kept")
    previous_response_id: str | None
    keepwarm: KeepwarmShown
    prompt_cache_diagnostics: Diagnostics


class ItemsShown(Shown):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedShown(Shown):
    id: str
    object: Literal["response"]
    deleted: bool
