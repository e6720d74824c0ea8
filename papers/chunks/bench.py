"""What the experiments share: engines over one loaded model, documents and requests, and what is read off an answer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from keepwarm.core.blocks import token_ids
from keepwarm.core.results import Generation
from keepwarm.core.uncached import CACHED
from keepwarm.engine import Engine
from papers.journal import Row
from papers.pages import Block

MODES = ("off", "exact", "prefix", "chunks")
HEADERS = (
    "You are the assistant at a small town's information desk. Answer from the documents, in one sentence.",
    "Answer the visitor's question with what the documents say. Be brief.",
    "You help new members find rules and dates. Quote the documents exactly and keep to one sentence.",
)

Given = dict[str, Any]  # keyword arguments of `Engine.generate`


@dataclass(frozen=True)
class Extent:
    """How much is run."""

    runs: int = 10
    quick: bool = False

    def few(self, whole: int, quick: int) -> int:
        return quick if self.quick else whole


@dataclass(frozen=True)
class Experiment:
    """One of the ten. `measure` gives the row of one case; `blocks` tell rows, with plots written into a folder."""

    number: int
    name: str
    title: str
    cases: Callable[[Extent], Sequence[str]]
    measure: Callable[[Bench, str], Row]
    blocks: Callable[[list[Row], Path], list[Block]]


@dataclass
class Bench:
    """One loaded model under engines of changing settings, one at a time."""

    first: Engine
    extent: Extent = field(default_factory=Extent)
    seed: int = 0

    @contextmanager
    def engine(self, **settings: Any) -> Iterator[Engine]:
        """An engine with a cache of its own. Chunks are computed only when it is asked to, unless `learn_chunks`."""
        loaded = self.first.pipeline.model
        chosen: Given = {"reuse": "chunks", "learn_chunks": False, "max_ram": "2GiB"} | settings
        with Engine.from_pretrained((loaded.model, loaded.tokenizer), **chosen) as engine:
            engine.generate(prompt="Hello.", max_new_tokens=2, reuse="off")
            yield engine


def documents() -> list[dict[str, str]]:
    """Fourteen documents of about 260 tokens with `title`, `text` and a `question` that one of them answers."""
    text = files(__package__).joinpath("handbook.md").read_text(encoding="utf-8")
    found = []
    for part in ("\n" + text).split("\n# ")[1:]:
        title, question, body = part.split("\n", 2)
        found.append({"title": title, "question": question.removeprefix("question: "), "text": body.strip()})
    return found


def plain(document: dict[str, str]) -> dict[str, str]:
    return {"title": document["title"], "text": document["text"]}


def rag(chosen: Sequence[dict[str, str]], question: str, number: int) -> Given:
    """A request with a header of its own: nothing of it is a prefix of another's."""
    header = f"Request {number}. {HEADERS[number % len(HEADERS)]}"
    messages = [{"role": "system", "content": header}, {"role": "user", "content": question}]
    return {"messages": messages, "documents": [plain(document) for document in chosen]}


def warm_documents(engine: Engine, chosen: Sequence[dict[str, str]]) -> None:
    for document in chosen:
        engine.warm(documents=[plain(document)])
    engine.flush()


def fresh(engine: Engine, given: Given, tokens: int = 1, **how: Any) -> Generation:
    """Answer with what the store has, not with what an earlier request has left in place."""
    engine.pipeline.pool.forget()
    result = engine.generate(**given, max_new_tokens=tokens, **how)
    engine.flush()
    return result


def document_tokens(engine: Engine, given: Given) -> int:
    """Tokens of a request's documents, their titles and tags included."""
    return sum(part.end - part.start for part in engine.explain(**given).segments if part.kind == "document")


def step_ms(engine: Engine, length: int, rows: int, rounds: int) -> float:
    """An ordinary prefill step: the last `rows` of `length` tokens, everything before them in place. The fastest."""
    runner = engine.pipeline.model.runner
    ids = token_ids([3 + number * 7919 % 40_000 for number in range(length)])
    arena = engine.pipeline.pool.acquire(None, length)
    try:
        arena.seek(0)
        arena.advance(length - rows)
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            runner.step(ids[length - rows :], arena.cache, length - rows)
            times.append((time.perf_counter() - started) * 1e3)
            arena.seek(length - rows)
        return min(times)
    finally:
        arena.seek(0)
        engine.pipeline.pool.release(arena)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


@dataclass(frozen=True)
class Followed:
    """An answer of given or greedy tokens, with the logits that each was chosen from (float32, on the CPU)."""

    ids: tuple[int, ...]
    logits: tuple[torch.Tensor, ...]
    blended_tokens: int
    repaired_tokens: int
    divergence: float | None

    @property
    def greedy(self) -> list[int]:
        return [int(row.argmax()) for row in self.logits]

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood of the tokens, in nats."""
        rows = zip(self.ids, self.logits, strict=True)
        return statistics.fmean(-float(row.log_softmax(-1)[token]) for token, row in rows)


def follow(engine: Engine, given: Given, along: Sequence[int] | int, **how: Any) -> Followed:
    """Answer a request along given tokens (in one step: rows never meet), or greedily up to so many, and keep all
    logits."""
    count = along if isinstance(along, int) else len(along)
    arguments = given | {"max_new_tokens": count} | how
    prepared = engine.pipeline.prepare(arguments.pop("prompt", None), arguments)
    tokens, runner = prepared.compiled.tokens, engine.pipeline.model.runner
    linked = engine.pipeline.linked_for(prepared)
    kept: list[torch.Tensor] = []
    ids: list[int] = []
    with engine.pipeline.open(prepared, linked, len(tokens) + count, CACHED) as opened:
        logits = engine.pipeline.first_logits(prepared, opened)
        if not isinstance(along, int):
            ids += along
            rest = runner.step_each(token_ids(ids[:-1]), opened.cache, len(tokens)) if count > 1 else ()
            kept += (row.float().cpu() for row in (logits, *rest))
        while isinstance(along, int):
            kept.append(logits.float().cpu())
            ids.append(int(kept[-1].argmax()))
            if len(ids) == count or ids[-1] in engine.pipeline.stop_tokens:
                break
            logits = runner.step(token_ids(ids[-1:]), opened.cache, len(tokens) + len(ids) - 1)
        placed = opened.placed
    blended = placed.blended if placed else None
    return Followed(
        tuple(ids),
        tuple(kept),
        opened.plan.blended_tokens if blended else 0,
        blended.repaired if blended else 0,
        blended.divergence if blended else None,
    )
