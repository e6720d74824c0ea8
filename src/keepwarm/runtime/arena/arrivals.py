"""KV arriving from disk in an arena. Each layer is waited for when it is first used."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from keepwarm.core.reads import Arriving, Reads
from keepwarm.errors import StoreStalled
from keepwarm.runtime.arena.layer import ArenaLayer
from keepwarm.runtime.native.reads import CachedReads, Taking
from keepwarm.runtime.waiting import Waiting


class Arrivals:
    """The loads under way into one arena."""

    def __init__(self, layers: Sequence[ArenaLayer], waiting: Waiting) -> None:
        self.reads: CachedReads | None = None  # the fastest way to read what the system has in memory
        self.lost = False  # True: an abandoned read may still write into the arena at any time
        self._layers, self._waiting = layers, waiting
        self._loads: list[Arriving] = []
        self._joined: Reads  # of the step under way

    def __bool__(self) -> bool:
        return bool(self._loads)

    def add(self, load: Arriving) -> None:
        """Add a load. Call `wait` before any of its layers is used."""
        self._loads.append(load)

    def wait(self, layer: int) -> None:
        """Wait until a layer is in place and verified. Raises CorruptRun; call `cut` then.

        A model may use its layers in another order than that of arrival (index keys before keys and values). So this
        waits for the layers before it, too.
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
        """Return all loads under way, for a step's threads to read; None when they cannot."""
        reads = [found for load in self._loads if (found := load.reads()) is not None]
        if self.reads is None or len(reads) < len(self._loads):
            return None
        self._joined = Reads.joined(reads)
        return self.reads.taking(self._joined)

    def passed(self, layer: int) -> None:
        """Note that a step's threads have read all layers before this one, but not this one."""
        self._waiting.add(int(self._joined.spent[0]) / 1e9 / torch.get_num_threads())
        for load in self._loads:
            load.passed(layer)
        for each in self._layers[:layer]:
            each.arrive = None
        if layer == len(self._layers):
            self._done()

    def cut(self, length: int) -> None:
        """Abandon the loads that extend beyond a position."""
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
