"""What of stored blocks a load brings: a layer that attends to a window of the last positions is not given the blocks
that end before it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from keepwarm.core.geometry import KVGeometry
from keepwarm.core.ports import KVSink, WindowedSink
from keepwarm.store.runfile.layout import StoredBlock

Taken = Sequence[Sequence[StoredBlock]]  # per layer the last ones of consecutive blocks; none at all where it is empty


def needed_from(sink: KVSink, layer: int) -> int:
    """The first position that a layer of a sink is to be given."""
    return sink.needed_from(layer) if isinstance(sink, WindowedSink) else 0


def attended(sink: KVSink, geometry: KVGeometry, blocks: Sequence[StoredBlock], end: int) -> Taken:
    """Those of consecutive blocks that each layer of a sink needs of a load up to `end`, which lies in the last one.
    `geometry` is the stored one. Raises ValueError when they do not keep all that is needed."""
    if not isinstance(sink, WindowedSink) and all(layer.kept is None for layer in geometry.layers):
        return [blocks for _ in geometry.layers]
    ends = [min(block.end, end) for block in blocks]
    taken = [blocks[bisect_right(ends, needed_from(sink, layer)) :] for layer in range(len(geometry.layers))]
    for number, (layer, found) in enumerate(zip(geometry.layers, taken, strict=True)):
        begins = [(layer.kept_from(block.start, block.end), block.start) for block in found]
        if any(begin > max(start, needed_from(sink, number)) for begin, start in begins):
            raise ValueError(f"layer {number} does not keep all that is needed of {found[0].start} to {end}")
    return taken


def takes_all(sink: KVSink) -> bool:
    """Whether a sink is to be given every position in every layer."""
    return not any(needed_from(sink, layer) for layer in range(len(sink.geometry.layers)))
