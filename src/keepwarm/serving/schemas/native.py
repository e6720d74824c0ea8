"""Bodies of the native protocol."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from keepwarm.serving.schemas.common import (
    Body,
    CacheSalt,
    MissShown,
    ModelName,
    ReuseMode,
    Rewritten,
    SegmentShown,
    SetName,
    Shown,
    Stop,
    StopList,
    TokenIds,
)

Number = Annotated[float, Field(allow_inf_nan=False)]
Schemas = list[dict[str, Any]]


class Document(Body):
    text: str
    title: str | None = None


class RegisterRequest(Body):
    """A set: tools, system prompt, documents."""

    tools: Schemas = Field(default_factory=list, description="in OpenAI's, Anthropic's or MCP's shape")
    system: str | None = None
    documents: list[str | Document] = Field(default_factory=list)
    name: SetName | None = Field(None, description="given by the content when left out")
    based_on: SetName | None = Field(None, description="a set whose order and cuts are kept as far as they agree")
    cache_salt: CacheSalt | None = None
    model: ModelName | None = None


class QueryRequest(Body):
    """A question, or a conversation, to a registered set or to none."""

    query: str | None = Field(None, description="the user's question; or give messages")
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    tools: SetName | None = Field(None, description="name of a registered set")
    version: int | None = Field(None, ge=1, description="of the set; the latest when left out")
    max_new_tokens: int = Field(64, ge=1)
    temperature: Number = Field(0.0, ge=0, le=2)
    top_p: Number | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 and -1: all tokens")
    min_p: Number | None = Field(None, ge=0, le=1)
    repetition_penalty: Number | None = Field(None, gt=0, le=10)
    presence_penalty: Number | None = Field(None, ge=-2, le=2)
    frequency_penalty: Number | None = Field(None, ge=-2, le=2)
    stop_token_ids: TokenIds | None = None
    min_tokens: int | None = Field(None, ge=0, description="least tokens of the answer")
    ignore_eos: bool | None = Field(None, description="the model's own end tokens do not end the answer")
    seed: int | None = Field(None, ge=0, le=2**63 - 1)
    stop: Stop | StopList | None = None
    reuse: ReuseMode | None = None
    tool_choice: Literal["none", "auto", "required"] | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: the answer ends after one call")
    response_schema: dict[str, Any] | None = None
    cache_salt: CacheSalt | None = None
    stream: bool = False
    model: ModelName | None = None


class SetShown(Shown):
    name: str
    version: int
    hash: str
    tools: list[str]
    system: bool
    documents: int
    created: float


class RegisterResponse(Shown):
    status: Literal["compiled", "extended", "loaded"]
    name: str
    version: int
    hash: str
    key: str
    prefix_tokens: int
    recomputed_tokens: int
    reused_tokens: int
    tier: str
    bytes: int
    ms: float
    changes: dict[str, list[str]]
    public: bool = Field(description="of the catalogue that all tenants share")


class Answered(Shown):
    answer: str
    tool_calls: list[dict[str, Any]]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_by_tier: dict[str, int]
    exactness: str
    ttft_ms: float
    total_ms: float
    tokens_per_sec: float
    drafted_tokens: int = Field(description="computed in the hope that they would be the answer's")
    accepted_tokens: int = Field(description="of them: those that were")
    timings: dict[str, float]
    uncached_reason: str
    miss: MissShown | None = Field(description="why no more of the prompt was reused")
    segments: list[SegmentShown] = Field(description="of the prompt, in tokens")
    rewritten: list[Rewritten] | None = Field(None, description="what the operator's rules changed")
    max_tokens_cut_to: int | None = Field(None, description="most tokens of the answer, if the request asked for more")


class CompareResponse(Shown):
    cold: Answered
    warm: Answered
    same_answer: bool
    bit_identical: bool
    ttft_speedup: float


class HealthShown(Shown):
    status: Literal["loading", "ready", "failed", "stopping"]
    progress: str
    seconds: float


class NativeErrorDetail(Shown):
    type: str
    message: str


class NativeError(Shown):
    error: NativeErrorDetail
