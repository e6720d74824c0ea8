"""Make fewer, larger files. A conversation adds a small run at every turn, and a run may hold blocks that another one
serves.

*A chain of small runs* is merged into one. On the way from its last run towards the beginning, a run belongs to the
chain when nothing else continues it and it is not much larger than all that follows it. So every byte is copied a
logarithmic number of times in a conversation's life, not once a turn. *A mostly dead run* is rewritten without its dead
tokens: at least half of its tokens are served by other runs (two processes stored overlapping prompts at once).

Only free space and half of the day's bytes are used, and nothing is evicted. The new file is complete and durable
before the catalogue names it, and the old ones are unlinked after that. So nothing is lost if the process is killed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from keepwarm.core.blocks import TokenIds
from keepwarm.core.identity import same_origin
from keepwarm.core.ports import Bytes
from keepwarm.errors import CorruptRun, StoreFull, StoreLocked, StoreTooNew
from keepwarm.store.catalog.rows import BudgetSpent, Orphan, RunRow
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.runfile.layout import Layout, StoredBlock, new_run_id
from keepwarm.store.runfile.new_run import NewRun
from keepwarm.store.runfile.reader import RunReader

FEWEST = 4  # runs in a chain worth merging
SMALL = 1 << 20  # bytes; runs below it join a chain whatever follows them
LARGEST = 256 << 20  # bytes of a merged run; for larger ones, the cost of seeking is negligible


@dataclass(frozen=True, eq=False)
class _Part:
    """The blocks of a run that are still served from it."""

    row: RunRow
    reader: RunReader
    blocks: tuple[StoredBlock, ...]

    @property
    def tokens(self) -> TokenIds:
        header = self.reader.header
        return header.tokens[self.blocks[0].start - header.start : self.blocks[-1].end - header.start]


class Compaction:
    """Merges run files of a disk tier. One thread at a time."""

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk

    def around(self, run_id: str) -> int:
        """Merge the chain of small runs that ends with a run, or rewrite the run if it is mostly dead. Return how many
        files became one; 0 when there is nothing to do or no room for it. Raises sqlite3.Error and OSError."""
        rows = self._disk.index.small_chain(run_id, SMALL, LARGEST)
        if len(rows) >= FEWEST or (rows and self._disk.index.mostly_dead(run_id)):
            return self._merge(rows if len(rows) >= FEWEST else rows[-1:])
        return 0

    def everything(self) -> int:
        """Merge every chain of the store, as `around` does. Return how many files were replaced."""
        return sum(self.around(run_id) for run_id in self._disk.index.chain_ends())

    def _merge(self, rows: Sequence[RunRow]) -> int:
        files = self._disk.files
        with ExitStack() as stack:
            parts: list[_Part] = []
            for row in rows:
                try:
                    reader = stack.enter_context(RunReader.open(files.path(row.id), row.id, files.key))
                except FileNotFoundError:  # another process evicted it meanwhile
                    return 0
                except (CorruptRun, StoreTooNew, StoreLocked) as error:
                    self._disk.quarantine(row.id, CorruptRun(f"run {row.id}: {error}"))
                    return 0
                live = set(self._disk.index.block_ids(row.id))
                blocks = tuple(block for block in reader.header.blocks if block.id in live)
                if not blocks:
                    return 0
                parts.append(_Part(row, reader, blocks))
            merged = _outline(parts)
            if merged is None:
                return 0
            try:
                done = self._disk.put_merged(merged, _layers(parts), rows)
            except (StoreFull, Orphan, BudgetSpent):
                return 0
            except _Damaged as error:
                self._disk.quarantine(error.run_id, CorruptRun(f"run {error.run_id}: {error}"))
                return 0
            return len(rows) if done else 0


class _Damaged(Exception):
    def __init__(self, run_id: str, error: CorruptRun) -> None:
        super().__init__(str(error))
        self.run_id = run_id


def _outline(parts: Sequence[_Part]) -> NewRun | None:
    """Return all parts as one run; None when they do not belong together."""
    first = parts[0].reader.header
    position = parts[0].blocks[0].start
    blocks: list[StoredBlock] = []
    for part in parts:
        header = part.reader.header
        if header.geometry != first.geometry or not same_origin(header.namespace, first.namespace):
            return None
        for block in part.blocks:
            if block.start != position or (blocks and block.parent != blocks[-1].id):
                return None
            blocks.append(replace(block, ordinal=len(blocks)))
            position = block.end
    tokens = np.concatenate([part.tokens for part in parts])
    return NewRun(new_run_id(), first.geometry, first.namespace, tokens, tuple(blocks))


def _layers(parts: Sequence[_Part]) -> Iterator[tuple[Bytes, Bytes]]:
    """Yield keys and values of all parts, layer by layer, verified as they are read. Raises _Damaged."""
    geometry = parts[0].reader.header.geometry
    layout = Layout(geometry, [block.length for part in parts for block in part.blocks])
    for layer in range(len(geometry.layers)):
        keys, values = (np.empty(layout.shape(layer, kv), np.uint8) for kv in (0, 1))
        at = 0
        for part in parts:
            first, last = part.reader.layout.rows(layer, part.blocks)
            end = at + last - first
            try:
                part.reader.load_layer(layer, part.blocks, part.blocks[-1].end, keys[:, at:end], values[:, at:end])
            except CorruptRun as error:
                raise _Damaged(part.row.id, error) from error
            at = end
        yield keys, values
