"""What of stored blocks a load brings: a layer that attends to a window of the last positions is not given the blocks
that end before it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from keepwarm.core.ports import KVSink, WindowedSink
from keepwarm.store.runfile.layout import StoredBlock

Taken = Sequence[Sequence[StoredBlock]]  # per layer the last ones of consecutive blocks; none at all where it is empty


def needed_from(sink: KVSink, layer: int) -> int:
    """The first position that a layer of a sink is to be given."""
    return sink.needed_from(layer) if isinstance(sink, WindowedSink) else 0


def attended(sink: KVSink, blocks: Sequence[StoredBlock], end: int) -> Taken:
    """Those of consecutive blocks that each layer of a sink needs of a load up to `end`, which lies in the last one."""
    layers = range(len(sink.geometry.layers))
    if not isinstance(sink, WindowedSink):
        return [blocks for _ in layers]
    ends = [min(block.end, end) for block in blocks]
    return [blocks[bisect_right(ends, sink.needed_from(layer)) :] for layer in layers]


def takes_all(sink: KVSink) -> bool:
    """Whether a sink is to be given every position in every layer."""
    return not any(needed_from(sink, layer) for layer in range(len(sink.geometry.layers)))
