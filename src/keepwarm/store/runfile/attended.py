"""Which stored blocks a load reads for each layer. A layer that attends only to a window of the last positions does not
get the blocks that end before it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from keepwarm.core.geometry import KVGeometry
from keepwarm.core.ports import KVSink
from keepwarm.store.runfile.layout import StoredBlock

Taken = Sequence[Sequence[StoredBlock]]  # per layer, the last ones of consecutive blocks; may be empty


def needed_from(sink: KVSink, layer: int) -> int:
    """Return the first position that a layer of a sink needs."""
    # `getattr`, since `isinstance` with a protocol would check all of its methods, for every layer of every load.
    asked: Callable[[int], int] | None = getattr(sink, "needed_from", None)
    return 0 if asked is None else asked(layer)


def attended(sink: KVSink, geometry: KVGeometry, blocks: Sequence[StoredBlock], end: int) -> Taken:
    """Return the blocks that each layer of a sink needs from a load up to `end`, which lies in the last block. The
    blocks are consecutive; `geometry` is the stored one. Raises ValueError when they do not keep all that is needed."""
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
    """Whether a sink needs every position in every layer."""
    return not any(needed_from(sink, layer) for layer in range(len(sink.geometry.layers)))
