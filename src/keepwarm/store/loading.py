"""Load stored blocks into a sink, each from the tier where it is now, and load runs from disk into RAM."""

from __future__ import annotations

import logging
import sqlite3
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from keepwarm.core.blocks import TokenIds
from keepwarm.core.ports import BlockRef, KVSink
from keepwarm.errors import CorruptRun
from keepwarm.store.admin.purge_epochs import Epochs
from keepwarm.store.catalog.rows import RunRow
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.health import Health
from keepwarm.store.ram.tier import RamTier
from keepwarm.store.remote.tier import RemoteTier
from keepwarm.store.remote.tiers import Remotes
from keepwarm.store.runfile.codec import Coding
from keepwarm.store.runfile.layout import Run

log = logging.getLogger(__name__)


@dataclass
class _Piece:
    """Consecutive blocks of one run that a load takes. `run` is set when it comes from RAM."""

    run_id: str
    run: Run | None
    tier: str
    first: int  # ordinal
    refs: list[BlockRef]


class Loading:
    """Loads for an archive, in the threads of its callers; `promote` and `bring` run in the writer's."""

    def __init__(
        self,
        ram: RamTier,
        disk: DiskTier | None,
        health: Health,
        remotes: Remotes,
        epochs: Epochs,
        coding: Coding | None = None,
    ) -> None:
        self._epochs = epochs
        self._coding = coding
        self._ram = ram
        self._disk = disk
        self._health = health
        self._remotes = remotes

    def load(self, refs: Sequence[BlockRef], tokens: TokenIds, end: int, sink: KVSink) -> dict[str, int]:
        """See `Archive.load`."""
        _check_range(refs, tokens, end)
        start = refs[0].start
        taken: Counter[str] = Counter()
        pieces = self._pieces(refs)
        for piece in pieces:
            first, last = piece.refs[0].start, min(piece.refs[-1].end, end)
            expected = tokens[first - start : last - start]
            if piece.run is not None:
                self._load_ram(piece, expected, last, sink)
            elif (remote := self._remotes.tier(piece.tier)) is not None:
                _load_remote(remote, piece, expected, last, sink)
            else:
                assert self._disk is not None
                self._disk.load(piece.run_id, piece.first, [ref.id for ref in piece.refs], expected, last, sink)
            taken[piece.tier] += last - first
        if self._disk is not None:
            # In reverse order: so the run at the prompt's start is the most recently used, and is evicted last.
            self._disk.touch(piece.run_id for piece in reversed(pieces) if piece.tier not in self._remotes.names)
        return dict(taken)

    def promote(self, run_ids: Sequence[str]) -> None:
        """See `Archive.promote`. Runs that cannot be read or do not fit stay where they are."""
        assert self._disk is not None
        try:
            rows = [row for run_id in run_ids if (row := self._disk.index.run(run_id)) is not None]
            for row in sorted(rows, key=lambda row: row.start):
                self._bring(row, 0)
        except sqlite3.Error as error:
            self._health.failed("promoting a run", error)

    def bring(self, block_id: bytes, beside: int) -> None:
        """Load into RAM the run that holds a block on disk, and those it continues, if `beside` more bytes then fit."""
        if self._disk is None or self._ram.find(block_id) is not None:
            return
        try:
            if (row := self._row(block_id)) is not None:
                self._bring(row, beside)
        except sqlite3.Error as error:
            self._health.failed("promoting a run", error)

    def _bring(self, row: RunRow, beside: int) -> None:
        """Load a run into RAM, after those that it continues: RAM takes no run without them."""
        assert self._disk is not None
        epoch = self._epochs.now()  # runs that are purged from now on are refused
        missing = [row]
        while missing[-1].start and self._ram.find(missing[-1].parent) is None:
            if (above := self._row(missing[-1].parent)) is None:
                return
            missing.append(above)
        missing = [each for each in reversed(missing) if self._ram.get(each.id) is None]
        # Make room first, so that the cap holds while the bytes arrive.
        if not missing or not self._ram.make_room(sum(each.nbytes for each in missing) + beside, missing[0].parent):
            return
        for each in missing:
            try:
                run, kept = self._disk.files.read_run(each.id), self._disk.index.retention(each.id)
                self._ram.put(run, kept, partial(self._epochs.allows, epoch, run.salts))
            except CorruptRun as error:
                self._disk.quarantine(each.id, error)
                return

    def _row(self, block_id: bytes) -> RunRow | None:
        assert self._disk is not None
        ref = self._disk.find([block_id]).get(block_id)
        return None if ref is None else self._disk.index.run(ref.run_id)

    def _pieces(self, refs: Sequence[BlockRef]) -> list[_Piece]:
        """Group refs by run, where each block is now: it may have entered or left RAM since it was looked up."""
        below = (DiskTier.name, *self._remotes.names)
        lost = [ref.id for ref in refs if ref.tier not in below and self._ram.find(ref.id, ref.start) is None]
        moved = self._disk.find(lost) if lost and self._disk is not None else {}
        pieces: list[_Piece] = []
        for ref in refs:
            held = self._ram.find(ref.id, ref.start)
            run: Run | None = None
            tier = DiskTier.name
            if held is not None:
                run, run_id, ordinal, tier = held[0], held[0].id, held[1].ordinal, RamTier.name
            elif ref.tier in below:
                run_id, ordinal, tier = ref.run_id, ref.ordinal, ref.tier
            elif ref.id in moved and moved[ref.id].start == ref.start:
                run_id, ordinal = moved[ref.id].run_id, moved[ref.id].ordinal
            else:
                raise CorruptRun(f"run {ref.run_id}: evicted since it was looked up")
            last = pieces[-1] if pieces else None
            if last is not None and (last.run_id, last.tier, last.first + len(last.refs)) == (run_id, tier, ordinal):
                last.refs.append(ref)
            else:
                pieces.append(_Piece(run_id, run, tier, ordinal, [ref]))
        return pieces

    def _load_ram(self, piece: _Piece, tokens: TokenIds, end: int, sink: KVSink) -> None:
        assert piece.run is not None
        run, last = piece.run, piece.first + len(piece.refs) - 1
        try:
            if self._coding is not None and not run.geometry.is_state:
                sink = self._coding.sink(sink, run.geometry, run.blocks[piece.first : last + 1], end)
                whole = run.blocks[last].end  # a block is decoded as a whole
                tokens = np.concatenate([tokens, run.tokens[end - run.start : whole - run.start]])
                end = whole
            self._ram.load(run, piece.first, last, tokens, end, sink)
        except CorruptRun as error:
            self._ram.remove(piece.run_id)
            self._health.count("corrupt")
            log.warning("%s; dropped from RAM", error)
            raise


def _load_remote(tier: RemoteTier, piece: _Piece, tokens: TokenIds, end: int, sink: KVSink) -> None:
    try:
        tier.load(piece.run_id, piece.first, [ref.id for ref in piece.refs], tokens, end, sink)
    except CorruptRun as error:
        tier.quarantine(piece.run_id, error)
        raise


def _check_range(refs: Sequence[BlockRef], tokens: TokenIds, end: int) -> None:
    if not refs or any(a.end != b.start for a, b in pairwise(refs)):
        raise ValueError("a load needs consecutive blocks")
    if not refs[-1].start < end <= refs[-1].end:
        raise ValueError(f"position {end} is not in the last block, [{refs[-1].start}, {refs[-1].end})")
    if len(tokens) != end - refs[0].start:
        raise ValueError(f"{len(tokens)} token ids for positions [{refs[0].start}, {end})")
