"""Layers on a device, for a step that reads and writes them by address."""

from __future__ import annotations

from collections.abc import Sequence

from keepwarm.runtime.arena.layer import ArenaLayer
from keepwarm.runtime.device import DevicePort, Stream
from keepwarm.runtime.native.reads import Taking


class InTurn:
    """Brings each layer to its device, and orders the further work of the thread that made this after that and after
    all who used the layer before."""

    def __init__(self, layers: Sequence[ArenaLayer]) -> None:
        self._layers = layers
        self._streams: dict[DevicePort, Stream] = {}  # the thread's own; torch takes long to tell it for each layer

    def arrive(self, layer: int) -> None:
        """Wait for a layer that is still arriving, and queue the copies that were put off. Raises what
        `Arena.arrive` raises."""
        each = self._layers[layer]
        each.materialize()
        port = each.plane(0).port
        if port not in self._streams:
            self._streams[port] = port.current()
        each.turn(self._streams[port])

    def taking(self) -> Taking | None:
        """Return None: threads of the host do not read into a device's memory."""
        return None

    def passed(self, layer: int) -> None:
        """Do nothing: no threads read."""
