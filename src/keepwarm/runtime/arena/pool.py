"""The device tier of requests outside a batch: arenas that keep the KV of their last requests.

A request that begins like the content of an idle arena finds that KV *resident* and does not load it.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from contextlib import nullcontext, suppress

from keepwarm.core.blocks import TokenIds
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.lora import Lora
from keepwarm.errors import Overloaded, PromptTooLong
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.arena.form import PLAIN, CacheForm
from keepwarm.runtime.arena.held import Held
from keepwarm.runtime.arena.lent import WORTH, Lent, worth_copying
from keepwarm.runtime.arena.room import KEPT, KEPT_THERE, ROUND, Cap, Line, rounded
from keepwarm.runtime.device import DevicePort
from keepwarm.runtime.native.reads import CachedReads

_RESERVE = 256 << 20  # bytes of the arena made and touched at start: a first touch costs more than the copy into it
_POLL = 0.02  # seconds
_TIMEOUT = 5.0  # seconds that a request waits for background readers when nothing else can be evicted


class ArenaPool:
    """Arenas of one geometry, never larger in all than `cap` bytes, including those in use and those being freed.

    Who needs memory that is not there has idle arenas evicted, then waits for running requests, then is refused.

    `acquire` prefers the idle arena that holds most of the wanted prefix, otherwise the least recently used one. With
    `keep_encoded`, KV in full precision is kept only while a request or a background reader needs it.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        port: DevicePort,
        context_window: int | None = None,
        reads: CachedReads | None = None,
        cap: int | None = None,
        *,
        keep_encoded: bool = False,
        form: CacheForm = PLAIN,
    ) -> None:
        """Without a `cap` it is a share of what is free on the devices; on the host there is room for one whole context
        window, and at least 4 GiB."""
        self.geometry = geometry
        self.port = port
        ports = form.ports(len(geometry.layers), port)
        self.caps = Cap.of(cap, geometry, ports, Arena.size(geometry, rounded(context_window or 0)))
        self.evictions = 0  # arenas whose content was dropped for another request
        self._reads = reads
        self._keep_encoded = keep_encoded
        self._form = form
        many = port.copies_by_address and not form.has_states  # nobody counts what states take
        self._kept = 0 if keep_encoded else KEPT_THERE if many else KEPT
        self._forgotten = 0  # number of `forget` calls; content lent before the last one must not be found again
        self._lent: dict[int, Lent] = {}  # by id of the arena
        self._idle: list[Arena] = []  # oldest first
        self._holders: list[int] = []  # threads that have an arena, or are about to
        self._returned = 0  # how often an arena came back, or was read to its end
        self._changed = threading.Condition()
        self._line = Line(self._changed)
        self._awaited = 0  # requests that wait for what others hold
        self._allocated = 0  # bytes, ever
        self._sizes: dict[int, int] = {}  # bytes of an arena, by its capacity
        self._freed: deque[int] = deque()  # bytes not yet subtracted; the garbage collector fills it, in any thread
        if geometry.layers and not keep_encoded:
            tokens = min(context_window or ROUND, _RESERVE // geometry.bytes_per_token)
            if tokens >= ROUND and Arena.size(geometry, tokens) <= self.cap:
                self._allocated = Arena.size(geometry, tokens)
                with suppress(Overloaded):  # the device has no memory to spare
                    self._idle.append(self._made(tokens, touch=True))

    @property
    def cap(self) -> int:
        """The most bytes that arenas may take."""
        return self.caps.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas, idle or in use; at most `cap`."""
        with self._changed:
            while self._freed:
                self._allocated -= self._freed.popleft()
            return self._allocated

    @property
    def room(self) -> int:
        """How many positions the largest arena under the cap has."""
        per_token = self.geometry.bytes_per_token
        return max(0, self.cap // per_token // ROUND - 1) * ROUND if per_token else sys.maxsize

    @property
    def lent(self) -> int:
        """The number of arenas in use, whose memory will come back."""
        return len(self._holders)

    def stats(self) -> dict[str, int]:
        """Return blocks in idle arenas, bytes of all arenas, and the number of evictions."""
        with self._changed:
            blocks = sum(arena.held_blocks for arena in self._idle)
            return {"blocks": blocks, "bytes": self.nbytes, "evictions": self.evictions}

    def acquire(self, wanted: Held | None, capacity: int, lora: Lora | None = None, *, wait: float = 0.0) -> Arena:
        """Return an arena of at least `capacity` positions, for this caller alone until `release`; if possible, one
        that holds much of what is `wanted`. Its steps compute with the adapter `lora`.

        The caller may write into it only after `wait_readers`. An arena that is still being read where the caller will
        write is not used: another one, with a copy of the shared part, costs less than waiting for a disk. Memory that
        running requests hold is waited for, at most `wait` seconds, in the order of the calls; if all of them are
        streams of this thread, not at all. Raises PromptTooLong when `capacity` never fits under the cap, and
        Overloaded when it does not fit beside the running requests.
        """
        need = self.check(capacity)
        began, spares = time.monotonic(), True
        until = began + wait
        with self._line.place(until) if wait and self._must_queue() else nullcontext():
            while True:
                returned, had = self._returned, self.nbytes
                try:
                    arena, forgotten = self._taken(wanted, capacity, need, spares)
                    break
                except Overloaded:
                    if spares:
                        spares = False  # the device has less than the cap says
                    elif not self.evict() and not self._await_return(returned, had, until, began):
                        raise
        arena.arrivals.reads = self._reads
        arena.lora = lora
        copied = False
        try:
            self._copy_lent(arena, wanted)
            copied = True
        finally:
            with self._changed:
                self._lent[id(arena)] = Lent(arena, forgotten, threading.get_ident())
            if not copied:
                arena.seek(0)
                self.release(arena)
        return arena

    def check(self, capacity: int) -> int:
        """Return the bytes of an arena. Raises PromptTooLong if it never fits under the cap."""
        need = self._size(rounded(capacity))
        if need > self.cap:
            raise PromptTooLong(
                f"{capacity} positions of KV take {need} bytes on the device, and {self.caps.meaning}: "
                "shorten the prompt, lower max_new_tokens, or raise max_device"
            )
        return need

    def _copy_lent(self, arena: Arena, wanted: Held | None) -> None:
        """Copy what an arena in use holds of what is wanted into one that was just taken, if it is worth it."""
        if wanted is None or self.port.is_host:  # the host reads what is in RAM where it is
            return
        with self._changed:
            found = worth_copying(self._lent.values(), self._forgotten, wanted, arena)
            if found is None:
                return
            source, held = found
            source.pins.append(end := len(held.tokens))  # whoever has it writes there only after `wait_readers`
        try:
            arena.copy_lent(source, held)
        finally:
            self.unpin(source, end)

    def _taken(self, wanted: Held | None, capacity: int, need: int, spares: bool) -> tuple[Arena, int]:
        """Do what `acquire` does, without waiting for running requests. Return `_forgotten` as of the choice, too."""
        with self._changed:
            forgotten = self._forgotten
            best = max(self._idle, key=lambda arena: self._worth(arena, wanted, capacity), default=None)
            kept = best.resident(wanted) if best is not None and wanted is not None else 0
            is_read = best is not None and any(end > kept for end in best.pins)
            spared = spares and best is not None and kept < WORTH <= best.held_tokens and self._is_spared(need)
            if best is not None and best.capacity >= capacity and not is_read and not spared:
                self._idle.remove(best)
                self.evictions += bool(best.held_tokens and not kept)
                self._holders.append(threading.get_ident())
                return best, forgotten
            source = self._make_room(need, best if kept else None)
            self._holders.append(threading.get_ident())
        try:
            arena = self._made(rounded(capacity))
            if source is not None:
                arena.take_over(source, kept)
        except BaseException as error:
            with self._changed:
                self._holders.remove(threading.get_ident())
                if source is not None:
                    self._restore(source, forgotten)
                self._changed.notify_all()
            if isinstance(error, Overloaded):
                books = f"{self.lent} running requests and what is kept take {self.nbytes} bytes; {self.caps.meaning}"
                raise Overloaded(f"{error} ({books})") from error
            raise
        if source is not None:
            self._put_back(source, forgotten, keep=is_read or bool(spared))
        return arena, forgotten

    def _is_spared(self, need: int) -> bool:
        """Whether there is room for a new arena of `need` bytes, so that no idle one has to be emptied."""
        return self._kept > KEPT and len(self._idle) < self._kept and self.nbytes + need <= self.cap

    def _must_queue(self) -> bool:
        """Whether others may have a right to memory before this thread. Who has an arena himself does not queue behind
        those that wait for it."""
        with self._changed:
            return self._is_others() or (len(self._line) > 0 and not self._holders)

    def _is_others(self) -> bool:
        """Whether another thread has an arena, which it may give back."""
        with self._changed:
            return any(thread != threading.get_ident() for thread in self._holders)

    def _await_return(self, seen: int, had: int, until: float, began: float) -> bool:
        """Wait until memory came back since `_returned` was `seen`, and arenas took `had` bytes. Return False if that
        will not be, or not until this time."""

        def is_back() -> bool:
            return self._returned != seen or self.nbytes < had

        with self._changed:
            if self._is_read():
                until = max(until, began + _TIMEOUT)
            self._awaited += 1
            try:
                while not is_back() and (self._is_read() or self._is_others()) and time.monotonic() < until:
                    self._changed.wait(_POLL)  # nobody notifies of memory that is freed with its last reader
            finally:
                self._awaited -= 1
            return is_back()

    def make_way(self) -> None:
        """Raise Overloaded if a request waits for memory, to end work with an arena that no answer needs."""
        if self._awaited:
            raise Overloaded("requests wait for KV memory of the device, so idle work gives back what it has")

    def _is_read(self) -> bool:
        """Whether background readers have idle arenas, for the time of a copy."""
        return any(arena.pins for arena in self._idle)

    def wait_readers(self, arena: Arena, start: int) -> None:
        """Wait until nobody else needs positions from `start` on (one copy of KV, milliseconds). From now on nobody
        finds them."""
        with self._changed:
            arena.unhold(start)
            while any(end > start for end in arena.pins):
                self._changed.wait()

    def release(self, arena: Arena) -> None:
        """Give an arena back. The oldest idle ones beyond the kept number are freed."""
        with self._changed:
            lent = self._lent.pop(id(arena))
            self._holders.remove(lent.thread)
            if lent.forgotten != self._forgotten:
                arena.seek(0)
            arena.states.taken.clear()
            arena.lora = None
            if not arena.arrivals.lost:
                self._idle.append(arena)
            self._trim()
            self._came_back()

    def pin(self, arena: Arena, end: int) -> None:
        """Keep the arena's content below `end` for a background reader."""
        with self._changed:
            arena.pins.append(end)

    def unpin(self, arena: Arena, end: int) -> None:
        with self._changed:
            arena.pins.remove(end)
            self._trim()
            self._came_back()

    def peek(self, wanted: Held) -> int:
        """Return how many leading tokens of what is wanted an idle arena holds. Changes nothing."""
        with self._changed:
            return max((arena.resident(wanted) for arena in self._idle), default=0)

    def beside(self, wanted: Held) -> TokenIds:
        """Return the tokens of the idle arena that agrees longest with a prompt, to explain where they differ."""
        with self._changed:
            best = max(self._idle, key=lambda arena: (arena.resident(wanted), arena.held_tokens), default=None)
            return wanted.tokens[:0] if best is None else best.beside(wanted)

    def forget(self) -> None:
        """Forget the content of all arenas, of lent ones once they come back; keep their memory."""
        with self._changed:
            self._forgotten += 1
            for arena in self._idle:
                arena.seek(0)
        for port in (self.port, *self._form.others.values()):
            port.let_go()

    def close(self) -> None:
        """Free all idle arenas. A background reader keeps the memory it reads."""
        with self._changed:
            for arena in self._idle:
                if not arena.pins:
                    arena.free()
            self._idle.clear()

    def _make_room(self, need: int, source: Arena | None) -> Arena | None:
        """Take `need` bytes for a new arena. Evict idle arenas, oldest first, until they fit. Return `source`, an idle
        arena to copy from, which then belongs to the caller; None when it was evicted, too."""
        deadline = time.monotonic() + _TIMEOUT
        while self.nbytes + need > self.cap:
            free = [arena for arena in self._idle if not arena.pins]
            if free:
                victim = next((arena for arena in free if arena is not source), free[0])
                self._idle.remove(victim)
                self._give_up(victim)
                source = None if victim is source else source
            elif not self._idle or time.monotonic() > deadline:
                raise Overloaded(
                    f"{need} bytes of KV are wanted on the device, and {self.cap - self.nbytes} are free beside "
                    f"{self.lent} running requests ({self.caps.meaning}): ask again later, or raise max_device"
                )
            else:  # background readers use all idle arenas, for the time of a copy
                self._changed.wait(_POLL)
                source = source if source in self._idle else None
        self._allocated += need
        if source is not None:
            self._idle.remove(source)
        return source

    def _size(self, capacity: int) -> int:
        found = self._sizes.get(capacity)
        return found or self._sizes.setdefault(capacity, Arena.size(self.geometry, capacity))

    def _made(self, capacity: int, *, touch: bool = False) -> Arena:
        """Make a new arena. Its bytes are accounted for already."""
        try:
            arena = Arena(
                self.geometry, capacity, self.port, touch=touch, keep_encoded=self._keep_encoded, form=self._form
            )
        except BaseException:
            self._freed.append(self._size(capacity))
            raise
        for memory, nbytes in arena.memories:
            weakref.finalize(memory.owner, self._freed.append, nbytes)
        return arena

    def evict(self) -> bool:
        """Free all idle arenas that nobody reads: a running request matters more. Return False if there was none."""
        with self._changed:
            free = [arena for arena in self._idle if not arena.pins]
            for arena in free:
                self._idle.remove(arena)
                self._give_up(arena)
        for port in (self.port, *self._form.others.values()) if free else ():
            port.reclaim()
        return bool(free)

    def _came_back(self) -> None:
        self._returned += 1
        self._changed.notify_all()

    def _put_back(self, arena: Arena, taken_at: int, *, keep: bool) -> None:
        """Give back an arena that was copied. Free it, unless it is to be kept or a background reader uses it."""
        with self._changed:
            if keep or arena.pins:
                self._restore(arena, taken_at)
            else:
                arena.free()
            self._trim()
            self._came_back()

    def _restore(self, arena: Arena, taken_at: int) -> None:
        """Make an arena idle again that was taken to be copied."""
        if taken_at != self._forgotten:
            arena.seek(0)
        self._idle.append(arena)

    def _trim(self) -> None:
        """Free the oldest idle arenas beyond the kept number, except those being read."""
        for arena in self._idle[: max(0, len(self._idle) - self._kept)]:
            if not arena.pins:
                self._idle.remove(arena)
                if self._keep_encoded:  # no eviction: its content is stored, or must not be
                    arena.free()
                else:
                    self._give_up(arena)

    def _give_up(self, arena: Arena) -> None:
        self.evictions += bool(arena.held_tokens)
        arena.free()

    @staticmethod
    def _worth(arena: Arena, wanted: Held | None, capacity: int) -> tuple[int, bool, bool]:
        there = 0 if wanted is None else arena.resident(wanted)
        return there, not arena.pins, arena.capacity >= capacity
