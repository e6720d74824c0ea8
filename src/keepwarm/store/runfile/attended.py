"""What of stored blocks a load brings: a layer that attends to a window of the last positions is not given the blocks
that end before it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from keepwarm.core.geometry import KVGeometry
from keepwarm.core.ports import KVSink
from keepwarm.store.runfile.layout import StoredBlock

Taken = Sequence[Sequence[StoredBlock]]  # per layer the last ones of consecutive blocks; none at all where it is empty


def needed_from(sink: KVSink, layer: int) -> int:
    """The first position that a layer of a sink is to be given."""
    # asked for by name: `isinstance` of a protocol looks at all of its methods, for every layer of every load
    asked: Callable[[int], int] | None = getattr(sink, "needed_from", None)
    return 0 if asked is None else asked(layer)


def attended(sink: KVSink, geometry: KVGeometry, blocks: Sequence[StoredBlock], end: int) -> Taken:
    """Those of consecutive blocks that each layer of a sink needs of a load up to `end`, which lies in the last one.
    `geometry` is the stored one. Raises ValueError when they do not keep all that is needed."""
    firsts = [needed_from(sink, layer) for layer in range(len(geometry.layers))]
    if not any(firsts) and all(layer.kept is None for layer in geometry.layers):
        return [blocks for _ in geometry.layers]
    ends = [min(block.end, end) for block in blocks]
    taken = [blocks[bisect_right(ends, first) :] for first in firsts]
    for number, (layer, found, first) in enumerate(zip(geometry.layers, taken, firsts, strict=True)):
        begins = [(layer.kept_from(block.start, block.end), block.start) for block in found]
        if any(begin > max(start, first) for begin, start in begins):
            raise ValueError(f"layer {number} does not keep all that is needed of {found[0].start} to {end}")
    return taken


def takes_all(sink: KVSink) -> bool:
    """Whether a sink is to be given every position in every layer."""
    return not any(needed_from(sink, layer) for layer in range(len(sink.geometry.layers)))
