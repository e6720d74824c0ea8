"""Fields that the protocols share."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"

SetName = Annotated[str, Field(pattern=NAME, max_length=100, description="name of a registered set of tools")]
ModelName = Annotated[str, Field(min_length=1, max_length=200, description="one of those served; the first without")]
RequestedModel = Annotated[  # empty if the request names none
    str,
    BeforeValidator(lambda given: "" if given is None else given),
    WithJsonSchema({
        "anyOf": [{"type": "string"}, {"type": "null"}],
        "description": "one of those served; the first without, or if empty",
    }),
]
CacheSalt = Annotated[
    str, Field(min_length=1, max_length=256, description="narrows what is reused to requests with the same salt")
]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Field(max_length=1024)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
StopList = Annotated[list[Stop], Field(max_length=16)]
ReuseMode = Literal["exact", "prefix", "off"]
NO_FILES = "images, audio and files are not taken: the model reads text, and this service fetches no URL"


class Body(BaseModel):
    """A part of a request. It has exactly the declared types, and no unknown field."""

    model_config = ConfigDict(extra="forbid", strict=True)


class AsSent(Body):
    """A part that remembers how it was sent, because the order of its keys counts."""

    _sent: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _remember(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        part = handler(value)
        if isinstance(value, dict):
            part._sent = value
        return part

    @property
    def sent(self) -> dict[str, Any]:
        return self._sent


class Shown(BaseModel):
    """A part of a response."""

    model_config = ConfigDict(extra="allow")


Piece = tuple[str, bool]  # a piece of a text, and whether the other text lacks it


class SegmentShown(Shown):
    kind: str
    start: int
    end: int
    name: str


class MissShown(Shown):
    """Why no more of a prompt was reused."""

    position: int = Field(description="token")
    segment: str
    reason: str
    detail: str = Field(description="one sentence, with the cure")
    changed: str
    character: int | None = Field(description="of the whole prompt")
    in_segment: int | None = Field(description="the same character, counted from the segment's first")
    name: str = Field(description="of the segment")
    wanted: str = Field(description="the prompt's text around the difference")
    stored: str = Field(description="the nearest stored prompt's")
    lost_blocks: int
    lost_tokens: int = Field(description="computed again, or not shared because of the difference")
    lost_bytes: int = Field(description="their KV")
    lost_ms: float | None = Field(description="computing them; null before this process computed any")
    stored_parts: list[Piece]
    wanted_parts: list[Piece]


class Rewritten(Shown):
    """What a rule of the operator's changed in a request."""

    rule: str
    where: Literal["system", "first_user", "tools", "tool_results"]
    count: int
    too_slow: bool | None = Field(None, description="it took too long, and changed nothing")


class KeepwarmShown(Shown):
    """Facts for which the vendors' protocols have no field."""

    exactness: str
    cached_by_tier: dict[str, int]
    ttft_ms: float
    timings: dict[str, float] = Field(description="milliseconds by phase")
    miss: MissShown | None = Field(description="why no more of the prompt was reused")
    max_tokens_cut_to: int | None = Field(None, description="most tokens of the answer, if the request asked for more")
    left_out: list[str] | None = Field(None, description="parts of the request that have no effect")
    rewritten: list[Rewritten] | None = Field(None, description="what the operator's rules changed")


class Thinking(Body):
    """Whether the model is to reason before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = Field(None, description="changes nothing: max_tokens bounds the whole answer")
    display: Literal["summarized", "omitted"] | None = Field(None, description="changes nothing")
    clear_thinking: bool | None = Field(None, description="changes nothing: no reasoning comes back")

    @property
    def thinks(self) -> bool | None:
        """None: as the model does by default."""
        return {"enabled": True, "disabled": False}.get(self.type)


class CacheControl(Body):
    """A declared breakpoint: what comes before it is kept for `ttl`, as far as there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = Field(None, max_length=64, description="changes nothing: each tenant's KV is its own")

    @property
    def seconds(self) -> float:
        return 3600.0 if self.ttl == "1h" else 300.0


def text_only(content: Any) -> Any:
    """Refuse parts that are not text, with a clear message. For validators that run before the shape is checked."""
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind.removeprefix("input_") in (
                "image",
                "image_url",
                "audio",
                "file",
                "video",
            ):
                raise ValueError(NO_FILES)
    return content
