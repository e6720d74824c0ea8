"""Write-behind: one thread per remote service that stores runs, keeps its books and tests it while it fails.

No request waits for it. While the service fails, runs wait here, up to a number of bytes; more are dropped.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any

from keepwarm.errors import RemoteUnavailable, StoreFull, StoreLocked, StoreTooNew
from keepwarm.store.books import Books, Fetch
from keepwarm.store.format import Run
from keepwarm.store.health import logger
from keepwarm.store.remote import RemoteTier
from keepwarm.store.reserving import Orphan

PENDING = 256 << 20  # bytes of runs that may wait, beside one that is larger alone
_IDLE_SECONDS = 5.0
_REPORT_SECONDS = 30.0
_EXPIRE_SECONDS = 3600.0
_PURGE_SECONDS = 300.0
_ATTEMPTS = 3  # at one run, before it is dropped

Job = Callable[[], None]


class Behind:
    """The writing half of a remote tier."""

    def __init__(
        self, tier: RemoteTier, fetch: Fetch, *, on_purged: Callable[[bytes], None] = lambda tag: None
    ) -> None:
        """`fetch` finds the run that holds a block, in RAM or on disk; `on_purged` is told of salts (their tags) that
        another replica purged. Both are called from the thread."""
        self.tier = tier
        self.books = Books(tier)
        self.replica = uuid.uuid4().hex
        self.reporting: Callable[[], Mapping[str, Any]] = dict  # what this replica has counted
        self.limit = PENDING
        self._fetch = fetch
        self._on_purged = on_purged
        self._purges: dict[bytes, float] | None = None
        self._followed_at = float("-inf")  # when the purges were last read; before the first write after a reconnect
        self._waiting: deque[tuple[Run, int]] = deque()  # runs, and how often each was tried
        self._jobs: deque[Job] = deque()
        self._bytes = 0
        self._busy = False
        self._closed = False
        self._changed = threading.Condition()
        self._reported_at = self._expired_at = time.monotonic()
        self._last: Mapping[str, Any] = {}
        self.written = 0  # blocks
        tier.on_failure = self._wake
        tier.on_doubt = lambda run_id: self.do(lambda: self.books.tidy(run_id))
        self._thread = threading.Thread(target=self._run, name=f"keepwarm-{tier.name}-behind", daemon=True)
        self._thread.start()

    def submit(self, run: Run) -> bool:
        """Queue a run; False, and a count, when too much is waiting or the service cannot be used."""
        with self._changed:
            full = self._waiting and self._bytes + run.nbytes > self.limit
            if not (self._closed or self.tier.refused or full):
                self._waiting.append((run, 0))
                self._bytes += run.nbytes
                self._changed.notify_all()
                return True
        self.tier.health.dropped(f"writing to {self.tier.name}", "too much is waiting, or it cannot be used")
        return False

    def do(self, job: Job) -> None:
        """Queue something else that asks the service; dropped when that fails."""
        with self._changed:
            if not self._closed:
                self._jobs.append(job)
                self._changed.notify_all()

    def put(self, run: Run) -> bool:
        """Store a run now, in this thread; False, and a count, when it is not stored. Never raises."""
        health, what = self.tier.health, f"writing to {self.tier.name}"
        try:
            self.written += self.books.store(run, self._fetch)
        except StoreFull as error:
            health.dropped(what, error)
        except Orphan:
            health.dropped(what, "the block it continues is not stored")
        except (StoreTooNew, StoreLocked):
            health.count("dropped_writes")  # `RemoteTier.check` said why
        except RemoteUnavailable as error:
            health.count("dropped_writes")
            self.tier.failed(error)
        except Exception as error:
            health.failed(what, error)
        else:
            health.worked(what)
            return True
        return False

    def purge(self, tag: bytes) -> tuple[set[str], int]:
        """Remove everything under a salt, waiting runs included; see `Books.purge`. Raises RemoteUnavailable."""
        self._drop(tag)
        if not self.tier.working:
            raise RemoteUnavailable(f"{self.tier.blobs.label} does not work now")
        done: Future[tuple[set[str], int]] = Future()

        def job() -> None:
            try:
                removed = self.books.purge(tag)
                with suppress(RemoteUnavailable):  # what is put from now on is not what another's purge means
                    if self._purges is not None and (when := self.books.purges().get(tag)) is not None:
                        self._purges[tag] = when
                done.set_result(removed)
            except BaseException as error:
                done.set_exception(error)

        self.do(job)
        try:
            return done.result(_PURGE_SECONDS)
        except FutureTimeout:
            raise RemoteUnavailable(f"{self.tier.blobs.label} did not finish within {_PURGE_SECONDS} s") from None

    def _drop(self, tag: bytes) -> None:
        """Let go of waiting runs under a salt."""
        with self._changed:
            kept = [entry for entry in self._waiting if tag not in entry[0].salts]
            self._bytes -= sum(run.nbytes for run, _ in self._waiting) - sum(run.nbytes for run, _ in kept)
            self._waiting = deque(kept)

    def flush(self) -> None:
        """Wait until everything queued is written, or the service turns out to fail."""
        with self._changed:
            while (self._waiting or self._jobs or self._busy) and self.tier.working and not self._closed:
                self._changed.wait(0.2)

    def close(self) -> None:
        """Flush, leave the counters, and end the thread. What a failing service did not take is dropped."""
        self.flush()
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._thread.join(self.tier.limits.write_timeout)
        if self._waiting:
            self.tier.health.count("dropped_writes", len(self._waiting))
        self.tier.close()

    def stats(self) -> dict[str, Any]:
        """JSON-ready."""
        return self.tier.stats() | {"waiting_runs": len(self._waiting), "written_blocks": self.written}

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                while not self._closed and not (self._due() and (self._waiting or self._jobs)):
                    if not self._changed.wait(min(_IDLE_SECONDS, max(0.01, self._pause()))) or self._pause() == 0.0:
                        break
                closed = self._closed
                self._busy = not closed
            try:
                if closed:
                    self._last_words()
                else:
                    self._turn()
            except RemoteUnavailable as error:
                self.tier.failed(error)
            except (StoreTooNew, StoreLocked):
                pass  # `RemoteTier.check` said why
            except Exception:
                logger.exception("work in the background of %s failed", self.tier.name)
            if closed:
                return

    def _due(self) -> bool:
        return self.tier.working

    def _pause(self) -> float:
        """Seconds until a test is due; infinite for a service that is refused."""
        return float("inf") if self.tier.refused else self.tier.breaker.wait()

    def _turn(self) -> None:
        if not self.tier.working:
            if self.tier.probe():
                self._followed_at = float("-inf")
            return
        if time.monotonic() - self._followed_at >= _IDLE_SECONDS:
            self._followed_at = time.monotonic()  # first, so that what cannot be read does not keep all else waiting
            self.follow_purges()
        with self._changed:
            job = self._jobs.popleft() if self._jobs else None
            run, tries = self._waiting[0] if job is None and self._waiting else (None, 0)
        if job is not None:
            job()
        elif run is not None:
            kept = not self.put(run) and not self.tier.breaker.closed and tries + 1 < _ATTEMPTS
            with self._changed:
                if self._waiting and self._waiting[0][0] is run:  # else it was purged meanwhile
                    self._waiting.popleft()
                    if kept:  # the service failed: it is written when that works again
                        self._waiting.appendleft((run, tries + 1))
                    else:
                        self._bytes -= run.nbytes
        else:
            self._idle()

    def _idle(self) -> None:
        self.books.merge()
        now = time.monotonic()
        if now - self._reported_at >= _REPORT_SECONDS:
            self._reported_at = now
            self._report()
        if now - self._expired_at >= _EXPIRE_SECONDS:
            self._expired_at = now
            self.books.expire()

    def follow_purges(self) -> None:
        """Tell of salts that were purged by others since the last time, and write nothing that waits under them."""
        purges = self.books.purges()
        if self._purges is not None:
            # Another replica's clock may be behind: any other time is news.
            for tag in [tag for tag, when in purges.items() if when != self._purges.get(tag)]:
                self._drop(tag)
                self._on_purged(tag)
        elif self.tier.breaker.opened:  # runs waited for the first connection: when they were purged nobody knows
            for tag in purges:
                self._drop(tag)
        self._purges = purges

    def _report(self) -> None:
        record = self.reporting()
        if record and record != self._last:
            self.books.report(self.replica, record)
            self._last = record

    def _last_words(self) -> None:
        if self.tier.working:
            self.books.merge()
            self._report()
