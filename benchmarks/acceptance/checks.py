"""What must be equal to the bit: every answer from the cache, and the same answer without it.

Each check yields cases. The first one that is wrong ends the run.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from benchmarks.acceptance.models import FAMILIES, ON_TRITON, small, token_ids

from keepwarm import Engine
from keepwarm.batching import Batcher
from keepwarm.sessions.turn import marked

STEP = 64  # tokens; small, so that short prompts have many cuts
NEW = 4  # tokens of an answer
LENGTHS = (1, 31, 33, 64, 65, 127, 129, 300, 513)
AT_ONCE = (1, 8, 32)
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Case:
    """One comparison: an answer's digest, its label, and how much came from where."""

    check: str
    case: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True)
class Subject:
    """A model to be checked, and where."""

    device: str  # as it is asked for: cuda, cpu, mps, adversarial
    family: str
    dtype: str
    work: Path
    attention: str = "model"  # triton: the kernels for GPUs

    @property
    def place(self) -> str:
        """The device as torch names it."""
        return "cpu" if self.device == "adversarial" else self.device

    def model(self) -> tuple[Any, Any]:
        return small(self.family, getattr(torch, self.dtype), self.place)


Digests = dict[tuple[int, ...], str]


class Checks:
    """The checks of one subject. The answers of an engine without a store, which reuses nothing, are the reference."""

    def __init__(self, subject: Subject, poison: Callable[[], None]) -> None:
        """`poison` fills the device's free memory with NaN. It is called before every engine is made."""
        self.subject, self._poison = subject, poison
        self._pair = subject.model()
        self._bare = self.engine(None, reuse="off")
        self._known: Digests = {}

    def engine(self, store: Path | None, **settings: Any) -> Engine:
        self._poison()
        return Engine.from_pretrained(
            self._pair,
            **({"store": store, "attention": self.subject.attention, "step": STEP, "min_step": 16} | settings),
        )

    def close(self) -> None:
        self._bare.close()

    def every(self) -> Iterator[Case]:
        """Yield the cases of all checks. One that raises is wrong."""
        for name, check in self._all():
            try:
                yield from check()
            except Exception as error:
                yield Case(name, f"{self.subject.family} {self.subject.dtype}", ok=False, detail=_raised(error))

    def _all(self) -> Iterator[tuple[str, Callable[[], Iterator[Case]]]]:
        yield "plain", partial(self.tiers, "plain", {})
        if find_spec("cryptography"):
            key = self.subject.work / "key"
            key.write_text(secrets.token_hex(32))
            yield "encrypted", partial(self.tiers, "encrypted", {"store_key_file": key})
        yield "mapped", partial(self.tiers, "mapped", {"map_files": True})
        yield "codecs", self.codecs
        yield "after an answer", self.answers
        yield "sessions", self.sessions
        yield "threads", self.threads
        yield "batches", self.batches
        yield "second process", self.processes
        if self.subject.family == "dense":
            yield "chunks", self.chunks

    # ---- helpers ----

    def cold(self, prompt: list[int]) -> str:
        """The digest of an answer without reuse."""
        if tuple(prompt) not in self._known:
            found = self._bare.generate(prompt, max_new_tokens=NEW, trace=True).logits_digest
            self._known[tuple(prompt)] = str(found)
        return self._known[tuple(prompt)]

    def compared(self, check: str, case: str, result: Any, prompt: list[int], tier: str | None = None) -> Case:
        """Compare an answer with the one without reuse. With `tier`, some of its KV must have come from there."""
        name = f"{self.subject.family} {self.subject.dtype} {case}"
        same = result.logits_digest == self.cold(prompt)
        there = tier is None or result.cached_by_tier.get(tier, 0) > 0
        detail = f"{result.cached_tokens} of {result.prompt_tokens} tokens from {dict(result.cached_by_tier)}"
        detail += "" if same else "; other logits than without the cache"
        detail += "" if there else f"; nothing came from {tier}"
        return Case(check, name, same and there and result.exactness == "exact", detail)

    def ask(self, engine: Engine, prompt: list[int]) -> Any:
        return engine.generate(prompt, max_new_tokens=NEW, trace=True)

    # ---- checks ----

    def tiers(self, name: str, settings: dict[str, Any]) -> Iterator[Case]:
        """A question after a prompt that is on the device, in RAM, and on disk after a restart."""
        store = self.subject.work / name
        asked = [(length, token_ids(length, length) + token_ids(9, 1)) for length in LENGTHS]
        with self.engine(store, **settings) as engine:
            for length, prompt in asked:
                some = length > 2 * STEP
                engine.generate(prompt[:length], max_new_tokens=1)
                yield self.compared(
                    f"{name}: device", f"{length} tokens", self.ask(engine, prompt), prompt, "device" if some else None
                )
                engine.flush()
                engine.pipeline.pool.forget()
                yield self.compared(
                    f"{name}: RAM", f"{length} tokens", self.ask(engine, prompt), prompt, "ram" if some else None
                )
        with self.engine(store, **settings) as engine:
            for length, prompt in reversed(asked):
                tier = "disk" if length > 2 * STEP else None
                yield self.compared(f"{name}: disk", f"{length} tokens", self.ask(engine, prompt), prompt, tier)

    def codecs(self) -> Iterator[Case]:
        """Lossy codecs say so, and a hit's answer does not depend on the tier."""
        prompt = token_ids(300, 5) + token_ids(9, 1)
        for codec in ("int8", "int4"):
            store, found = self.subject.work / codec, []
            for _ in range(2):
                with self.engine(store, kv_codec=codec, reuse="prefix") as engine:
                    engine.warm(prompt[:300])  # in the second round it is on disk already
                    engine.flush()
                    engine.pipeline.pool.forget()
                    found.append(
                        engine.generate(prompt, max_new_tokens=NEW, trace=True, cacheable_prefix=1)  # is not stored
                    )
            labels = {result.exactness for result in found if result.cached_tokens}
            same = len({result.logits_digest for result in found}) == 1
            name = f"{self.subject.family} {self.subject.dtype}"
            tiers = [dict(result.cached_by_tier) for result in found]
            yield Case(
                f"codec {codec}", name, same and labels == {"quantized"}, f"{sorted(labels)} {tiers}, same: {same}"
            )

    def answers(self) -> Iterator[Case]:
        """A prompt that goes on from an answer, which was decoded token by token."""
        prompt = token_ids(200, 7)
        with self.engine(self.subject.work / "answers") as engine:
            answer = engine.generate(prompt, max_new_tokens=40)
            longer = [*prompt, *answer.token_ids, *token_ids(70, 3)]
            yield self.compared("after an answer", "device", self.ask(engine, longer), longer)
        with self.engine(self.subject.work / "answers") as engine:
            yield self.compared("after an answer", "disk", self.ask(engine, longer), longer)

    def sessions(self) -> Iterator[Case]:
        """Turns of a session, before and after a restart."""
        said = ["One " * 30, "Two " * 30, "Three " * 30]
        for number, text in enumerate(said):
            with self.engine(self.subject.work / "sessions") as engine:
                session = engine.sessions.open("s", system="You count. " * 20)
                result = session.say(text, max_new_tokens=NEW, trace=True)
                chat = marked(session.show().messages[:-1])
            cold = self._bare.generate(messages=chat, max_new_tokens=NEW, trace=True)
            same = cold.logits_digest == result.logits_digest
            name = f"{self.subject.family} {self.subject.dtype} turn {number + 1}"
            yield Case("sessions", name, same, f"{result.cached_tokens} of {result.prompt_tokens} tokens cached")

    def threads(self) -> Iterator[Case]:
        """Requests from two other threads at once, one on a stream of its own where the device has streams."""
        prompts = [token_ids(300, 11) + token_ids(9, seed) for seed in (1, 2)]
        with self.engine(self.subject.work / "threads") as engine:
            engine.generate(prompts[0][:300], max_new_tokens=1)
            found: dict[int, Any] = {}

            def run(number: int) -> None:
                if number and self.subject.device == "cuda":
                    with torch.cuda.stream(torch.cuda.Stream()):
                        found[number] = self.ask(engine, prompts[number])
                else:
                    found[number] = self.ask(engine, prompts[number])

            threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
            for number, prompt in enumerate(prompts):
                if number not in found:
                    yield Case("threads", f"thread {number}", ok=False, detail="it raised an error")
                    return
                yield self.compared("threads", f"thread {number}", found[number], prompt)

    def batches(self) -> Iterator[Case]:
        """Many at once on one beginning, each equal to itself alone."""
        with self.engine(self.subject.work / "batches") as engine, Batcher(engine) as batcher:
            head = token_ids(200, 13)
            engine.generate(head, max_new_tokens=1)
            for count in AT_ONCE:
                prompts = [head + token_ids(5 + number % 3, 17 + number) for number in range(count)]
                tickets = [batcher.submit(prompt, max_new_tokens=NEW, trace=True) for prompt in prompts]
                for number, (ticket, prompt) in enumerate(zip(tickets, prompts, strict=True)):
                    yield self.compared(f"batch of {count}", f"request {number}", ticket.result(), prompt)

    def processes(self) -> Iterator[Case]:
        """A second process on the same store, while this one has it open."""
        prompt = token_ids(300, 19) + token_ids(9, 1)
        store = self.subject.work / "processes"
        with self.engine(store) as engine:
            engine.generate(prompt[:300], max_new_tokens=1)
            engine.flush()
            given = self.subject
            subject = [given.device, given.family, given.dtype, str(given.work), given.attention]
            command = [sys.executable, "-m", "benchmarks.gpu", "--child", json.dumps([subject, str(store), prompt])]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        name = f"{self.subject.family} {self.subject.dtype}"
        if done.returncode:
            yield Case("second process", name, ok=False, detail=f"it ended with {done.returncode}")
            return
        found = json.loads(done.stdout.splitlines()[-1])
        same = found["digest"] == self.cold(prompt)
        yield Case(
            "second process", name, same and found["cached"] > 0, f"{found['cached']} tokens cached, same: {same}"
        )

    def chunks(self) -> Iterator[Case]:
        """Documents in another order: labelled, finite, and the same when they are asked again."""
        documents = [{"title": str(n), "text": f"Fact {n}: " + f"pier {n} closes. " * 12} for n in range(3)]
        chat = [{"role": "user", "content": "Which pier closes?"}]
        with self.engine(self.subject.work / "chunks", reuse="chunks") as engine:
            for order in ((0, 1, 2), (2, 0, 1)):
                shown = [documents[number] for number in order]
                result = engine.generate(
                    messages=chat, documents=shown, max_new_tokens=NEW, logprobs=1, reuse="chunks", trace=True
                )
                finite = all(each.logprob == each.logprob for each in result.logprobs or ())
                yield Case("chunks", f"order {order}", finite and bool(result.exactness), f"label {result.exactness}")


def _raised(error: Exception) -> str:
    """Return the error, and where it was raised."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"


def answer_child(subject: Subject, store: Path, prompt: list[int]) -> dict[str, Any]:
    """What the second process of `Checks.processes` found."""
    settings: dict[str, Any] = {"attention": subject.attention, "step": STEP, "min_step": 16}
    with Engine.from_pretrained(subject.model(), store=store, **settings) as engine:
        result = engine.generate(prompt, max_new_tokens=NEW, trace=True)
    return {"digest": result.logits_digest, "cached": result.cached_tokens}


def subjects(
    device: str, families: list[str], dtypes: list[str], work: Path, attention: str = "model"
) -> Iterator[Subject]:
    """Every family in the first dtype, and the first family in the others."""
    for number, family in enumerate(families or FAMILIES):
        for dtype in dtypes if number == 0 else dtypes[:1]:
            if attention == "triton" and family not in ON_TRITON:
                continue
            folder = work / f"{attention}-{family}-{dtype}"
            folder.mkdir(parents=True)
            yield Subject(device, family, dtype, folder, attention)
