"""What the engine gives back: plain, JSON-ready records."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from keepwarm.core.spans import MissReason, Segment
from keepwarm.core.tools import ToolCall


@dataclass(frozen=True)
class WarmReport:
    """Outcome of `Engine.warm`."""

    tokens: int  # of the prompt that is now warm
    new_blocks: int  # computed and handed to the store by this call
    reused_tokens: int  # that were stored already
    seconds: float  # wall time of the call
    shared_tokens: int  # from where a longer prompt that begins with it goes on: all of it, or the last cut in it


@dataclass(frozen=True)
class Miss:
    """Why reuse of a prompt ended where it did: the first place where it leaves what is stored.

    `changed` says what differs: "system", "tools", "document", "message" (or another segment's kind), "order" (of the
    same tools, or of their keys), "template", "model", "salt", "cuts", "arithmetic", or, where nothing does, "evicted",
    "expired", "corrupt" or "".
    """

    position: int  # token
    segment: str  # kind of the segment it lies in
    reason: str  # a MissReason
    detail: str  # one sentence, naming what differs and the cure
    wanted: str = ""  # text around the difference in the prompt
    stored: str = ""  # text around it in the nearest stored prompt
    changed: str = ""
    character: int | None = None  # of the rendered prompt where the texts part; None where characters are not known
    in_segment: int | None = None  # the same, counted from the segment's first character
    name: str = ""  # of the segment
    lost_blocks: int = 0  # that must be computed although they were computed once, or would be shared but for this
    lost_tokens: int = 0
    lost_bytes: int = 0  # their KV
    lost_ms: float | None = None  # computing them, at the speed measured in this process; None before any measurement

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithm of a token's probability by the model's own logits, and the likeliest tokens beside it."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), likeliest first; as many as were asked for


@dataclass(frozen=True)
class Piece:
    """One step of a stream. `text` is what became printable; it may be empty while a character is incomplete.

    The last piece has no token and carries the whole `result`.
    """

    text: str
    token_id: int | None
    index: int
    result: Generation | None = None
    logprob: TokenLogprob | None = None  # with logprobs=


@dataclass(frozen=True)
class Generation:
    """Outcome of `Engine.generate`. Times are wall time in milliseconds from the call."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    cached_by_tier: dict[str, int]  # tokens by tier: "device", "ram", "disk"
    ttft_ms: float  # rendering, lookup, load, verification and prefill included
    total_ms: float
    timings: dict[str, float]  # compile, constrain, queue, link, load, prefill, decode
    exactness: str  # "exact", "prefix", "quantized", "blended"
    finish_reason: str  # "stop" (end token or stop string) or "length"
    last_cut: int  # tokens that the same request reuses when it comes again: the floor of a hit starts here
    blended_tokens: int = 0  # of the cached ones: from another context
    repaired_tokens: int = 0  # of the blended ones: recomputed here
    divergence: float | None = None  # estimated, of blended KV that was left as it is; None when nothing tells
    logits_digest: str | None = None  # with trace=True: SHA-256 over every step's logits bytes, in order
    tool_calls: tuple[ToolCall, ...] = ()  # whole calls of the request's tools in the answer, in order
    logprobs: tuple[TokenLogprob, ...] | None = None  # with logprobs=: one for each of `token_ids`
    tokens: str = "canonical"  # the prompt's ids: those of its whole text, or "as_generated" (a session's, as run)
    miss: Miss | None = None  # why no more was reused, as it was when the plan was made; None when all was that can be

    @property
    def uncached_reason(self) -> str:
        """Why this model or request runs without the cache; empty when it does not."""
        return self.miss.detail if self.miss is not None and self.miss.reason == MissReason.UNCACHEABLE else ""

    @property
    def kv_reuse_ratio(self) -> float:
        """Share of prompt tokens whose KV was reused."""
        return self.cached_tokens / self.prompt_tokens

    @property
    def tokens_per_sec(self) -> float:
        """Decode speed after the first token; 0.0 when there was only one."""
        seconds = (self.total_ms - self.ttft_ms) / 1000
        return (len(self.token_ids) - 1) / seconds if seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        derived = ("uncached_reason", "kv_reuse_ratio", "tokens_per_sec")
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True)
class ChunkHit:
    """A stored chunk that a prompt would reuse, and where."""

    start: int
    end: int
    tier: str


@dataclass(frozen=True)
class Explanation:
    """Outcome of `Engine.explain`: what a prompt would hit. Nothing was run or stored."""

    prompt_tokens: int
    cached_tokens: int
    cached_by_tier: dict[str, int]
    exactness: str
    segments: tuple[Segment, ...]
    cuts: tuple[int, ...]
    cached_prefix_tokens: int  # that reuse="prefix" would reuse
    miss: Miss | None
    chunks: tuple[ChunkHit, ...] = ()  # with reuse="chunks": what would be reused away from the prefix

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Entry:
    """One stored run, as the catalogue knows it."""

    id: str
    name: str  # given by warm(name=...), or empty
    tokens: int
    blocks: int
    start: int  # position of its first token
    bytes: int
    created: float  # seconds since the epoch
    last_used: float
    tier: str
    model: str  # first characters of the model identity
    kind: str = "kv"  # "kv", "chunk" (KV for any place), or "snapshot": a recurrent state at the end of its one token

    @property
    def end(self) -> int:
        """The position behind it; of a snapshot, the one it goes on from."""
        return self.start + self.tokens


@dataclass(frozen=True)
class EngineStats:
    """Counters of one engine, and sizes of the store it uses."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    cached_by_tier: dict[str, int]
    blocks: dict[str, int]  # by tier
    bytes: dict[str, int]  # by tier
    evictions: dict[str, int]  # by tier
    corrupt: int
    dropped_writes: int
    store_errors: int
    snapshots: dict[str, int] = field(default_factory=dict)  # of recurrent state, by tier; `blocks` counts them, too
    snapshot_bytes: dict[str, int] = field(default_factory=dict)  # by tier, a part of `bytes`
    constraint_tables_ms: float = 0.0  # that the tables for constrained decoding took, once; 0.0 before they are used
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"hit_rate": self.hit_rate}
