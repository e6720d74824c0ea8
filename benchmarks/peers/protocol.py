"""What a peer and the comparison say to each other: JSON lines, one question and one answer at a time.

Standard library only: every adapter imports it, each in its own environment.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Settings:
    """How a peer loads the model. `options` are the peer's own."""

    model: str  # folder, or a GGUF file
    dtype: str  # float32 or bfloat16
    threads: int
    capacity: int  # tokens that the longest request may reach
    work: str  # folder for what the peer wants to keep
    options: dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One request. The first `prefix` ids are the same in all requests, the others in no two."""

    messages: list[dict[str, str]]  # for Keepwarm, which renders and tokenizes them inside its clock
    ids: list[int]  # for all others, free of charge
    prefix: int


@dataclass(frozen=True)
class Answer:
    """Times of one request, from the call: `ttft` to the first token, `total` to the last of `tokens`; in ms."""

    tokens: list[int]
    ttft: float
    total: float


def timed(tokens: Iterator[int]) -> Answer:
    """Take all tokens of a request that begins with the first one asked for."""
    got: list[int] = []
    started = time.perf_counter()
    first = 0.0
    for token in tokens:
        if not got:
            first = time.perf_counter()
        got.append(token)
    return Answer(got, (first - started) * 1e3, (time.perf_counter() - started) * 1e3)


class Peer(Protocol):
    """One engine with the model loaded.

    `about` tells versions and what it computes in; `hits` names its kinds of hit. `cold` computes the whole prompt and
    leaves the prefix as warm as it gets; `hit` answers on it. Both raise when the request was not what it should be.
    """

    about: dict[str, Any]
    hits: tuple[str, ...]

    def cold(self, prompt: Prompt) -> Answer: ...

    def hit(self, kind: str, prompt: Prompt, new_tokens: int) -> Answer: ...


def serve(load: Callable[[Settings], Peer]) -> None:
    """Answer questions from stdin until it closes. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer: Peer | None = None
    for line in sys.stdin:
        question: dict[str, Any] = json.loads(line)
        asked = question.pop("ask")
        if asked == "load":
            peer = load(Settings(**question))
            answer: Any = {"about": peer.about, "hits": peer.hits}
        elif asked == "cold":
            assert peer is not None
            answer = vars(peer.cold(Prompt(**question["prompt"])))
        elif asked == "hit":
            assert peer is not None
            answer = vars(peer.hit(question["kind"], Prompt(**question["prompt"]), question["new_tokens"]))
        elif asked == "memory":  # peak resident, in bytes; the system counts in KiB, but macOS in bytes
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            answer = {"peak": peak if sys.platform == "darwin" else peak * 1024}
        else:  # a peer's own
            answer = getattr(peer, asked)(**question)
        print(json.dumps(answer), file=answers, flush=True)
