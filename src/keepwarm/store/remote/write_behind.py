"""Write-behind: one thread per remote service that stores runs, updates its records, and tests it while it fails.

No request waits for this thread. While the service fails, runs wait here, up to a number of bytes; more are dropped.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from keepwarm.errors import PurgedMeanwhile, RemoteUnavailable, StoreFull, StoreLocked, StoreTooNew
from keepwarm.store.admin.purge_epochs import EVERYTHING, Epochs, is_under
from keepwarm.store.catalog.rows import Orphan
from keepwarm.store.remote.records import Books, Fetch, began_of
from keepwarm.store.remote.tier import RemoteTier
from keepwarm.store.runfile.layout import UNKNOWN_SALT, Run

log = logging.getLogger(__name__)

PENDING = 256 << 20  # bytes of runs that may wait; a single larger run may wait alone
_IDLE_SECONDS = 5.0
_REPORT_SECONDS = 30.0
_EXPIRE_SECONDS = 3600.0
_PURGE_SECONDS = 300.0
_ATTEMPTS = 3  # to write one run before it is dropped

Job = Callable[[], None]
Purges = Mapping[bytes, float]  # tags of salts, and when each was purged last


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A run to be written."""

    run: Run
    epoch: int  # at which its request began
    tries: int = 0


class Behind:
    """The writing half of a remote tier."""

    def __init__(
        self,
        tier: RemoteTier,
        fetch: Fetch,
        *,
        epochs: Epochs | None = None,
        on_purged: Callable[[Collection[bytes]], bool] = lambda tags: True,
    ) -> None:
        """`fetch` finds the run that holds a block, in RAM or on disk. `epochs` are the archive's. `on_purged` gets the
        tags of salts that another replica purged, and returns whether it removed them here, too; if not, it is called
        again. Both are called from the thread."""
        self.tier = tier
        self.books = Books(tier)
        self.replica = uuid.uuid4().hex
        self.reporting: Callable[[], Mapping[str, Any]] = dict  # what this replica has counted
        self.limit = PENDING
        self._fetch = fetch
        self._epochs = Epochs(None) if epochs is None else epochs
        self._on_purged = on_purged
        self._purges: Purges | None = None  # as last followed, by salt
        self._recall: Callable[[], Purges | None] = lambda: None
        self._remember: Callable[[Purges], None] = lambda purges: None
        self._followed_at = float("-inf")  # when the purges were last read; reset on a reconnect
        self._waiting: deque[_Waiting] = deque()
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

    def begin(self, recall: Callable[[], Purges | None], remember: Callable[[Purges], None]) -> None:
        """Follow the purges before this process began, and wait for that while the service works. `recall` returns the
        purges that the folder has followed, None if it holds nothing; `remember` gets those that it has followed. Both
        are called from the thread."""
        self._recall, self._remember = recall, remember
        looked = threading.Event()
        self.do(looked.set)  # `_turn` reads the purges first
        deadline = time.monotonic() + self.tier.limits.timeout
        while not looked.wait(0.01) and self.tier.working and time.monotonic() < deadline:
            pass

    def submit(self, run: Run, epoch: int) -> bool:
        """Queue a run whose request began at `epoch`. Return False, and count it as dropped, when too much is waiting
        or the service cannot be used."""
        with self._changed:
            full = self._waiting and self._bytes + run.nbytes > self.limit
            if not (self._closed or self.tier.refused or full):
                self._waiting.append(_Waiting(run, epoch))
                self._bytes += run.nbytes
                self._changed.notify_all()
                return True
        self.tier.health.dropped(f"writing to {self.tier.name}", "too much is waiting, or it cannot be used")
        return False

    def do(self, job: Job) -> None:
        """Queue another job for the service. It is dropped when it fails."""
        with self._changed:
            if not self._closed:
                self._jobs.append(job)
                self._changed.notify_all()

    def put(self, run: Run, epoch: int | None = None) -> bool:
        """Store a run now, in this thread; its request began at `epoch` (None: now). Return False, and count it, when
        it is not stored. Never raises."""
        allowed = partial(self._allows, run, self._epochs.now() if epoch is None else epoch)
        health, what = self.tier.health, f"writing to {self.tier.name}"
        try:
            self.written += self.books.store(run, self._fetch, allowed)
        except PurgedMeanwhile as error:
            health.dropped(what, error)
        except StoreFull as error:
            health.dropped(what, error)
        except Orphan:
            health.dropped(what, "the block it continues is not stored")
        except (StoreTooNew, StoreLocked):
            health.count("dropped_writes")  # `RemoteTier.check` logged why
        except RemoteUnavailable as error:
            health.count("dropped_writes")
            self.tier.failed(error)
        except Exception as error:
            health.failed(what, error)
        else:
            health.worked(what)
            return True
        return False

    def _allows(self, run: Run, epoch: int) -> bool:
        """Whether a run may still be stored: no process here purged its salt since its request began, and no replica
        since the purges were last followed. Raises RemoteUnavailable."""
        if not self._epochs.allows(epoch, run.salts):
            return False
        if self._purges is None:
            return True  # `put` was called directly, and no purges are followed
        changed, salts = _changed(self._purges, self.books.purges()), {EVERYTHING, *run.salts}
        if changed.isdisjoint(salts | {began_of(tag) for tag in salts}) and not (changed and UNKNOWN_SALT in salts):
            return True
        self._followed_at = float("-inf")
        return False

    def purge(self, tag: bytes) -> tuple[set[str], int]:
        """Remove everything under a salt, including waiting runs; see `Books.purge`. Raises RemoteUnavailable."""
        self._drop({tag})
        if not self.tier.working:
            raise RemoteUnavailable(f"{self.tier.blobs.label} does not work now")
        done: Future[tuple[set[str], int]] = Future()

        def job() -> None:
            try:
                removed = self.books.purge(tag)
                with suppress(RemoteUnavailable):  # note our own purge as followed, so later writes are not refused
                    now, mine = self.books.purges(), (tag, began_of(tag))
                    if self._purges is not None:
                        self._purges = {**self._purges, **{each: now[each] for each in mine if each in now}}
                        self._remember(self._purges)
                done.set_result(removed)
            except BaseException as error:
                done.set_exception(error)

        self.do(job)
        try:
            return done.result(_PURGE_SECONDS)
        except FutureTimeout:
            raise RemoteUnavailable(f"{self.tier.blobs.label} did not finish within {_PURGE_SECONDS} s") from None

    def _drop(self, tags: Collection[bytes]) -> None:
        """Drop waiting runs under these salts."""
        with self._changed:
            kept = [each for each in self._waiting if not is_under(each.run.salts, tags)]
            self._bytes -= sum(each.run.nbytes for each in self._waiting) - sum(each.run.nbytes for each in kept)
            self._waiting = deque(kept)

    def flush(self) -> None:
        """Wait until everything queued is written, or the service fails."""
        with self._changed:
            while (self._waiting or self._jobs or self._busy) and self.tier.working and not self._closed:
                self._changed.wait(0.2)

    def close(self) -> None:
        """Flush, store the counters, and end the thread. Runs that a failing service did not take are dropped."""
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
        """Statistics, JSON-ready."""
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
                pass  # `RemoteTier.check` logged why
            except Exception:
                log.exception("work in the background of %s failed", self.tier.name)
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
            self._followed_at = time.monotonic()  # set first, so a failed read does not block other work
            self.follow_purges()
        with self._changed:
            job = self._jobs.popleft() if self._jobs else None
            first = self._waiting[0] if job is None and self._waiting else None
        if job is not None:
            job()
        elif first is not None:
            kept = not self.put(first.run, first.epoch) and not self.tier.breaker.closed
            kept = kept and first.tries + 1 < _ATTEMPTS
            with self._changed:
                if self._waiting and self._waiting[0] is first:  # otherwise it was purged meanwhile
                    self._waiting.popleft()
                    if kept:  # the service failed: write the run when it works again
                        self._waiting.appendleft(replace(first, tries=first.tries + 1))
                    else:
                        self._bytes -= first.run.nbytes
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
        """Report salts that other replicas purged since the last time, and drop waiting runs under them.

        Purges from before the first look may be new, too: to the folder of this process, and to runs that waited for
        the first connection.
        """
        purges = self.books.purges()
        if purges == self._purges:
            return
        kept, known = self._recall(), self._purges
        if known is None:
            known = purges if kept is None and not self.tier.breaker.opened else kept or {}
        tags = _changed(known, purges) - {began_of(tag) for tag in purges}
        self._drop(tags)
        news = _changed(kept or {}, purges) & tags  # another process may have followed the others in this folder
        if not news or self._on_purged(news):
            self._purges = purges
            self._remember(purges)

    def _report(self) -> None:
        record = self.reporting()
        if record and record != self._last:
            self.books.report(self.replica, record)
            self._last = record

    def _last_words(self) -> None:
        if self.tier.working:
            self.books.merge()
            self._report()


def _changed(known: Mapping[bytes, float], purges: Mapping[bytes, float]) -> set[bytes]:
    """Return the salts that were purged since. A replica's clock may be behind, so any different time counts."""
    return {tag for tag, when in purges.items() if when != known.get(tag)}
