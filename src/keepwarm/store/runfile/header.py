"""A run of blocks as bytes: one immutable file, which is also a valid safetensors file.

    8 bytes   header length, little endian
    header    JSON, padded with spaces so that the payload starts at a multiple of 4096
    payload   `tokens` U32 [n], then per layer `k.000`, `v.000`, ... U8 [kv_heads, rows, head_bytes]

A layer has a row for each token. A layer that keeps only the last tokens of each block (`kept` in its geometry) has
rows only for those.

`__metadata__` holds the format version, run id, geometry, namespace description, blocks, one XXH3-128 per layer and
block (over its keys then its values, head after head) and one over the other metadata and the token ids. The last one
keeps its place and meaning in every later version, so that a flipped version digit is not mistaken for a newer file.

In an encrypted file `tokens` is ciphertext (U8), and each layer is one tensor `sealed.000`: block after block, and in
a block the keys' heads, then the values', encrypted. The GCM tags (`store.runfile.crypto`) replace the checksums.

A reader rebuilds the header from what it parsed and compares every byte, so nothing in a file is left unchecked.

Versions: 1; 2 adds salts to blocks, and encryption; 3 rests of pages; 4 layers that keep the ends of blocks. A file has
the first version that supports its contents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from keepwarm.core.blocks import TokenIds
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.identity import canonical_json
from keepwarm.core.recent import Recent
from keepwarm.errors import CorruptRun, StoreLocked, StoreTooNew
from keepwarm.store.runfile.crypto import SALT_BYTES, TAG_BYTES, RunCipher, StoreKey
from keepwarm.store.runfile.layout import UNKNOWN_SALT, Described, Layout, Outline, StoredBlock, salts_of
from keepwarm.store.runfile.source import Source

FORMAT = 4
ALIGNMENT = 4096
CHECKSUM_BYTES = 16
_MAX_HEADER = 100_000_000  # safetensors' own limit, in bytes
_TOKEN_BYTES = 4
_DECODED = 4  # a header takes about this many times its bytes in memory


@dataclass(frozen=True, eq=False)
class RunHeader:
    """Everything that a run file says about itself, verified. `data_offset` is where its first layer starts.

    When the file is encrypted, `checksums` are GCM tags, and `cipher` decrypts it.
    """

    run_id: str
    geometry: KVGeometry
    namespace: dict[str, Any]
    tokens: TokenIds
    blocks: tuple[StoredBlock, ...]
    checksums: bytes
    data_offset: int
    file_bytes: int
    cipher: RunCipher | None = None

    @property
    def start(self) -> int:
        return self.blocks[0].start

    @property
    def parent(self) -> bytes:
        return self.blocks[0].parent

    @property
    def salts(self) -> frozenset[bytes]:
        """Tags of the salts that any of its blocks is under."""
        return salts_of(self.blocks)

    def checksum(self, layer: int, ordinal: int) -> bytes:
        """The expected `block_checksum` of one layer of one block; its tag when the file is encrypted."""
        at = (layer * len(self.blocks) + ordinal) * CHECKSUM_BYTES
        return self.checksums[at : at + CHECKSUM_BYTES]


# Headers by place, size and bytes, each with the token ids as stored. If the bytes are the same, they are verified.
KnownHeaders = Recent[tuple[int, int, bytes], tuple[RunHeader, bytes]]


@dataclass(frozen=True)
class Seal:
    """What an encrypted file's header says about its encryption."""

    key: str  # `StoreKey.id`
    salt: bytes
    tag: bytes = bytes(TAG_BYTES)  # of the token ids and the whole header


def encode_header(
    run: Outline, checksums: bytes | None = None, stored_tokens: bytes | None = None, seal: Seal | None = None
) -> bytes:
    """Return the file's first bytes, up to its payload. Without `checksums` these are zeros, and only the size is
    right.

    `stored_tokens` are the token ids as the file holds them, if they are encrypted.
    """
    if checksums is None:
        checksums = bytes(CHECKSUM_BYTES * len(run.geometry.layers) * len(run.blocks))
    if stored_tokens is None:
        stored_tokens = run.tokens.tobytes()
    meta = _meta(_version_of(run), run.id, run.geometry, run.namespace, run.blocks, checksums, seal)
    return _header_bytes(meta, Layout.of(run), stored_tokens, sealed=seal is not None)


def _version_of(run: Described) -> int:
    """The version of a run's file: the first one that supports its contents."""
    if any(layer.kept is not None for layer in run.geometry.layers):
        return 4
    return 3 if any(block.shared for block in run.blocks) else 2


def authenticated(run: Outline, checksums: bytes, seal: Seal) -> bytes:
    """The part of an encrypted file's metadata that the token ids' tag authenticates: all except that tag."""
    return _authenticated(_meta(_version_of(run), run.id, run.geometry, run.namespace, run.blocks, checksums, seal))


def file_bytes(run: Outline, *, sealed: bool = False) -> int:
    """Size of the run's file, in bytes."""
    seal = Seal(bytes(16).hex(), bytes(SALT_BYTES)) if sealed else None
    header = len(encode_header(run, seal=seal))
    return header + run.tokens.nbytes + Layout.of(run).nbytes


def read_header(
    source: Source, key: StoreKey | None = None, at: int = 0, known: KnownHeaders | None = None
) -> RunHeader:
    """Read and verify everything except the KV of a run, which takes the source from byte `at` to its end.

    `key` is the store's, if it is encrypted; all `known` headers have the same key. Raises CorruptRun for a damaged or
    inconsistent run; StoreLocked for an intact run that needs another key, or none; StoreTooNew for an intact one of a
    newer format; and OSError.
    """
    size = source.size - at
    length = int.from_bytes(source.read(8, at), "little")
    if length > min(_MAX_HEADER, size - 8) or (8 + length) % ALIGNMENT:
        raise CorruptRun(f"a header of {length} bytes in a file of {size}")
    raw = source.read(length, at + 8)
    place = at, size, raw
    again = known.get(place) if known is not None else None
    if again is not None and source.read(len(again[1]), at + 8 + length) == again[1]:
        return again[0]
    found, stored = _verified(source, raw, key, at, size)
    if known is not None:
        known.put(place, (found, stored), _DECODED * (length + len(stored)))
    return found


def _verified(source: Source, raw: bytes, key: StoreKey | None, at: int, size: int) -> tuple[RunHeader, bytes]:
    """Parse and verify a header. Return it with the token ids as they are stored. Raises what `read_header` does."""
    length = len(raw)
    try:
        header = json.loads(raw)
        meta = dict(header["__metadata__"])
        first, last = header["tokens"]["data_offsets"]
        if not 0 <= first <= last <= size - 8 - length:
            raise CorruptRun(f"token ids at [{first}, {last}) of {size - 8 - length} payload bytes")
        stored = source.read(last - first, at + 8 + length + first)
        if _header_checksum({k: v for k, v in meta.items() if k != "header_xxh3"}, stored) != meta["header_xxh3"]:
            raise CorruptRun("the header's checksum does not match")
        version = int(meta["keepwarm_format"])
        if version > FORMAT:
            raise StoreTooNew(
                f"a run has format {version}, this Keepwarm reads {FORMAT}; use the newer version or another store"
            )
        seal = _seal_of(meta)
        tokens, cipher = _open_tokens(meta, stored, seal, key)
        found = RunHeader(
            run_id=meta["run"],
            geometry=KVGeometry.from_description(json.loads(meta["geometry"])),
            namespace=json.loads(meta["namespace"]),
            tokens=np.frombuffer(tokens, "<u4"),
            blocks=tuple(StoredBlock.from_description(row) for row in json.loads(meta["blocks"])),
            checksums=bytes.fromhex(meta["checksums"]),
            data_offset=at + 8 + length + last,
            file_bytes=size,
            cipher=cipher,
        )
        written = _meta(version, found.run_id, found.geometry, found.namespace, found.blocks, found.checksums, seal)
        rebuilt = _header_bytes(written, Layout.of(found), stored, sealed=seal is not None)
        _check_consistent(found, first, at)
    except (CorruptRun, StoreTooNew, StoreLocked):
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptRun(f"the header cannot be read: {type(error).__name__}: {error}") from error
    if rebuilt[8:] != raw:
        raise CorruptRun("the header is not in the form it was written in")
    if version == 1:
        found = replace(found, blocks=tuple(replace(block, salts=(UNKNOWN_SALT,)) for block in found.blocks))
    return found, stored


def _open_tokens(
    meta: Mapping[str, str], stored: bytes, seal: Seal | None, key: StoreKey | None
) -> tuple[bytes, RunCipher | None]:
    if seal is None:
        if key is not None:
            raise StoreLocked("a run is not encrypted, and a key was given")
        return stored, None
    if key is None or key.id != seal.key:
        raise StoreLocked(f"a run is encrypted, and {'no key was given' if key is None else 'another key opens it'}")
    cipher = key.cipher(meta["run"], seal.salt)
    return cipher.open_tokens(_authenticated(meta), stored + seal.tag), cipher


def _seal_of(meta: Mapping[str, str]) -> Seal | None:
    if "cipher" not in meta:
        return None
    described = json.loads(meta["cipher"])
    return Seal(described["key"], bytes.fromhex(described["salt"]), bytes.fromhex(meta["cipher_tag"]))


def _authenticated(meta: Mapping[str, str]) -> bytes:
    return canonical_json({k: v for k, v in meta.items() if k not in ("cipher_tag", "header_xxh3")}).encode()


def _check_consistent(header: RunHeader, tokens_offset: int, at: int) -> None:
    """Raise CorruptRun unless blocks, tokens, checksums and file size are consistent."""
    for number, layer in enumerate(header.geometry.layers):
        if min(layer.kv_heads, layer.key_dim, layer.value_dim, 1 if layer.kept is None else layer.kept) < 1:
            raise CorruptRun(f"layer {number} has no KV: {layer}")
    position = header.blocks[0].start
    for ordinal, block in enumerate(header.blocks):
        if block.ordinal != ordinal or block.start != position or block.length < 1:
            raise CorruptRun(f"block {ordinal} does not continue at {position}")
        position = block.end
    if position - header.start != len(header.tokens) or tokens_offset != 0:
        raise CorruptRun(f"blocks cover {position - header.start} tokens, the run has {len(header.tokens)}")
    if len(header.checksums) != CHECKSUM_BYTES * len(header.geometry.layers) * len(header.blocks):
        raise CorruptRun("the number of checksums does not fit the blocks")
    expected = header.data_offset - at + Layout.of(header).nbytes
    if header.file_bytes != expected:
        raise CorruptRun(f"the file has {header.file_bytes} bytes, its header says {expected}")


def _meta(
    version: int,
    run_id: str,
    geometry: KVGeometry,
    namespace: Mapping[str, Any],
    blocks: Sequence[StoredBlock],
    checksums: bytes,
    seal: Seal | None,
) -> dict[str, str]:
    meta = {
        "blocks": canonical_json([block.describe() for block in blocks]),
        "checksums": checksums.hex(),
        "geometry": canonical_json(geometry.describe()),
        "keepwarm_format": str(version),
        "namespace": canonical_json(namespace),
        "run": run_id,
    }
    if seal is not None:
        meta["cipher"] = canonical_json({"key": seal.key, "name": "AES-256-GCM", "salt": seal.salt.hex()})
        meta["cipher_tag"] = seal.tag.hex()
    return meta


def _header_bytes(meta: Mapping[str, str], layout: Layout, tokens: bytes, *, sealed: bool) -> bytes:
    """Return the header's bytes. `tokens` are the token ids as they are stored."""
    base = len(tokens)
    count = base // _TOKEN_BYTES
    header: dict[str, Any] = {
        "__metadata__": {**meta, "header_xxh3": _header_checksum(meta, tokens)},
        "tokens": {"dtype": "U8" if sealed else "U32", "shape": [base if sealed else count], "data_offsets": [0, base]},
    }
    for layer in range(len(layout.geometry.layers)):
        if sealed:
            first, size = base + layout.offset(layer, 0), layout.token_bytes(layer) * layout.shape(layer, 0)[1]
            header[f"sealed.{layer:03d}"] = {"dtype": "U8", "shape": [size], "data_offsets": [first, first + size]}
            continue
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
