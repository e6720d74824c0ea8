"""KV on its way from disk into an arena: each layer is waited for when it is first used."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from keepwarm.core.reads import Arriving, Reads
from keepwarm.errors import StoreStalled
from keepwarm.runtime.arena.layer import ArenaLayer
from keepwarm.runtime.native.reads import CachedReads, Taking
from keepwarm.runtime.waiting import Waiting


class Arrivals:
    """The loads under way of one arena."""

    def __init__(self, layers: Sequence[ArenaLayer], waiting: Waiting) -> None:
        self.reads: CachedReads | None = None  # the quickest way to read what the system has in memory
        self.lost = False  # a read that nobody waits for may still write into the arena, and always will be able to
        self._layers, self._waiting = layers, waiting
        self._loads: list[Arriving] = []
        self._joined: Reads  # of the step under way

    def __bool__(self) -> bool:
        return bool(self._loads)

    def add(self, load: Arriving) -> None:
        """One more load, of any layer of which `wait` is to be called before it is used."""
        self._loads.append(load)

    def wait(self, layer: int) -> None:
        """Return when a layer is in place, verified. Raises CorruptRun; `cut` has to be called then.

        A model may use its layers in another order than that in which they come (index keys before keys and values):
        those before it are waited for, too.
        """
        before = [number for number in range(layer) if self._layers[number].arrive is not None]
        for number in (*before, layer):
            self._wait(number)
        if layer == len(self._layers) - 1:
            self._done()

    def _wait(self, layer: int) -> None:
        try:
            with self._waiting.counted(self._layers[layer].plane(0).port):
                for load in self._loads:
                    load.ready(layer, self.reads)
                self._layers[layer].turn()
        except StoreStalled:
            self.lost = True
            raise
        self._layers[layer].arrive = None

    def taking(self) -> Taking | None:
        """All that is on its way, for the threads of a step to bring; None when they cannot."""
        reads = [found for load in self._loads if (found := load.reads()) is not None]
        if self.reads is None or len(reads) < len(self._loads):
            return None
        self._joined = Reads.joined(reads)
        return self.reads.taking(self._joined)

    def passed(self, layer: int) -> None:
        """A step's threads have brought everything before this layer, and not this one."""
        self._waiting.add(int(self._joined.spent[0]) / 1e9 / torch.get_num_threads())
        for load in self._loads:
            load.passed(layer)
        for each in self._layers[:layer]:
            each.arrive = None
        if layer == len(self._layers):
            self._done()

    def cut(self, length: int) -> None:
        """Abandon the loads that reach behind a position."""
        for load in [each for each in self._loads if each.end > length]:
            self._loads.remove(load)
            try:
                load.close()
            except StoreStalled:
                self.lost = True
        if not self._loads:
            self._done()

    def _done(self) -> None:
        self._loads.clear()
        for layer in self._layers:
            layer.arrive = None
