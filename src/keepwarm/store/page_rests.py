"""Pages that are stored in parts. When prompts differ inside a page, the second prompt's page is stored only from the
first different token on: the *rest* of the page. Its beginning lies in another block, which may be a rest itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from keepwarm.core.blocks import TOKEN_BYTES, Block, TokenIds, exact_name, lead, leading, led, token_ids
from keepwarm.core.ports import BlockRef
from keepwarm.errors import CorruptRun
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.ram.tier import RamTier
from keepwarm.store.runfile.header import RunHeader
from keepwarm.store.runfile.layout import Layout, Run, StoredBlock, new_run_id


@dataclass
class _Known:
    """What was read for one request: headers of runs on disk, and the blocks that rests stand on."""

    headers: dict[str, RunHeader] = field(default_factory=dict)
    bases: dict[bytes, BlockRef] = field(default_factory=dict)


class StoredPages:
    """Finds blocks that begin like a page, and the blocks that a rest stands on, in RAM and on disk."""

    def __init__(
        self, ram: RamTier, disk: DiskTier | None, find: Callable[[Sequence[bytes]], Mapping[bytes, BlockRef]]
    ) -> None:
        """`find` finds blocks, each in its fastest tier."""
        self._ram = ram
        self._disk = disk
        self._find = find

    def continuing(self, block: Block, key: bytes, but: bytes = b"") -> tuple[tuple[BlockRef, ...], int] | None:
        """See `core.ports.BlockIndex`. The block `but`, and rests that stand on it, are skipped."""
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
            before = self._beginning(block, page, ref, key, self._known([ref] if ref.start > block.start else []))
            if before is not None and all(each.id != but for each in (*before, ref)):
                reached = block.start + common
                return tuple(each for each in (*before, ref) if each.start < reached), common
        return None

    def beginnings(self, rests: Sequence[tuple[Block, BlockRef, bytes]]) -> list[tuple[BlockRef, ...] | None]:
        """See `core.ports.BlockIndex`."""
        known = self._known([ref for _, ref, _ in rests])
        return [self._beginning(page, page.tokens.tobytes(), ref, key, known) for page, ref, key in rests]

    def _beginning(
        self, block: Block, page: bytes, ref: BlockRef, key: bytes, known: _Known
    ) -> tuple[BlockRef, ...] | None:
        """Return the blocks that hold a page's beginning, before its rest `ref`. `page` are the page's token ids; it
        follows the parent of `block`. Every block's name is recomputed from its tokens and compared, since the
        catalogue is not trusted. None when that fails."""
        parts: list[BlockRef] = []
        while ref.start > block.start:
            record = self._record(ref, known)
            base = None if record is None else known.bases.get(record.parent)
            if base is None or not block.start <= base.start < ref.start <= base.end:
                return None
            tokens = self._tokens(base, known)
            if tokens is None:
                return None
            skipped, shared = TOKEN_BYTES * (base.start - block.start), TOKEN_BYTES * (ref.start - block.start)
            whole = page[:skipped] + tokens.tobytes()
            if whole[:shared] != page[:shared] or exact_name(block.parent_exact, whole, key) != base.id:
                return None
            parts.insert(0, base)
            ref = base
        return tuple(parts)

    def _known(self, rests: Sequence[BlockRef]) -> _Known:
        """Find the blocks that rests stand on, and so on down to whole blocks, with few queries whatever their
        number."""
        known, level = _Known(), list(rests)
        while level:
            self._read_headers(level, known)
            wanted: list[bytes] = []
            following: list[BlockRef] = []
            for ref in level:
                record = self._record(ref, known)
                if record is not None and record.shared and record.parent not in known.bases:
                    above = self._above(ref, known)
                    if above is not None and above.id == record.parent:  # in the same run, since they were merged
                        known.bases[above.id] = above
                        following.append(above)
                    else:
                        wanted.append(record.parent)
            found = self._find(list(dict.fromkeys(wanted))) if wanted else {}
            known.bases |= found
            level = [*following, *found.values()]
        return known

    def _read_headers(self, refs: Sequence[BlockRef], known: _Known) -> None:
        """Read the headers of the runs on disk. A run with a damaged header is taken out of use."""
        far = (ref for ref in refs if ref.tier == DiskTier.name and self._ram.find(ref.id, ref.start) is None)
        wanted = [run_id for run_id in dict.fromkeys(ref.run_id for ref in far) if run_id not in known.headers]
        if wanted and self._disk is not None:
            known.headers |= self._disk.headers(wanted)

    def _record(self, ref: BlockRef, known: _Known) -> StoredBlock | None:
        if (held := self._ram.find(ref.id, ref.start)) is not None:
            return held[1]
        header = known.headers.get(ref.run_id)
        blocks = () if header is None else header.blocks[ref.ordinal : ref.ordinal + 1]
        return next((block for block in blocks if block.id == ref.id), None)

    def _above(self, ref: BlockRef, known: _Known) -> BlockRef | None:
        """Return the block before this one in its run on disk."""
        header = known.headers.get(ref.run_id)
        if header is None or not ref.ordinal:
            return None
        block = header.blocks[ref.ordinal - 1]
        return BlockRef(block.id, block.prefix, ref.run_id, block.ordinal, block.start, block.length, ref.tier)

    def _tokens(self, ref: BlockRef, known: _Known) -> TokenIds | None:
        if (held := self._ram.find(ref.id, ref.start)) is not None:
            return _tokens_in(held[0], ref)
        if self._record(ref, known) is None:
            return None
        return _tokens_in(known.headers[ref.run_id], ref)

    def token_ids(self, ref: BlockRef) -> TokenIds | None:
        """The token ids of a block in RAM or on disk; None when it is gone or unreadable."""
        if (held := self._ram.find(ref.id, ref.start)) is not None:
            return _tokens_in(held[0], ref)
        return self._disk.token_ids(ref) if self._disk is not None and ref.tier == DiskTier.name else None

    def read(self, block_id: bytes) -> tuple[Run, StoredBlock] | None:
        """Read a block and the whole run that it lies in, verified; None when it is gone or damaged."""
        if (held := self._ram.find(block_id)) is not None:
            return held
        ref = None if self._disk is None else self._disk.find([block_id]).get(block_id)
        if ref is None or self._disk is None:
            return None
        try:
            run = self._disk.files.read_run(ref.run_id)
        except CorruptRun as error:
            self._disk.quarantine(ref.run_id, error)
            return None
        return next(((run, block) for block in run.blocks if block.id == block_id), None)

    def whole(self, run: Run) -> Run | None:
        """Replace a run's rests by whole pages, for a tier that does not support rests. Return the run itself when it
        has none, and None when a block that a rest stands on is gone."""
        return completed(run, self.read)


def _tokens_in(run: Run | RunHeader, ref: BlockRef) -> TokenIds:
    return run.tokens[ref.start - run.start : ref.end - run.start]


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
            while blocks and blocks[-1].start >= block.page_start:  # parts of this page, which it now contains
                above = blocks.pop()
            block = block.whole(above.parent_prefix)
        blocks.append(replace(block, ordinal=len(blocks)))
    layout = Layout(run.geometry, [block.length for block in blocks])
    whole = replace(run, id=new_run_id(), tokens=tokens, blocks=tuple(blocks), data=np.empty(layout.nbytes, np.uint8))
    for layer in range(len(run.geometry.layers)):
        for kv in (0, 1):
            views = [held.view(layer, kv, t0, t1) for held, t0, t1 in (*head, (run, 0, len(run.tokens)))]
            np.concatenate(views, axis=1, out=whole.view(layer, kv, 0, len(tokens)))
    return whole


def _pieces(
    run: Run, rest: StoredBlock, read: Callable[[bytes], tuple[Run, StoredBlock] | None]
) -> list[tuple[Run, int, int, StoredBlock]] | None:
    """Return the pieces of a page before its rest, in order: run, range of its tokens, and the block they belong to."""
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
