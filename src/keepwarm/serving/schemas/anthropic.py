"""Bodies of Anthropic's protocol."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from keepwarm.serving.schemas.common import (
    AsSent,
    Body,
    CacheControl,
    CacheSalt,
    KeepwarmShown,
    ReuseMode,
    Shown,
    StopList,
    Thinking,
    text_only,
)

NO_SEARCH = (
    "this service does not search for tools itself: offer a tool of your own that answers with tool_reference blocks, "
    "or send the tools without defer_loading"
)
Number = Annotated[float, Field(allow_inf_nan=False)]


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class PlainSource(Body):
    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


class DocumentBlock(Body):
    type: Literal["document"]
    source: PlainSource
    title: str | None = None
    cache_control: CacheControl | None = None


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: str
    name: str = Field(min_length=1, max_length=256)
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolReference(Body):
    """The place where a tool with `defer_loading` is shown."""

    type: Literal["tool_reference"]
    tool_name: str = Field(min_length=1, max_length=256)
    cache_control: CacheControl | None = None


ResultPart = Annotated[TextBlock | ToolReference, Field(discriminator="type")]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        return text_only(value)


class ThinkingBlock(Body):
    """Reasoning of an earlier answer. It is not shown to the model again."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedBlock(Body):
    type: Literal["redacted_thinking"]
    data: str


class ServerToolUse(Body):
    """A search for tools that another service ran in an earlier answer."""

    type: Literal["server_tool_use"]
    id: str
    name: Literal["tool_search_tool_regex", "tool_search_tool_bm25"]
    input: dict[str, Any]
    caller: Any = None
    cache_control: CacheControl | None = None


class SearchFound(Body):
    type: Literal["tool_search_tool_search_result"]
    tool_references: list[ToolReference]


class SearchFailed(Body):
    type: Literal["tool_search_tool_result_error"]
    error_code: str
    error_message: str | None = None


class ToolSearchResult(Body):
    type: Literal["tool_search_tool_result"]
    tool_use_id: str
    content: Annotated[SearchFound | SearchFailed, Field(discriminator="type")]
    cache_control: CacheControl | None = None


UserBlock = Annotated[TextBlock | DocumentBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ToolUseBlock | ServerToolUse | ToolSearchResult | ThinkingBlock | RedactedBlock,
    Field(discriminator="type"),
]


class UserMessage(Body):
    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Field(min_length=1)]

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        return text_only(value)


class AssistantMessage(Body):
    role: Literal["assistant"]
    content: str | list[AssistantBlock]


class SystemMessage(Body):
    """The operator's word in the middle of a conversation; Claude Code sends its own so."""

    role: Literal["system"]
    content: str | Annotated[list[TextBlock], Field(min_length=1)]

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        return text_only(value)


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class Tool(AsSent):
    name: str = Field(min_length=1, max_length=256)
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    input_examples: list[dict[str, Any]] | None = Field(None, description="shown to the model, as the rest")
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: bool | None = Field(None, description="true: shown where a tool_reference names it")
    eager_input_streaming: bool | None = Field(None, description="changes nothing: a call is sent when it is whole")


class AutoChoice(Body):
    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Body):
    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(Body):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Body):
    type: Literal["none"]


ToolChoice = Annotated[AutoChoice | AnyChoice | NamedChoice | NoChoice, Field(discriminator="type")]


class JsonFormat(Body):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    format: JsonFormat | None = None
    effort: str | None = Field(None, max_length=64, description="given to the chat template, if that reads it")


class ContextEdit(Body):
    """Reasoning is never shown again, so requests to clear it are accepted. Edits that shorten the conversation are
    refused."""

    type: Literal["clear_thinking_20251015"]
    keep: Any = None


class ContextManagement(Body):
    edits: list[ContextEdit] | None = None


class Metadata(Body):
    user_id: str | None = Field(None, max_length=512, description="goes into the log")


class Diagnostics(Body):
    previous_message_id: str | None = None


class CountRequest(Body):
    model: str
    messages: list[Message] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    cache_control: CacheControl | None = None
    thinking: Thinking | None = Field(None, description="given to the chat template, if that reads it")
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    betas: list[str] | None = Field(None, description="changes nothing, as the header of that name")
    anthropic_beta: list[str] | None = Field(None, description="the same")
    anthropic_version: str | None = Field(None, description="the same")

    @field_validator("tools", mode="before")
    @classmethod
    def _searched_here(cls, value: Any) -> Any:
        for tool in value if isinstance(value, list) else ():
            if isinstance(tool, dict) and str(tool.get("type")).startswith("tool_search_tool"):
                raise ValueError(NO_SEARCH)
        return value


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1)
    temperature: Number | None = Field(None, ge=0, le=1)
    top_p: Number | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    stop_sequences: StopList | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard"] | None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    container: None = None
    diagnostics: Diagnostics | None = None
    cache_salt: CacheSalt | None = Field(None, description="not Anthropic's")
    reuse: ReuseMode | None = Field(None, description="weakest exactness allowed; not Anthropic's")
    min_p: Number | None = Field(None, ge=0, le=1, description="not Anthropic's")
    repetition_penalty: Number | None = Field(None, gt=0, le=10, description="not Anthropic's")


class CacheCreation(Shown):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class Usage(Shown):
    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int


class MessageShown(Shown):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: Usage
    diagnostics: dict[str, Any] | None = None
    keepwarm: KeepwarmShown


class CountResponse(Shown):
    input_tokens: int


class ErrorDetail(Shown):
    type: str
    message: str


class ErrorResponse(Shown):
    type: Literal["error"]
    error: ErrorDetail
    request_id: str | None = None
