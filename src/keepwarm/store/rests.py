"""Pages that are stored in parts. Where prompts part inside a page, what the second one needs of it is stored from the
first token that differs: the *rest* of the page. Its beginning lies in another block, which may be a rest itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from keepwarm.core.blocks import TOKEN_BYTES, Block, TokenIds, exact_name, lead, leading, led, token_ids
from keepwarm.core.ports import BlockRef
from keepwarm.errors import CorruptRun
from keepwarm.store.disk import DiskTier
from keepwarm.store.format import Layout, Run, StoredBlock, new_run_id
from keepwarm.store.memory import RamTier

SPARE = 20  # a page's beginning is stored again where that adds at most one part in so many to what is new: 5 %


class StoredPages:
    """Finds blocks that begin like a page, and what a rest stands on, in RAM and on disk."""

    def __init__(self, ram: RamTier, disk: DiskTier | None, find: Callable[[bytes], BlockRef | None]) -> None:
        """`find` finds a block in its fastest tier."""
        self._ram = ram
        self._disk = disk
        self._find = find

    def continuing(self, block: Block, key: bytes) -> tuple[tuple[BlockRef, ...], int] | None:
        """See `core.ports.BlockIndex`."""
        wanted = lead(block.tokens, block.salts)
        near = self._ram.beside(block)
        if self._disk is not None and all(found[: len(wanted)] != wanted for found, _ in near):
            near += self._disk.beside(block)
        alike = [(leading(wanted, found, block.salts), led(found, block.salts), ref) for found, ref in near]
        for common, page, ref in sorted(alike, key=lambda each: -each[0]):
            if not common:
                return None
            if exact_name(block.parent_exact, page, key) != ref.id:
                continue
            before = self._beginning(block, page, ref, key)
            if before is not None:
                reached = block.start + common
                return tuple(each for each in (*before, ref) if each.start < reached), common
        return None

    def beginning(self, block: Block, ref: BlockRef, key: bytes) -> tuple[BlockRef, ...] | None:
        """See `core.ports.BlockIndex`."""
        return self._beginning(block, block.tokens.tobytes(), ref, key)

    def _beginning(self, block: Block, page: bytes, ref: BlockRef, key: bytes) -> tuple[BlockRef, ...] | None:
        """The same for a page with other tokens, `page`, behind the same parent. Every block's name is made again from
        its tokens and compared: what stands in a catalogue is not trusted."""
        parts: list[BlockRef] = []
        while ref.start > block.start:
            base = self._base(ref)
            if base is None or not block.start <= base.start < ref.start <= base.end:
                return None
            tokens = self.token_ids(base)
            if tokens is None:
                return None
            skipped, shared = TOKEN_BYTES * (base.start - block.start), TOKEN_BYTES * (ref.start - block.start)
            whole = page[:skipped] + tokens.tobytes()
            if whole[:shared] != page[:shared] or exact_name(block.parent_exact, whole, key) != base.id:
                return None
            parts.insert(0, base)
            ref = base
        return tuple(parts)

    def _base(self, ref: BlockRef) -> BlockRef | None:
        """What a rest stands on."""
        record = self._record(ref)
        return self._find(record.parent) if record is not None and record.shared else None

    def _record(self, ref: BlockRef) -> StoredBlock | None:
        if (held := self._ram.find(ref.id)) is not None:
            return held[1]
        if self._disk is None or ref.tier != DiskTier.name:
            return None
        try:
            blocks = self._disk.header(ref.run_id).blocks
        except CorruptRun:
            return None
        return next((block for block in blocks[ref.ordinal : ref.ordinal + 1] if block.id == ref.id), None)

    def token_ids(self, ref: BlockRef) -> TokenIds | None:
        """Of a block that one of both tiers holds; None when it is gone or unreadable."""
        if (held := self._ram.find(ref.id)) is not None:
            run, block = held
            return run.tokens[block.start - run.start : block.end - run.start]
        return self._disk.token_ids(ref) if self._disk is not None and ref.tier == DiskTier.name else None

    def read(self, block_id: bytes) -> tuple[Run, StoredBlock] | None:
        """A block and the whole run that it lies in, verified; None when it is gone or damaged."""
        if (held := self._ram.find(block_id)) is not None:
            return held
        ref = None if self._disk is None else self._disk.find([block_id]).get(block_id)
        if ref is None or self._disk is None:
            return None
        try:
            run = self._disk.read_run(ref.run_id)
        except CorruptRun as error:
            self._disk.quarantine(ref.run_id, error)
            return None
        return next(((run, block) for block in run.blocks if block.id == block_id), None)

    def whole(self, run: Run) -> Run | None:
        """A run with whole pages where it has rests, for a tier that knows none; itself when it has none. None when
        what a rest stands on is gone."""
        return completed(run, self.read)


def completed(run: Run, read: Callable[[bytes], tuple[Run, StoredBlock] | None]) -> Run | None:
    """See `StoredPages.whole`; `read` reads a block and the run that it lies in."""
    if not any(block.shared for block in run.blocks):
        return run
    first = run.blocks[0]
    pieces = _pieces(run, first, read) if first.shared else []
    if pieces is None:
        return None
    head = [(held, t0, t1) for held, t0, t1, _ in pieces]
    tokens = np.concatenate([token_ids(np.frombuffer(first.shared, "<u4")), run.tokens])
    blocks: list[StoredBlock] = []
    for block in run.blocks:
        if block.shared:
            above = pieces[0][3] if block is first else blocks[-1]
            while blocks and blocks[-1].start >= block.page_start:  # parts of the same page, which are in it now
                above = blocks.pop()
            t0 = block.page_start - first.page_start
            block = block.whole(tokens[t0 : block.end - first.page_start], above.parent_prefix)
        blocks.append(replace(block, ordinal=len(blocks)))
    layout = Layout(run.geometry, len(tokens))
    whole = replace(run, id=new_run_id(), tokens=tokens, blocks=tuple(blocks), data=np.empty(layout.nbytes, np.uint8))
    for layer in range(len(run.geometry.layers)):
        for kv in (0, 1):
            views = [held.view(layer, kv, t0, t1) for held, t0, t1 in (*head, (run, 0, len(run.tokens)))]
            np.concatenate(views, axis=1, out=whole.view(layer, kv, 0, len(tokens)))
    return whole


def _pieces(
    run: Run, rest: StoredBlock, read: Callable[[bytes], tuple[Run, StoredBlock] | None]
) -> list[tuple[Run, int, int, StoredBlock]] | None:
    """What a page has before its rest, in order: runs, tokens of theirs, and the blocks that they are part of."""
    pieces: list[tuple[Run, int, int, StoredBlock]] = []
    end = rest.start
    parent = rest.parent
    while end > rest.page_start:
        found = read(parent)
        if found is None:
            return None
        held, block = found
        fits = rest.page_start <= block.start < end <= block.end and block.behind == rest.behind
        if not fits or held.geometry.form != run.geometry.form:
            return None
        pieces.insert(0, (held, block.start - held.start, end - held.start, block))
        end, parent = block.start, block.parent
    return pieces
