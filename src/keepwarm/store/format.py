"""A run of blocks as bytes: one immutable file, which is also a valid safetensors file.

    8 bytes   header length, little endian
    header    JSON, padded with spaces so that the payload starts at a multiple of 4096
    payload   `tokens` U32 [n], then per layer `k.000`, `v.000`, ... U8 [kv_heads, n, head_bytes]

`__metadata__` holds the format version, run id, geometry, namespace description, blocks, one XXH3-128 per layer and
block (over its keys then its values, head after head) and one over the other metadata and the token ids. The last one
keeps its place and meaning in every later version, so that a flipped version digit is told from a newer file.

A reader rebuilds the header from what it parsed and compares every byte, so nothing in a file is left unchecked.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from keepwarm.core.blocks import Block, TokenIds, token_ids
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.identity import canonical_json
from keepwarm.core.ports import Bytes, KVSource
from keepwarm.errors import CorruptRun, StoreTooNew

FORMAT = 1
ALIGNMENT = 4096
CHECKSUM_BYTES = 16
_MAX_HEADER = 100_000_000  # safetensors' own limit, in bytes
_TOKEN_BYTES = 4


@dataclass(frozen=True)
class StoredBlock:
    """One block inside a run. `id` is its exact name, or its derived one; `parent` is the id of the block before."""

    ordinal: int
    start: int  # position in the prompt
    length: int  # tokens
    id: bytes
    prefix: bytes
    content: bytes
    parent: bytes
    parent_prefix: bytes

    @property
    def end(self) -> int:
        return self.start + self.length

    def describe(self) -> dict[str, Any]:
        """A JSON-ready form with names in hex."""
        return {
            "ordinal": self.ordinal,
            "start": self.start,
            "length": self.length,
            "exact": self.id.hex(),
            "prefix": self.prefix.hex(),
            "content": self.content.hex(),
            "parent_exact": self.parent.hex(),
            "parent_prefix": self.parent_prefix.hex(),
        }

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
        )


def stored_blocks(
    blocks: Sequence[Block], ids: Sequence[bytes] | None = None, parent: bytes | None = None
) -> tuple[StoredBlock, ...]:
    """Records of consecutive blocks. `ids` replaces their exact names (derived blocks); every block's parent is then
    the id before it, and the first one's is `parent`, or its exact parent when None.

    Raises ValueError when blocks are not consecutive or `ids` does not fit them.
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
                ordinal, block.start, block.length, name, block.prefix, block.content, above, block.parent_prefix
            )
        )
    return tuple(records)


class Layout:
    """Byte offsets of a run's KV: layer, K/V, head, token, dim."""

    def __init__(self, geometry: KVGeometry, tokens: int) -> None:
        self.geometry = geometry
        self.tokens = tokens
        self._offsets: list[int] = [0]
        for layer, shape in enumerate(geometry.layers):
            for kv in (0, 1):
                size = shape.kv_heads * tokens * geometry.head_bytes(layer, kv)
                self._offsets.append(self._offsets[-1] + size)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors but `tokens`."""
        return self._offsets[-1]

    def offset(self, layer: int, kv: int) -> int:
        """First byte of a tensor, counted from the first byte of `k.000`."""
        return self._offsets[2 * layer + kv]

    def shape(self, layer: int, kv: int) -> tuple[int, int, int]:
        """`[kv_heads, tokens, head_bytes]`."""
        return self.geometry.layers[layer].kv_heads, self.tokens, self.geometry.head_bytes(layer, kv)


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

    @cached_property
    def _layout(self) -> Layout:
        return Layout(self.geometry, len(self.tokens))

    def view(self, layer: int, kv: int, t0: int, t1: int) -> Bytes:
        """Bytes `[heads, t1 - t0, head_bytes]` of the tokens `[t0, t1)`, counted from the run's start; no copy."""
        shape = self._layout.shape(layer, kv)
        first = self._layout.offset(layer, kv)
        return self.data[first : first + shape[0] * shape[1] * shape[2]].reshape(shape)[:, t0:t1]

    @classmethod
    def copy_from(
        cls, source: KVSource, blocks: Sequence[StoredBlock], tokens: TokenIds, namespace: Mapping[str, Any]
    ) -> Run:
        """Copy the KV of `blocks` (whose token ids are `tokens`) out of a source, under a new run id.

        Raises ValueError when the source returns another shape than its geometry says.
        """
        geometry = source.geometry
        first = blocks[0].ordinal
        records = tuple(
            StoredBlock(b.ordinal - first, b.start, b.length, b.id, b.prefix, b.content, b.parent, b.parent_prefix)
            for b in blocks
        )
        run = cls(
            id=new_run_id(),
            geometry=geometry,
            namespace=dict(namespace),
            tokens=token_ids(tokens).copy(),
            blocks=records,
            data=np.empty(Layout(geometry, len(tokens)).nbytes, np.uint8),
        )
        for layer in range(len(geometry.layers)):
            for kv in (0, 1):
                target = run.view(layer, kv, 0, len(tokens))
                found = source.read(layer, kv, run.start, run.end)
                if found.shape != target.shape:
                    raise ValueError(f"layer {layer}: source gave {found.shape}, geometry says {target.shape}")
                np.copyto(target, found)
        return run


def new_run_id() -> str:
    """32 hex digits, never used twice: a file name that is unlinked late can then never hit a newer file."""
    return uuid.uuid4().hex


def block_checksum(keys: Bytes, values: Bytes) -> bytes:
    """XXH3-128 over one block of one layer: keys then values, each `[heads, n, head_bytes]`, head after head."""
    hasher = xxhash.xxh3_128()
    for part in (keys, values):
        for head in part:
            hasher.update(memoryview(head) if head.flags.c_contiguous else head.tobytes())
    return hasher.digest()


def checksums_of(run: Run) -> bytes:
    """All checksums of a run, 16 bytes each, layer by layer and block by block."""
    parts: list[bytes] = []
    for layer in range(len(run.geometry.layers)):
        keys, values = (run.view(layer, kv, 0, len(run.tokens)) for kv in (0, 1))
        for block in run.blocks:
            t0, t1 = block.start - run.start, block.end - run.start
            parts.append(block_checksum(keys[:, t0:t1], values[:, t0:t1]))
    return b"".join(parts)


@dataclass(frozen=True, eq=False)
class RunHeader:
    """Everything a run file says about itself, verified; `data_offset` is where `k.000` starts in the file."""

    run_id: str
    geometry: KVGeometry
    namespace: dict[str, Any]
    tokens: TokenIds
    blocks: tuple[StoredBlock, ...]
    checksums: bytes
    data_offset: int
    file_bytes: int

    @property
    def start(self) -> int:
        return self.blocks[0].start

    @property
    def parent(self) -> bytes:
        return self.blocks[0].parent

    def checksum(self, layer: int, ordinal: int) -> bytes:
        """What `block_checksum` must give for one layer of one block."""
        at = (layer * len(self.blocks) + ordinal) * CHECKSUM_BYTES
        return self.checksums[at : at + CHECKSUM_BYTES]


def encode_header(run: Run, checksums: bytes | None = None) -> bytes:
    """The file's first bytes, up to its payload. Without `checksums` they are zero: of the right size, to plan with."""
    if checksums is None:
        checksums = bytes(CHECKSUM_BYTES * len(run.geometry.layers) * len(run.blocks))
    return _header_bytes(run.id, run.geometry, run.namespace, run.blocks, run.tokens, checksums)


def file_bytes(run: Run) -> int:
    """Size of the run's file, in bytes."""
    return len(encode_header(run)) + run.nbytes


def read_header(fd: int) -> RunHeader:
    """Read and verify everything but the KV.

    Raises CorruptRun for anything that does not fit, StoreTooNew for an intact file of a newer format, and OSError.
    """
    size = os.fstat(fd).st_size
    length = int.from_bytes(_exactly(fd, 8, 0), "little")
    if length > min(_MAX_HEADER, size - 8) or (8 + length) % ALIGNMENT:
        raise CorruptRun(f"a header of {length} bytes in a file of {size}")
    raw = _exactly(fd, length, 8)
    try:
        header = json.loads(raw)
        meta = dict(header["__metadata__"])
        first, last = header["tokens"]["data_offsets"]
        if not 0 <= first <= last <= size - 8 - length:
            raise CorruptRun(f"token ids at [{first}, {last}) of {size - 8 - length} payload bytes")
        ids = _exactly(fd, last - first, 8 + length + first)
        expected = meta.pop("header_xxh3")
        if _header_checksum(meta, ids) != expected:
            raise CorruptRun("the header's checksum does not match")
        version = int(meta["keepwarm_format"])
        if version > FORMAT:
            raise StoreTooNew(
                f"a run has format {version}, this Keepwarm reads {FORMAT}; use the newer version or another store"
            )
        tokens = np.frombuffer(ids, "<u4")
        found = RunHeader(
            run_id=meta["run"],
            geometry=KVGeometry.from_description(json.loads(meta["geometry"])),
            namespace=json.loads(meta["namespace"]),
            tokens=tokens,
            blocks=tuple(StoredBlock.from_description(row) for row in json.loads(meta["blocks"])),
            checksums=bytes.fromhex(meta["checksums"]),
            data_offset=8 + length + last,
            file_bytes=size,
        )
        rebuilt = _header_bytes(found.run_id, found.geometry, found.namespace, found.blocks, tokens, found.checksums)
        _check_consistent(found, first)
    except (CorruptRun, StoreTooNew):
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptRun(f"the header cannot be read: {type(error).__name__}: {error}") from error
    if rebuilt[8:] != raw:
        raise CorruptRun("the header is not in the form it was written in")
    return found


def _check_consistent(header: RunHeader, tokens_offset: int) -> None:
    """Raise CorruptRun unless blocks, tokens, checksums and file size fit each other."""
    position = header.blocks[0].start
    for ordinal, block in enumerate(header.blocks):
        if block.ordinal != ordinal or block.start != position or block.length < 1:
            raise CorruptRun(f"block {ordinal} does not continue at {position}")
        position = block.end
    if position - header.start != len(header.tokens) or tokens_offset != 0:
        raise CorruptRun(f"blocks cover {position - header.start} tokens, the run has {len(header.tokens)}")
    if len(header.checksums) != CHECKSUM_BYTES * len(header.geometry.layers) * len(header.blocks):
        raise CorruptRun("the number of checksums does not fit the blocks")
    expected = header.data_offset + Layout(header.geometry, len(header.tokens)).nbytes
    if header.file_bytes != expected:
        raise CorruptRun(f"the file has {header.file_bytes} bytes, its header says {expected}")


def _header_bytes(
    run_id: str,
    geometry: KVGeometry,
    namespace: Mapping[str, Any],
    blocks: Sequence[StoredBlock],
    tokens: TokenIds,
    checksums: bytes,
) -> bytes:
    meta = {
        "blocks": canonical_json([block.describe() for block in blocks]),
        "checksums": checksums.hex(),
        "geometry": canonical_json(geometry.describe()),
        "keepwarm_format": str(FORMAT),
        "namespace": canonical_json(namespace),
        "run": run_id,
    }
    meta["header_xxh3"] = _header_checksum(meta, tokens.tobytes())
    count = len(tokens)
    base = count * _TOKEN_BYTES
    header: dict[str, Any] = {
        "__metadata__": meta,
        "tokens": {"dtype": "U32", "shape": [count], "data_offsets": [0, base]},
    }
    layout = Layout(geometry, count)
    for layer in range(len(geometry.layers)):
        for kv, letter in enumerate("kv"):
            shape = layout.shape(layer, kv)
            first = base + layout.offset(layer, kv)
            header[f"{letter}.{layer:03d}"] = {
                "dtype": "U8",
                "shape": list(shape),
                "data_offsets": [first, first + shape[0] * shape[1] * shape[2]],
            }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _header_checksum(meta: Mapping[str, Any], tokens: bytes) -> str:
    hasher = xxhash.xxh3_128(canonical_json(dict(meta)).encode())
    hasher.update(tokens)
    return hasher.hexdigest()


def _exactly(fd: int, count: int, offset: int) -> bytes:
    """`count` bytes at `offset`. Raises CorruptRun when the file ends before."""
    parts: list[bytes] = []
    while count:
        part = os.pread(fd, count, offset)
        if not part:
            raise CorruptRun(f"the file ends at {offset}, {count} bytes short")
        parts.append(part)
        offset += len(part)
        count -= len(part)
    return b"".join(parts)
