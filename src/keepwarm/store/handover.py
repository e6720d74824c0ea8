"""How fresh KV gets from a request to the store: one thread copies it, another one writes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from keepwarm.core.blocks import Block
from keepwarm.core.unclosed import nothing
from keepwarm.store.background import Job, Writer
from keepwarm.store.coming import Coming, Expected
from keepwarm.store.health import Health
from keepwarm.store.runfile.layout import Run
from keepwarm.store.storing import Copied, Storing

MAX_PENDING = 64  # puts to be copied, each of which may hold a sequence's pages: two for each request of a batch
_MAX_WRITES = 8  # copies that wait for the disk
_TIMEOUT = 2.0  # seconds that the next one then waits for its turn

_Result = TypeVar("_Result")


class Handover:
    """Both threads of an archive, and the blocks that they work on. Safe for use from several threads."""

    def __init__(self, storing: Storing, health: Health, *, written: Job, idle: Job, ended: Job) -> None:
        """`written` is called after each write, `idle` when there is nothing to do, `ended` at the end: all in the
        writer's thread."""
        self._storing = storing
        self._health = health
        self._written = written
        self.writer = Writer(_MAX_WRITES, idle, ended)
        self.copier = Writer(MAX_PENDING, ended=partial(self.writer.let_go, nothing), awaited=True)
        self.coming = Coming(self.copier.hurry)
        self._keeps_up = True  # whether the writer keeps up with the copier

    def put(self, blocks: Sequence[Block], copy: Callable[[], Copied], epoch: int, *, at_once: bool) -> bool:
        """Copy consecutive blocks with `copy` (`Storing.copy`) in the background, then write them. Return False when
        too many are pending, or after `close`: `copy` is then never called. Without `at_once`, copying is delayed as
        `rest_while` says, unless a request waits for these blocks."""
        expected = self.coming.expect(blocks)

        def job() -> None:
            runs: list[Run] = []
            try:
                runs, to_disk = copy()
            finally:
                if self._storing.is_found(runs):
                    self.coming.arrived(expected)
            self._hand_over(runs, to_disk, epoch, expected)

        if self.copier.submit(job, at_once=at_once):
            return True
        self._health.dropped("queueing a write", "too many are pending, or the archive is closed")
        self.coming.arrived(expected)
        return False

    def _hand_over(self, runs: Sequence[Run], to_disk: bool, epoch: int, expected: Expected) -> None:
        """Let the writer write the copies. While the disk does not keep up, they are dropped at once, so that they do
        not pile up."""
        job = partial(self._keep, runs, to_disk, epoch, expected)
        self._keeps_up = self.writer.submit(job, timeout=_TIMEOUT if self._keeps_up else 0.0)
        if not self._keeps_up:
            self._health.dropped("queueing a write", "the disk is slow, or the archive is closed")
            self._storing.give_up(runs, to_disk)
            self.coming.arrived(expected)

    def _keep(self, runs: Sequence[Run], to_disk: bool, epoch: int, expected: Expected) -> None:
        try:
            self._storing.keep_all(runs, to_disk, epoch)
        finally:
            self.coming.arrived(expected)
        self._written()

    def rest_while(self, resting: Callable[[], float]) -> None:
        """See `Archive.rest_while`."""
        self.copier.resting = self.writer.resting = resting

    def wait_for_disk(self, ids: Sequence[bytes]) -> bool:
        """See `Storing.wait_for_disk`."""
        self.copier.hurry()
        self.writer.hurry()
        return self._storing.wait_for_disk(ids)

    def flush(self) -> None:
        """Wait for everything handed over so far. A job of the writer does not wait."""
        if not self.writer.is_here:
            self.copier.flush()
            self.writer.flush()

    def wait_for(self, job: Callable[[], _Result]) -> _Result:
        """See `Writer.wait_for`."""
        self.copier.flush()
        return self.writer.wait_for(job)

    def close(self, timeout: float | None) -> bool:
        """See `Archive.close`."""
        until = None if timeout is None else time.monotonic() + timeout
        if not self.copier.close(timeout):
            return False  # when it ends, it closes the writer
        return self.writer.close(None if until is None else max(0.0, until - time.monotonic()))

    def let_go(self, first: Job) -> None:
        """See `Archive.let_go`."""
        self.copier.let_go(partial(self.writer.let_go, first))
