"""Segments of a request, spans of a plan, and the labels of results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from keepwarm.config import Reuse as Reuse


class Exactness(IntEnum):
    """How reused KV relates to a cold run by the same engine; a larger value is a weaker promise."""

    EXACT = 0  # bit-identical logits
    PREFIX = 1  # same tokens, valid KV, other shape or arithmetic: may differ in the last bits
    QUANTIZED = 2  # stored with a lossy codec
    BLENDED = 3  # some KV came from another context

    @property
    def label(self) -> str:
        return self.name.lower()


def weakest(labels: Iterable[Exactness]) -> Exactness:
    """The label of a whole made of parts: the weakest of theirs; `EXACT` when nothing is reused."""
    return max(labels, default=Exactness.EXACT)


class SegmentKind(StrEnum):
    PROMPT = "prompt"
    SYSTEM = "system"
    TOOLS = "tools"
    DOCUMENT = "document"
    MESSAGE = "message"
    SEGMENT = "segment"
    TAIL = "tail"  # what follows the last cut: template tail, generation prompt


@dataclass(frozen=True)
class Segment:
    """A part of a request with one meaning: token positions `[start, end)` of the whole rendered prompt."""

    kind: SegmentKind
    start: int
    end: int
    name: str = ""


class MissReason(StrEnum):
    """Why reuse ended where it did."""

    NONE = "none"  # everything reusable was reused
    NEW = "never_stored"  # nothing stored continues here
    TOKENS = "tokens_differ"
    CUTS = "cuts_differ"
    SALT = "salt_differs"
    MODEL = "model_changed"
    QUANTIZED = "stored_quantized"  # with a lossy codec, but only `exact` is allowed
    ARITHMETIC = "arithmetic_differs"
    OFF = "reuse_off"
    UNCACHEABLE = "uncacheable"  # the model, or a sequence of this length, runs without the cache
    DIVERGED = "chunks_diverged"  # beyond `max_divergence`, by the request's own estimate
    STATE = "no_snapshot"  # tokens are stored beyond the last snapshot of the recurrent state
    STEP = "within_a_step"  # scheduled arithmetic: the last step is always computed, and it is long
    SLOWER = "loading_is_slower"  # than computing, as measured in this process
    TEMPLATE = "template_changed"
    EVICTED = "evicted"  # evicted for space
    EXPIRED = "expired"  # evicted after its time to live
    CORRUPT = "corrupt"  # failed verification and was taken out of use
