"""Bodies of OpenAI's protocol. The type of a parameter that accepts only one value says so."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from keepwarm.serving.schemas.common import (
    AsSent,
    Body,
    CacheControl,
    CacheSalt,
    KeepwarmShown,
    RequestedModel,
    ReuseMode,
    Shown,
    Stop,
    StopList,
    Thinking,
    TokenId,
    TokenIds,
    text_only,
)

Number = Annotated[float, Field(allow_inf_nan=False)]
LogitId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$", description="token id")]


class CacheBreakpoint(Body):
    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None
    cache_control: CacheControl | None = None


Content = str | list[TextPart]


class _Message(Body):
    name: str | None = Field(None, max_length=256, description="shown where the chat template does")

    @field_validator("content", mode="before", check_fields=False)
    @classmethod
    def _text(cls, value: Any) -> Any:
        return text_only(value)


class InstructionMessage(_Message):
    role: Literal["system", "developer"]
    content: Content


class UserMessage(_Message):
    role: Literal["user"]
    content: Content


class FunctionCall(Body):
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class ToolCallIn(Body):
    id: str
    type: Literal["function"]
    function: FunctionCall
    index: int | None = None  # as streams number them


class AssistantMessage(_Message):
    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: list[ToolCallIn] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolMessage(_Message):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


Message = Annotated[InstructionMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionSpec(Body):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(AsSent):
    type: Literal["function"]
    function: FunctionSpec
    cache_control: CacheControl | None = None


class NamedFunction(Body):
    name: str


class NamedChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class TextFormat(Body):
    type: Literal["text"]


class JsonFormat(Body):
    type: Literal["json_object"]


class JsonSchema(Body):
    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="changes nothing: nothing is added to hide lengths")
    continuous_usage_stats: Literal[False] | None = None


class CacheOptions(Body):
    mode: Literal["implicit"] | None = None
    ttl: Literal["30m", "12h"] | None = Field(None, description="how long what is stored shall stay, if there is room")
    comparison_response_id: str | None = Field(None, description="an earlier answer: say why its prompt was not reused")


class Choosing(Body):
    """How tokens are chosen, and fields that all kinds of requests have."""

    model: RequestedModel = ""
    temperature: Number | None = Field(None, ge=0, le=2)
    top_p: Number | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="not OpenAI's; 0 and -1: all tokens")
    min_p: Number | None = Field(None, ge=0, le=1, description="not OpenAI's")
    repetition_penalty: Number | None = Field(None, gt=0, le=10, description="not OpenAI's")
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Stop | StopList | None = None
    stop_token_ids: TokenIds | None = Field(None, description="not OpenAI's")
    min_tokens: int | None = Field(None, ge=0, description="least tokens of the answer; not OpenAI's")
    ignore_eos: bool | None = Field(None, description="the model's own end tokens do not end the answer; not OpenAI's")
    include_stop_str_in_output: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    no_stop_trim: Literal[False] | None = Field(None, description="routers in front add it and the two below")
    return_hidden_states: Literal[False] | None = None
    priority: Literal[0] | None = None
    stream: bool | None = None
    frequency_penalty: Number | None = Field(None, ge=-2, le=2)
    presence_penalty: Number | None = Field(None, ge=-2, le=2)
    logit_bias: dict[LogitId, Annotated[Number, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    cache_prompt: bool | None = Field(None, description="llama.cpp's; false is reuse: off")
    id_slot: int | None = Field(None, description="llama.cpp's; changes nothing: there are no slots")
    timings_per_token: bool | None = Field(None, description="llama.cpp's; the last chunk has the timings anyway")
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = Field(
        None, description="changes nothing"
    )
    user: str | None = Field(None, max_length=512, description="goes into the log")
    prompt_cache_key: str | None = Field(None, max_length=512)
    prompt_cache_options: CacheOptions | None = None
    cache_salt: CacheSalt | None = None
    reuse: ReuseMode | None = Field(None, description="weakest exactness allowed; not OpenAI's")


class Conversing(Body):
    """What requests with a conversation say of it, of reasoning and of the chat template."""

    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    safety_identifier: str | None = Field(None, max_length=512, description="goes into the log")
    thinking: Thinking | None = Field(None, description="given to the chat template, if that reads it; not OpenAI's")
    enable_thinking: bool | None = Field(None, description="the same; not OpenAI's")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=64, description="variables of the chat template; not OpenAI's"
    )

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to reason before it answers; None: as it does by default."""
        if self.enable_thinking is not None or self.thinking is None:
            return self.enable_thinking
        return self.thinking.thinks


class _Completing(Choosing):
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=128)
    return_token_ids: bool | None = Field(None, description="ids of the prompt and of the answer; vLLM's, not OpenAI's")
    stream_options: StreamOptions | None = None
    metadata: dict[str, Any] | None = Field(None, description="changes nothing")
    store: bool | None = Field(None, description="changes nothing: no answer can be fetched later")


class Prediction(Body):
    type: Literal["content"]
    content: Content


class ChatRequest(_Completing, Conversing):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: the answer ends after one call")
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    modalities: list[Literal["text"]] | None = None
    prediction: Prediction | None = Field(None, description="what the answer will mostly repeat: it comes sooner")
    reasoning_effort: str | None = Field(
        None, max_length=64, description="given to the chat template, if that reads it"
    )
    verbosity: str | None = Field(None, max_length=64, description="the same")
    separate_reasoning: bool | None = Field(None, description="changes nothing: reasoning is part of the answer's text")
    stream_reasoning: bool | None = Field(None, description="changes nothing")
    include_reasoning: bool | None = Field(None, description="changes nothing")
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None


def _prompt_kind(prompt: Any) -> str:
    """Return a prompt's kind by its first element. Only that shape is tried, and its first fault is reported without
    these names."""
    if isinstance(prompt, str):
        return "<text>"
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    return "<texts>" if isinstance(first, str) else "<lists of ids>" if isinstance(first, list) else "<ids>"


Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class CompletionRequest(_Completing):
    prompt: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag("<texts>")]
        | Annotated[Ids, Tag("<ids>")]
        | Annotated[list[Ids], Field(min_length=1, fail_fast=True), Tag("<lists of ids>")],
        Discriminator(_prompt_kind),
    ]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: None = None
    logprobs: int | None = Field(None, ge=0, le=5)


class PromptTokensDetails(Shown):
    cached_tokens: int
    cache_write_tokens: int


class CompletionTokensDetails(Shown):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Shown):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class CallShown(Shown):
    id: str
    type: Literal["function"]
    function: FunctionCall


class MessageShown(Shown):
    role: Literal["assistant"]
    content: str | None
    tool_calls: list[CallShown] | None = None


class ChoiceShown(Shown):
    index: int
    message: MessageShown
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: dict[str, Any] | None
    token_ids: list[int] | None = Field(None, description="with return_token_ids")


class CacheDiagnostics(Shown):
    """Compared with the answer that was named, else with what is stored."""

    type: Literal["cache_hit", "cache_miss", "comparison_response_not_found"]
    reason: str | None = None
    cache_missed_tokens: int | None = None
    comparison_reusable_tokens: int | None = None


class ChatResponse(Shown):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChoiceShown]
    prompt_token_ids: list[int] | None = Field(None, description="with return_token_ids")
    usage: Usage
    keepwarm: KeepwarmShown
    prompt_cache_diagnostics: CacheDiagnostics


class CompletionChoice(Shown):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: dict[str, Any] | None
    prompt_token_ids: list[int] | None = Field(None, description="with return_token_ids")
    token_ids: list[int] | None = Field(None, description="the same")


class CompletionResponse(Shown):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    keepwarm: KeepwarmShown
    prompt_cache_diagnostics: CacheDiagnostics


class ModelStatus(Shown):
    value: Literal["loaded", "loading", "unloaded"]


class ModelShown(Shown):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str
    status: ModelStatus | None = Field(None, description="where several models are served")


class ModelList(Shown):
    object: Literal["list"]
    data: list[ModelShown]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ErrorDetail(Shown):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Shown):
    error: ErrorDetail
