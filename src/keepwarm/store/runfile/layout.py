"""Runs: consecutive blocks stored together, and the layout of their bytes. `store.runfile.header`: the file format."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import xxhash

from keepwarm.core.blocks import TOKEN_BYTES, Block, TokenIds, lead, token_ids
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.ports import Bytes, KVSink, KVSource, OpenSink, WholeSource
from keepwarm.errors import CorruptRun

NEIGHBOURS = 3  # blocks to check on either side of a block's place: derived ones may have the tokens of an exact one
UNKNOWN_SALT = b""  # tag of blocks from files of a version that did not record salts


@dataclass(frozen=True)
class StoredBlock:
    """One block inside a run. `id` is its exact name, or its derived one; `parent` is the id of the block before.

    A *rest* holds its page only from the first token on that no other stored block had there. `start` and `length` are
    those of the rest, but `content` is the page's. `parent` is the block that holds the `shared` tokens at the page's
    beginning, or the last of them. `page_parent` is the id of the block before the page.
    """

    ordinal: int
    start: int  # position in the prompt
    length: int  # tokens
    id: bytes
    prefix: bytes
    content: bytes
    parent: bytes
    parent_prefix: bytes
    salts: tuple[bytes, ...] = ()  # tags of the salts it is under
    page_parent: bytes = b""
    shared: bytes = b""  # token ids, uint32

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def page_start(self) -> int:
        """Position where its page begins."""
        return self.start - len(self.shared) // TOKEN_BYTES

    @property
    def behind(self) -> bytes:
        """Id of the block before its page."""
        return self.page_parent or self.parent

    def from_token(self, skip: int, tokens: TokenIds, parent: bytes, parent_prefix: bytes) -> StoredBlock:
        """Return the rest of this block after its first `skip` tokens, which lie in the block `parent`. `tokens` are
        this block's token ids."""
        return replace(
            self,
            start=self.start + skip,
            length=self.length - skip,
            parent=parent,
            parent_prefix=parent_prefix,
            page_parent=self.parent,
            shared=tokens[:skip].tobytes(),
        )

    def whole(self, parent_prefix: bytes) -> StoredBlock:
        """Return the block of a rest's whole page; `parent_prefix` is the prefix name before it."""
        return replace(
            self,
            start=self.page_start,
            length=self.end - self.page_start,
            parent=self.behind,
            parent_prefix=parent_prefix,
            page_parent=b"",
            shared=b"",
        )

    def describe(self) -> dict[str, Any]:
        """A JSON-ready form with names in hex."""
        described: dict[str, Any] = {
            "ordinal": self.ordinal,
            "start": self.start,
            "length": self.length,
            "exact": self.id.hex(),
            "prefix": self.prefix.hex(),
            "content": self.content.hex(),
            "parent_exact": self.parent.hex(),
            "parent_prefix": self.parent_prefix.hex(),
        }
        if self.salts:
            described["salts"] = [tag.hex() for tag in self.salts]
        if self.shared:
            described |= {"page_parent": self.page_parent.hex(), "shared": self.shared.hex()}
        return described

    @classmethod
    def from_description(cls, row: Mapping[str, Any]) -> StoredBlock:
        return cls(
            ordinal=row["ordinal"],
            start=row["start"],
            length=row["length"],
            id=bytes.fromhex(row["exact"]),
            prefix=bytes.fromhex(row["prefix"]),
            content=bytes.fromhex(row["content"]),
            parent=bytes.fromhex(row["parent_exact"]),
            parent_prefix=bytes.fromhex(row["parent_prefix"]),
            salts=tuple(bytes.fromhex(tag) for tag in row.get("salts", ())),
            page_parent=bytes.fromhex(row.get("page_parent", "")),
            shared=bytes.fromhex(row.get("shared", "")),
        )


def stored_blocks(
    blocks: Sequence[Block], ids: Sequence[bytes] | None = None, parent: bytes | None = None
) -> tuple[StoredBlock, ...]:
    """Return the records of consecutive blocks. `ids` replaces their exact names (derived blocks). Every block's parent
    is then the id before it; the first block's is `parent`, or its exact parent when None.

    Raises ValueError when the blocks are not consecutive, or `ids` has another length.
    """
    names = [block.exact for block in blocks] if ids is None else list(ids)
    if len(names) != len(blocks):
        raise ValueError(f"{len(names)} ids for {len(blocks)} blocks")
    records: list[StoredBlock] = []
    for ordinal, (block, name) in enumerate(zip(blocks, names, strict=True)):
        if ordinal and block.start != blocks[ordinal - 1].end:
            raise ValueError(f"block at {block.start} does not continue at {blocks[ordinal - 1].end}")
        above = names[ordinal - 1] if ordinal else (block.parent_exact if parent is None else parent)
        records.append(
            StoredBlock(
                ordinal,
                block.start,
                block.length,
                name,
                block.prefix,
                block.content,
                above,
                block.parent_prefix,
                block.salts,
            )
        )
    return tuple(records)


class Layout:
    """Byte offsets of a run's KV, in the order layer, K/V, head, row, dim. A row belongs to one token. A block's rows
    follow those of the block before. A layer whose blocks keep only their last tokens has fewer rows than tokens."""

    def __init__(self, geometry: KVGeometry, lengths: Sequence[int]) -> None:
        """`lengths` are the lengths of the blocks, in tokens."""
        self.geometry = geometry
        self._bounds = {
            kept: [0, *accumulate(lengths if kept is None else (min(length, kept) for length in lengths))]
            for kept in {layer.kept for layer in geometry.layers}
        }
        self._offsets: list[int] = [0]
        for layer in range(len(geometry.layers)):
            for kv in (0, 1):
                self._offsets.append(self._offsets[-1] + math.prod(self.shape(layer, kv)))

    @classmethod
    def of(cls, run: Described) -> Layout:
        """Return the layout of a run."""
        return cls(run.geometry, [block.length for block in run.blocks])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors but `tokens`."""
        return self._offsets[-1]

    def offset(self, layer: int, kv: int) -> int:
        """First byte of a tensor, counted from the first byte of `k.000`."""
        return self._offsets[2 * layer + kv]

    def shape(self, layer: int, kv: int) -> tuple[int, int, int]:
        """`[kv_heads, rows, head_bytes]`."""
        shape = self.geometry.layers[layer]
        return shape.kv_heads, self._bounds[shape.kept][-1], self.geometry.head_bytes(layer, kv)

    def token_bytes(self, layer: int) -> int:
        """Bytes of one token in one layer: all heads' keys and values."""
        heads = self.geometry.layers[layer].kv_heads
        return heads * (self.geometry.head_bytes(layer, 0) + self.geometry.head_bytes(layer, 1))

    def rows(self, layer: int, blocks: Sequence[StoredBlock]) -> tuple[int, int]:
        """Return the first row of consecutive blocks of the run, and the one after their last."""
        bounds = self._bounds[self.geometry.layers[layer].kept]
        return (bounds[blocks[0].ordinal], bounds[blocks[-1].ordinal + 1]) if blocks else (0, 0)

    def each(self, layer: int, blocks: Sequence[StoredBlock]) -> Iterator[tuple[StoredBlock, int, int]]:
        """Yield each of consecutive blocks with its first row and the one after its last, counted from the first
        block's first row."""
        bounds = self._bounds[self.geometry.layers[layer].kept]
        begin = bounds[blocks[0].ordinal] if blocks else 0
        for block in blocks:
            yield block, bounds[block.ordinal] - begin, bounds[block.ordinal + 1] - begin

    def begin(self, layer: int, block: StoredBlock) -> int:
        """The position of a block's first row."""
        return self.geometry.layers[layer].kept_from(block.start, block.end)


class Described(Protocol):
    """What the catalogue stores about a run. `Run` and `RunHeader` both provide it."""

    @property
    def geometry(self) -> KVGeometry: ...

    @property
    def namespace(self) -> Mapping[str, Any]: ...

    @property
    def tokens(self) -> TokenIds: ...

    @property
    def blocks(self) -> tuple[StoredBlock, ...]: ...

    @property
    def salts(self) -> frozenset[bytes]: ...


class Outline(Described, Protocol):
    """A run without its KV."""

    @property
    def id(self) -> str: ...


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive blocks in memory. `data` is 1-D uint8 in exactly the order of the file's KV tensors."""

    id: str
    geometry: KVGeometry
    namespace: Mapping[str, Any]  # `core.identity.Namespace.describe()`
    tokens: TokenIds
    blocks: tuple[StoredBlock, ...]
    data: Bytes

    @property
    def start(self) -> int:
        return self.blocks[0].start

    @property
    def end(self) -> int:
        return self.blocks[-1].end

    @property
    def parent(self) -> bytes:
        """Id of the block before the first one."""
        return self.blocks[0].parent

    @property
    def nbytes(self) -> int:
        """Bytes of KV and token ids."""
        return self.data.nbytes + self.tokens.nbytes

    @property
    def salts(self) -> frozenset[bytes]:
        """Tags of the salts that any of its blocks is under."""
        return salts_of(self.blocks)

    def layers(self) -> Iterator[tuple[Bytes, Bytes]]:
        """Keys and values of each layer, `[heads, rows, head_bytes]`; no copies."""
        for layer in range(len(self.geometry.layers)):
            yield self.rows(layer, 0, self.blocks), self.rows(layer, 1, self.blocks)

    @cached_property
    def layout(self) -> Layout:
        """The layout of its bytes."""
        return Layout.of(self)

    def rows(self, layer: int, kv: int, blocks: Sequence[StoredBlock]) -> Bytes:
        """Bytes `[heads, rows, head_bytes]` of consecutive blocks of this run; no copy."""
        shape = self.layout.shape(layer, kv)
        at, (first, last) = self.layout.offset(layer, kv), self.layout.rows(layer, blocks)
        return self.data[at : at + math.prod(shape)].reshape(shape)[:, first:last]

    def view(self, layer: int, kv: int, t0: int, t1: int) -> Bytes:
        """Bytes `[heads, t1 - t0, head_bytes]` of the tokens `[t0, t1)`, counted from the run's start; no copy. Only
        for layers that keep every token."""
        assert self.geometry.layers[layer].kept is None
        return self.rows(layer, kv, self.blocks)[:, t0:t1]

    def part(self, first: int, last: int) -> Run:
        """Copy the blocks `[first, last)` into a run of their own, under a new id."""
        blocks = self.blocks[first:last]
        planes = (self.rows(layer, kv, blocks) for layer in range(len(self.geometry.layers)) for kv in (0, 1))
        return replace(
            self,
            id=new_run_id(),
            tokens=self.tokens[blocks[0].start - self.start : blocks[-1].end - self.start],
            blocks=tuple(replace(block, ordinal=at) for at, block in enumerate(blocks)),
            data=np.concatenate([np.empty(0, np.uint8), *(plane.reshape(-1) for plane in planes)]),
        )

    @classmethod
    def copy_from(
        cls, source: KVSource, blocks: Sequence[StoredBlock], tokens: TokenIds, namespace: Mapping[str, Any]
    ) -> Run:
        """Copy the KV of `blocks` (whose token ids are `tokens`) from a source into a run with a new id. Of a windowed
        layer, only the tokens that the blocks keep are copied.

        Raises ValueError when the source returns another shape than its geometry says.
        """
        geometry = source.geometry.stored
        first = blocks[0].ordinal
        records = tuple(replace(block, ordinal=block.ordinal - first) for block in blocks)
        run = cls(
            id=new_run_id(),
            geometry=geometry,
            namespace=dict(namespace),
            tokens=token_ids(tokens).copy(),
            blocks=records,
            data=np.empty(Layout(geometry, [block.length for block in records]).nbytes, np.uint8),
        )
        if isinstance(source, WholeSource) and source.copy_to(run.data, run.start, run.end):
            return run
        for layer, shape in enumerate(geometry.layers):
            whole = [(run.start, run.end)]
            kept = whole if shape.kept is None else [(shape.kept_from(b.start, b.end), b.end) for b in records]
            for kv in (0, 1):
                _copy(source, layer, kv, kept, run.rows(layer, kv, records))
        return run


def _copy(source: KVSource, layer: int, kv: int, spans: Sequence[tuple[int, int]], target: Bytes) -> None:
    """Copy spans of positions, one after another, into `[heads, rows, head_bytes]`."""
    at = 0
    for start, end in spans:
        part = target[:, at : at + end - start]
        found = source.read(layer, kv, start, end)
        if found.shape != part.shape:
            raise ValueError(f"layer {layer}: source gave {found.shape}, geometry says {part.shape}")
        np.copyto(part, found)
        at += end - start


def lead_of(block: StoredBlock, tokens: TokenIds) -> bytes:
    """See `core.blocks.lead`; `tokens` are the ids that the block holds."""
    return lead(tokens, block.salts, block.shared)


def salts_of(blocks: Iterable[Block | StoredBlock]) -> frozenset[bytes]:
    """Tags of the salts that any of the blocks is under."""
    return frozenset(tag for block in blocks for tag in block.salts)


def check_geometry(found: KVGeometry, expected: KVGeometry) -> None:
    """Raise CorruptRun unless the `found` KV has the form of the model's. Names and checksums do not ensure that."""
    if found.form == expected.form:
        return
    (seen, theirs), (wanted, ours) = found.form, expected.form
    first = next((n for n, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours)))
    shapes = [f"{form[first]} in layer {first}" if first < len(form) else "no more" for form in (theirs, ours)]
    raise CorruptRun(
        f"its KV has {len(theirs)} layers of {seen} (heads, key and value widths: {shapes[0]}), the model's "
        f"{len(ours)} of {wanted} ({shapes[1]})"
    )


def check_sink(found: KVGeometry, sink: KVSink) -> None:
    """Raise CorruptRun unless a sink takes KV of the `found` geometry."""
    if isinstance(sink, OpenSink):
        sink.take_form(found)
    else:
        check_geometry(found, sink.geometry)


def new_run_id() -> str:
    """Return 32 hex digits that are never used twice, so that unlinking a file late can never hit a newer file."""
    return uuid.uuid4().hex


def block_checksum(keys: Bytes, values: Bytes) -> bytes:
    """XXH3-128 over one block of one layer: keys then values, each `[heads, n, head_bytes]`, head after head."""
    hasher = xxhash.xxh3_128()
    for part in (keys, values):
        if part.flags.c_contiguous:
            hasher.update(part.data)
            continue
        for head in part:
            hasher.update(memoryview(head) if head.flags.c_contiguous else head.tobytes())
    return hasher.digest()
