"""Results of the engine: plain, JSON-ready records."""

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
    shared_tokens: int  # that a longer prompt with this beginning reuses: all of it, or up to its last cut


@dataclass(frozen=True)
class Miss:
    """Why reuse of a prompt ended where it did: the first place where it differs from stored prompts.

    `changed` says what differs: "system", "tools", "document", "message" (or another segment's kind), "order" (of the
    same tools, or of their keys), "template", "model", "salt", "cuts", "arithmetic". If nothing differs, it is
    "evicted", "expired", "corrupt" or "".
    """

    position: int  # token
    segment: str  # kind of the segment that contains it
    reason: str  # a MissReason
    detail: str  # one sentence that names the difference and a remedy
    wanted: str = ""  # text around the difference in the prompt
    stored: str = ""  # text around it in the nearest stored prompt
    changed: str = ""
    character: int | None = None  # first different one in the rendered prompt; None if characters are not known
    in_segment: int | None = None  # the same character, counted from the segment's first one
    name: str = ""  # of the segment
    lost_blocks: int = 0  # to compute although they were computed once, or would be shared without this difference
    lost_tokens: int = 0
    lost_bytes: int = 0  # of their KV
    lost_ms: float | None = None  # to compute them, at the measured speed of this process; None without a measurement

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithm of a token's probability by the model's own logits, and those of the likeliest tokens."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), likeliest first; the requested number


@dataclass(frozen=True)
class Piece:
    """One step of a stream. `text` is the newly printable text; it may be empty while a character is incomplete.

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
    ttft_ms: float  # includes rendering, lookup, load, verification and prefill
    total_ms: float
    timings: dict[str, float]  # compile, constrain, queue, link, load, prefill, decode
    exactness: str  # "exact", "prefix", "quantized", "blended"
    finish_reason: str  # "stop" (end token or stop string) or "length"
    last_cut: int  # tokens that the same request reuses when it comes again; the rest is always computed
    blended_tokens: int = 0  # of the cached ones: from another context
    repaired_tokens: int = 0  # of the blended ones: recomputed here
    divergence: float | None = None  # estimate for blended KV that was not repaired; None without an estimate
    logits_digest: str | None = None  # with trace=True: SHA-256 over every step's logits bytes, in order
    tool_calls: tuple[ToolCall, ...] = ()  # complete calls of the request's tools in the answer, in order
    logprobs: tuple[TokenLogprob, ...] | None = None  # with logprobs=: one for each of `token_ids`
    drafted_tokens: int = 0  # computed in the hope that they would be the answer's
    accepted_tokens: int = 0  # of them: those that were
    tokens: str = "canonical"  # the prompt's ids: those of its whole text, or "as_generated" (a session's, as run)
    miss: Miss | None = None  # why no more was reused, when the plan was made; None if everything reusable was reused

    @property
    def uncached_reason(self) -> str:
        """Why this model or request runs without the cache; empty when it runs with the cache."""
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
    """Outcome of `Engine.explain`: what a prompt would reuse. Nothing was run or stored."""

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
    kind: str = "kv"  # "kv", "chunk" (KV for any position), or "snapshot": a recurrent state after its one token

    @property
    def end(self) -> int:
        """The position after its last token; for a snapshot, the one from which computing continues."""
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
    constraint_tables_ms: float = 0.0  # to build the tables for constrained decoding, once; 0.0 before their first use
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"hit_rate": self.hit_rate}
