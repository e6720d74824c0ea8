"""Gives the KV of a run in memory to a sink."""

from __future__ import annotations

from collections.abc import Sequence

from keepwarm.core.ports import Bytes, KVSink, WholeSink
from keepwarm.store.runfile.attended import attended
from keepwarm.store.runfile.layout import Run, StoredBlock


def give(run: Run, blocks: Sequence[StoredBlock], end: int, sink: KVSink) -> None:
    """Give consecutive blocks of a run up to a position, which lies in the last one, and commit every layer."""
    whole = sink if isinstance(sink, WholeSink) else None
    rows = None if whole is None else _together(run, blocks, end)
    if whole is not None and rows is not None and whole.fill_all(blocks[0].start, rows):
        return
    for layer, taken in enumerate(attended(sink, run.geometry, blocks, end)):
        if not taken:
            continue
        begin = run.layout.begin(layer, taken[0])
        for kv in (0, 1):
            sink.fill(layer, kv, begin, run.rows(layer, kv, taken)[:, : end - begin])
        sink.commit(layer, begin, end)


def _together(run: Run, blocks: Sequence[StoredBlock], end: int) -> Bytes | None:
    """Return the rows of all layers `[layers, 2, heads, rows, head_bytes]`, no copy; None if layers are not alike, or
    keep only some tokens."""
    layers = run.geometry.layers
    if not layers or layers[0].kept is not None or layers.count(layers[0]) < len(layers):
        return None
    keys, values = run.layout.shape(0, 0), run.layout.shape(0, 1)
    if keys != values:
        return None
    first = blocks[0].start - run.start
    return run.data.reshape(len(layers), 2, *keys)[:, :, :, first : end - run.start]
