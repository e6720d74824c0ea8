"""Bodies of `/v1/cache` and `/v1/sessions`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from keepwarm.serving.schemas.common import (
    Body,
    CacheSalt,
    MissShown,
    ModelName,
    ReuseMode,
    SegmentShown,
    SetName,
    Shown,
)
from keepwarm.serving.schemas.native import Document, Number, Schemas


class ExplainRequest(Body):
    """A prompt that is only looked up."""

    prompt: str | None = Field(None, min_length=1)
    query: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    tools: SetName | Schemas | None = None
    version: int | None = Field(None, ge=1, description="of the set; the latest when left out")
    documents: list[str | Document] | None = None
    reuse: ReuseMode | None = None
    cache_salt: CacheSalt | None = None
    model: ModelName | None = None


class PinRequest(Body):
    """The prompt to keep: a set by its name, or a run by its id."""

    name: SetName | None = None
    id: str | None = Field(None, pattern=r"^[0-9a-f]{4,64}$")
    ttl: Number = Field(gt=0, le=31_536_000, description="seconds")
    priority: int = Field(1, ge=0, le=100, description="1 or more: evicted last; 0: evicted first when unused so long")


class ChunkShown(Shown):
    start: int
    end: int
    tier: str


class Explained(Shown):
    prompt_tokens: int
    cached_tokens: int
    cached_by_tier: dict[str, int]
    exactness: str
    segments: list[SegmentShown]
    cuts: list[int]
    cached_prefix_tokens: int = Field(description="what `reuse: prefix` would reuse")
    chunks: list[ChunkShown] = Field(description="with `reuse: chunks`: what would be reused away from the prefix")
    miss: MissShown | None


class EntryShown(Shown):
    """A stored run: the KV of `tokens` tokens from position `start` on, or a recurrent state after its one token."""

    id: str
    kind: Literal["kv", "chunk", "snapshot"] = Field(description="chunk: KV for any place; snapshot: a recurrent state")
    parent: str | None = Field(description="the run that it continues")
    name: str
    start: int
    tokens: int
    blocks: int
    bytes: int
    tier: str
    model: str = Field(description="first characters of its identity")
    created: float = Field(description="seconds since the epoch")
    last_used: float = Field(description="of a public run: when it was stored")
    uses: int | None = Field(description="null for a public run, which others use too")
    pinned_until: float | None
    public: bool = Field(description="of the catalogue that all tenants share")
    own: bool = Field(description="whether the caller may pin and remove it")


class EntriesShown(Shown):
    entries: list[EntryShown]
    bytes: int
    snapshots: int
    snapshot_bytes: int = Field(description="part of `bytes`")
    now: float


class EntryInFull(EntryShown):
    text: str
    text_cut: bool


class StretchShown(Shown):
    """Tokens that some stored runs share, up to the place where prompts differ."""

    id: str
    parent: str | None = Field(description="the stretch before it")
    name: str = Field(description="of what ends here")
    start: int
    tokens: int
    prompts: int = Field(description="stored prompts that begin so")
    text: str = Field(description="its first words")
    run: str = Field(description="the run to inspect, pin or remove: it holds all of this")
    runs: int = Field(description="runs that hold some of it")
    bytes: int
    snapshots: list[int] = Field(description="positions in it, or at its end, with a snapshot of the recurrent state")
    snapshot_bytes: int = Field(description="theirs; not part of `bytes`")
    tier: str
    last_used: float
    uses: int | None = Field(description="null where all of it is public")
    pinned_until: float | None
    public: bool
    own: bool


class TreeShown(Shown):
    stretches: list[StretchShown]
    runs: int = Field(description="of KV that are stored, also those that are left out")
    left_out: int
    bytes: int
    snapshots: int
    snapshot_bytes: int = Field(description="part of `bytes`")
    now: float


class AnswerInNumbers(Shown):
    number: int
    at: float
    protocol: str
    prompt_tokens: int
    cached_tokens: int
    cached_by_tier: dict[str, int]
    completion_tokens: int
    ttft_ms: float
    total_ms: float
    timings: dict[str, float]
    exactness: str
    miss_reason: str = Field(description="`none` when all was reused that can be")
    miss_position: int | None = Field(description="token")
    miss_segment: str | None
    missed_tokens: int = Field(description="computed again, or not shared because of the difference")
    model: str | None = Field(None, description="where several are served")


class RecentShown(Shown):
    series: str = Field(description="another one after a restart, and after a purge")
    answers: list[AnswerInNumbers]


class Removed(Shown):
    runs: int


class Pinned(Shown):
    runs: int
    seconds: float


class Purged(Shown):
    runs: int
    sets: int


class SessionShown(Shown):
    name: str
    turns: int
    tokens: int
    settled: bool
    created: float
    used: float


class SessionsShown(Shown):
    sessions: list[SessionShown]


class SessionInFull(Shown):
    info: SessionShown
    messages: list[dict[str, Any]]
    branches: list[int]
    waits: bool


class SessionRemoved(Shown):
    removed: bool
