"""Checks of labels in service: a share of the answers is computed again cold, when nothing else runs, and compared.

A separate thread waits for idle time. A request that comes in cancels the cold run, which is tried again later. A cold
run stores nothing, is charged to no tenant and counts in no other metric.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from itertools import count
from secrets import randbits
from typing import TYPE_CHECKING, Any, Literal

from keepwarm.core.results import Generation

if TYPE_CHECKING:  # it loads torch
    from keepwarm.batching.request import Ticket

log = logging.getLogger(__name__)

_WAITING = 16  # most answers that wait for idle time; the oldest are dropped

Outcome = Literal["identical", "logits", "tokens"]  # all bits are the same; the logits differ; the tokens do too


@dataclass(frozen=True)
class Compared:
    """What a cold run shows about an answer."""

    exactness: str  # the answer's label
    outcome: Outcome
    tokens: int  # of the answer
    diverged: int  # of those, from the first that the cold run did not give


@dataclass(frozen=True)
class _Sample:
    prompt: str | Sequence[int] | None
    arguments: Mapping[str, Any]
    result: Generation


class Shadow:
    """Takes samples from the event loop, compares them in a thread."""

    def __init__(self, share: float, submit: Callable[..., Ticket], told: Callable[[Compared], None]) -> None:
        """`share` of answers, 0 to 1; `submit` is a Batcher's; `told` is called from the thread."""
        self._share, self._submit, self._told = share, submit, told
        self._numbers = count()
        self._changed = threading.Condition()
        self._samples: deque[_Sample] = deque(maxlen=_WAITING)
        self._idle, self._closed = True, False
        self._running: Ticket | None = None
        self._purges = 0
        self._thread: threading.Thread | None = None
        if share > 0:
            self._thread = threading.Thread(target=self._work, name="keepwarm-shadow", daemon=True)
            self._thread.start()

    def traced(self, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments for a request to be compared: its logits are digested, its sampling can be repeated.

        None for a request that is not chosen (evenly, so that a run can be repeated) or cannot be compared: a session's
        turn depends on earlier ones.
        """
        if not self._share or "session" in arguments or arguments.get("reuse") == "off":
            return None
        number = next(self._numbers)
        if int((number + 1) * self._share) == int(number * self._share):
            return None
        seed = {"seed": randbits(63)} if arguments.get("temperature") and "seed" not in arguments else {}
        return {**arguments, **seed, "trace": True}

    def put(self, prompt: str | Sequence[int] | None, arguments: Mapping[str, Any], result: Generation) -> None:
        """Take an answer to `traced` arguments as a sample, unless it reused nothing and so is cold already."""
        if result.cached_tokens:
            with self._changed:
                self._samples.append(_Sample(prompt, arguments, result))

    def pause(self) -> None:
        """Note that a request comes in, and cancel the cold run."""
        with self._changed:
            self._idle = False
            if self._running is not None:
                self._running.cancel()

    def resume(self) -> None:
        """Note that the last request has ended."""
        with self._changed:
            self._idle = True
            self._changed.notify_all()

    def forget(self) -> None:
        """Drop all samples: some content is purged."""
        with self._changed:
            self._purges += 1
            self._samples.clear()
            if self._running is not None:
                self._running.cancel()

    def close(self) -> None:
        """Stop, and drop what waits. It may be called twice."""
        with self._changed:
            self._closed = True
            if self._running is not None:
                self._running.cancel()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._idle and bool(self._samples)))
                if self._closed:
                    return
                sample, purges = self._samples.popleft(), self._purges
            try:
                self._told(compare(sample.result, self._cold(sample)))
            except CancelledError:
                with self._changed:
                    if purges == self._purges and len(self._samples) < _WAITING:
                        self._samples.appendleft(sample)
            except Exception as error:
                log.warning("an answer could not be compared with a cold run: %s", error)

    def _cold(self, sample: _Sample) -> Generation:
        ticket = self._submit(sample.prompt, **{**sample.arguments, "reuse": "off"})
        with self._changed:
            self._running = ticket
            if self._closed or not self._idle:
                ticket.cancel()
        try:
            return ticket.result()
        finally:
            with self._changed:
                self._running = None


def compare(answer: Generation, cold: Generation) -> Compared:
    """Compare an answer with a cold run of the same request. Both have a `trace`."""
    pairs = zip(answer.token_ids, cold.token_ids, strict=False)
    same = next((at for at, (one, other) in enumerate(pairs) if one != other), len(cold.token_ids))
    diverged = max(0, len(answer.token_ids) - same)
    outcome: Outcome = "tokens" if answer.token_ids != cold.token_ids else "logits"
    if answer.logits_digest == cold.logits_digest:
        outcome = "identical"
    elif answer.exactness == "exact":
        log.error("an answer labelled exact is not what a cold run computes", extra={"outcome": outcome})
    return Compared(answer.exactness, outcome, len(answer.token_ids), diverged)
