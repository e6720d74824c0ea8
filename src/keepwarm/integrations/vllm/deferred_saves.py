"""Saves from a device: pages are copied while the next steps are computed, and fenced where they change owners.

A step's pages are copied from the beginning of the next step on, after the sampled tokens, and behind the step that
computed them. Until then they belong to their request: vLLM keeps the pages of one that ended until its saves are
reported, and of preempted ones it tells before others write to them (`fence`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from keepwarm.errors import Overloaded
from keepwarm.integrations.vllm.device_pages import DevicePages, PinnedStaged
from keepwarm.integrations.vllm.messages import Save
from keepwarm.runtime.device import Event

log = logging.getLogger(__name__)

MOST = 4 << 30  # bytes of pinned memory that saves hold until the store has copied them; more is not saved

Put = Callable[[Save, PinnedStaged, float], None]  # the last is the seconds that queueing took


class DeferredSaves:
    """The saves of one worker. Used by the model's thread alone."""

    def __init__(self, memory: DevicePages, put: Put, *, at_once: bool) -> None:
        """`put` hands a save to the store, whose bytes are in host memory once the staging memory is `ready`. With
        `at_once` nothing is put off, and all that is computed next waits for the copies."""
        self._memory = memory
        self._put = put
        self._at_once = at_once
        self._waiting: list[tuple[Save, Event]] = []
        self._copying: dict[str, list[Event]] = {}
        self._last: set[str] = set()
        self._staged: list[PinnedStaged] = []  # what the store may not have copied yet

    def defer(self, saves: Iterable[Save]) -> None:
        """Note the saves of the step whose work was queued last."""
        found = list(saves)
        if found:
            computed = self._memory.port.current().record()
            self._waiting += [(save, computed) for save in found]
        if self._at_once:
            self.issue()
            self.fence(self._copying)

    def issue(self) -> None:
        """Queue the copies of what was noted."""
        waiting, self._waiting = self._waiting, []
        for save, computed in waiting:
            if save.start < len(save.prefix.tokens):
                try:
                    self._issue(save, computed)
                except Exception as error:  # requests must not fail because of this
                    log.warning("saving %d tokens failed: %s", len(save.prefix.tokens) - save.start, error)
            if save.last:
                self._last.add(save.prefix.request_id)

    def _issue(self, save: Save, computed: Event) -> None:
        started = time.perf_counter()
        memory, prefix = self._memory, save.prefix
        staged = self._stage(len(prefix.tokens) - save.start)
        try:
            event = memory.fetch(staged, prefix.pages[save.start // memory.page_size :], computed)
        except BaseException:
            staged.release()
            raise
        self._copying.setdefault(prefix.request_id, []).append(event)
        try:
            self._put(save, staged, time.perf_counter() - started)
        except BaseException:
            staged.release()
            raise

    def _stage(self, tokens: int) -> PinnedStaged:
        self._staged = [staged for staged in self._staged if not staged.is_released]
        held = sum(staged.nbytes for staged in self._staged)
        if held and held + tokens * self._memory.geometry.bytes_per_token > MOST:
            raise Overloaded(f"the store has not yet copied the {held} bytes of earlier saves")
        self._staged.append(self._memory.stage(tokens))
        return self._staged[-1]

    def fence(self, request_ids: Iterable[str]) -> None:
        """Let all that is computed from now on wait for the copies of these requests, whose pages go to others."""
        current = self._memory.port.current()
        for request_id in request_ids:
            for event in self._copying.get(request_id, ()):
                current.wait(event)

    def take_finished(self) -> set[str]:
        """Return, once, the ended requests whose pages are copied."""
        for request_id, events in list(self._copying.items()):
            self._copying[request_id] = [event for event in events if not event.is_past()]
            if not self._copying[request_id]:
                del self._copying[request_id]
        waiting = {save.prefix.request_id for save, _ in self._waiting}
        finished = {name for name in self._last if name not in self._copying and name not in waiting}
        self._last -= finished
        return finished
