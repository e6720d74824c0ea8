"""Bundles: one stored prompt, from its first block to its last, as one file for another machine.

    8 bytes   header length, little endian
    header    JSON, padded with spaces so that the payload starts at a multiple of 4096
    payload   `run` U8 [n]: a run file (`store.header`), never encrypted

So a bundle is a valid safetensors file around another. `__metadata__` holds the bundle's version, the prompt's names,
a note where there is one (such as the tool set that the prompt is of; version 2), the run file's SHA-256, a signature
(Ed25519, over all other metadata) or nothing in its place, and a checksum like a run's.

A bundle says for which model, and under which arithmetic, its KV was computed, and its blocks' names follow from that
and from the token ids. Both are checked on import, so an imported prompt is only ever found by an engine of the same
model; one of another arithmetic finds it by its `prefix` names alone. See docs/decisions/0012-bundles.md.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from keepwarm.core.blocks import TokenIds, chain, derived_id
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.identity import (
    ArithmeticIdentity,
    ModelIdentity,
    Namespace,
    canonical_json,
    differences,
    json_text,
    same_origin,
)
from keepwarm.core.ports import Bytes
from keepwarm.errors import BundleError, CorruptRun, StoreTooNew
from keepwarm.store import signing
from keepwarm.store.coding import common_geometry, widen_rows
from keepwarm.store.disk import DiskTier
from keepwarm.store.format import UNKNOWN_SALT, Layout, StoredBlock, new_run_id, salts_of
from keepwarm.store.header import ALIGNMENT, file_bytes, read_header
from keepwarm.store.reading import RunReader
from keepwarm.store.reserving import BudgetSpent, Orphan
from keepwarm.store.source import FileSource
from keepwarm.store.writing import write_run

VERSION = 2
_PLAIN = 1  # version of a bundle without a note
_MAX_HEADER = 1 << 20
_SHA256 = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Prompt:
    """Blocks of one prompt that become one run: a `format.Outline`."""

    id: str
    geometry: KVGeometry
    namespace: Mapping[str, Any]
    tokens: TokenIds
    blocks: tuple[StoredBlock, ...]

    @property
    def salts(self) -> frozenset[bytes]:
        return salts_of(self.blocks)


@dataclass(frozen=True)
class Exported:
    """What a bundle holds."""

    names: tuple[str, ...]
    tokens: int
    blocks: int
    nbytes: int  # of the file
    signed: bool


@dataclass(frozen=True)
class Imported:
    """What became of a bundle."""

    names: tuple[str, ...]
    tokens: int
    blocks: int
    new_blocks: int  # the others were stored already
    signed: bool
    namespace: Mapping[str, Any]
    note: Mapping[str, Any]


def export_bundle(
    disk: DiskTier,
    leaf: bytes,
    names: Sequence[str],
    file: Path,
    sign_key: Path | None = None,
    note: Mapping[str, Any] | None = None,
) -> Exported:
    """Write the prompt that ends with block `leaf` into a new bundle. The KV of one layer at a time is in memory.

    `note` is plain JSON that travels along, for whoever imports the prompt to read. `sign_key` is an Ed25519 private
    key in PEM. Raises BundleError, ConfigError for a bad key, CorruptRun for a damaged run, OSError and sqlite3.Error.
    `file` appears whole or not at all.
    """
    key = None if sign_key is None else signing.private_key(sign_key)
    with ExitStack() as stack:
        parts = _chain(disk, leaf, stack)
        prompt = _joined(parts)
        _check_names(prompt)
        note = note or {}
        meta = _meta(names, bytes(_SHA256), bytes(0 if key is None else signing.SIGNATURE_BYTES), note)
        size = file_bytes(prompt)
        header = _header(meta, size)
        if len(header) > _MAX_HEADER:
            raise BundleError(f"names and note take {len(header)} bytes; a bundle has room for {_MAX_HEADER}")
        temporary = file.with_name(f".{file.name}.{new_run_id()[:8]}.tmp")
        try:
            with open(temporary, "xb") as out:
                write_run(out.fileno(), prompt, _layers(parts, prompt), at=len(header))
                meta = _meta(names, _sha256(temporary, len(header)), b"", note)
                if key is not None:
                    meta = _meta(names, bytes.fromhex(meta["run_sha256"]), signing.sign(key, _signed(meta)), note)
                os.pwrite(out.fileno(), _header(meta, size), 0)
                os.fsync(out.fileno())
            temporary.rename(file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return Exported(tuple(names), len(prompt.tokens), len(prompt.blocks), len(header) + size, key is not None)


def import_bundle(
    disk: DiskTier, file: Path, *, verify_key: Path | None = None, model: Mapping[str, Any] | None = None
) -> Imported:
    """Store a bundle's prompt and its names; a name in use is moved. Nothing is published before all of it is verified.

    With `verify_key` (an Ed25519 public key in PEM) a bundle must be signed by its counterpart. With `model` (a
    described model identity) it must be of that model. Raises BundleError, ConfigError for a bad key, StoreTooNew,
    StoreFull, OSError and sqlite3.Error.
    """
    key = None if verify_key is None else signing.public_key(verify_key)
    with _opened(file) as (fd, meta, at):
        if key is not None and not signing.verify(key, _signed(meta), bytes.fromhex(meta["signature"])):
            seen = "by another key, or changed since" if meta["signature"] else "by nobody"
            raise BundleError(f"{file} is signed {seen}; expected a signature by the counterpart of {verify_key}")
        try:
            reader = RunReader(fd, read_header(FileSource(fd), at=at))
        except CorruptRun as error:
            raise _damaged(file, error) from error
        header = reader.header
        prompt = Prompt(header.run_id, header.geometry, header.namespace, header.tokens, header.blocks)
        _check_names(prompt)
        _check_model(file, header.namespace, model)
        stored = disk.index.find([block.id for block in prompt.blocks])
        missing = [block.ordinal for block in prompt.blocks if block.id not in stored]
        if missing:
            try:
                disk.store(_part(prompt, missing[0], missing[-1] + 1), _verified(reader, at, meta, missing))
            except CorruptRun as error:
                raise _damaged(file, error) from error
            except (Orphan, BudgetSpent) as error:
                why = (
                    "the stored beginning of its prompt was just given up" if isinstance(error, Orphan) else str(error)
                )
                raise BundleError(f"{file} cannot be imported now: {why}; try again later") from error
        names = tuple(json.loads(meta["names"]))
        for name in names:
            disk.index.set_name(name, prompt.blocks[-1].id)
        return Imported(
            names,
            len(prompt.tokens),
            len(prompt.blocks),
            len(missing),
            bool(meta["signature"]),
            prompt.namespace,
            json.loads(meta.get("note", "{}")),
        )


def _chain(disk: DiskTier, leaf: bytes, stack: ExitStack) -> list[tuple[RunReader, tuple[StoredBlock, ...]]]:
    """Open runs, with the blocks of each that lead to `leaf`, from the prompt's start."""
    parts: list[tuple[RunReader, tuple[StoredBlock, ...]]] = []
    wanted = leaf
    while True:
        ref = disk.index.find([wanted]).get(wanted)
        if ref is None:
            raise BundleError("a part of the prompt is not stored any more; warm it again, then export it")
        try:
            reader = stack.enter_context(RunReader.open(disk.path(ref.run_id), ref.run_id, disk.key))
        except CorruptRun as error:
            raise CorruptRun(f"run {ref.run_id}: {error}; `keepwarm verify --repair` takes it out of use") from error
        blocks = reader.header.blocks[: ref.ordinal + 1]
        if blocks[-1].id != wanted:
            raise CorruptRun(f"run {ref.run_id}: the file holds other blocks")
        parts.append((reader, blocks))
        if blocks[0].start == 0:
            return parts[::-1]
        wanted = blocks[0].parent


def _joined(parts: Sequence[tuple[RunReader, tuple[StoredBlock, ...]]]) -> Prompt:
    first = parts[0][0].header
    geometry = common_geometry([reader.header.geometry for reader, _ in parts])
    for reader, _ in parts:
        if geometry is None or not same_origin(reader.header.namespace, first.namespace):
            raise BundleError(
                "parts of this prompt were computed under different arithmetics (another torch, device or thread "
                "count), so it has no one origin that a bundle could name; warm it anew in an empty store, then export"
            )
    assert geometry is not None
    blocks = [block for _, found in parts for block in found]
    tokens = [reader.header.tokens[: found[-1].end - reader.header.start] for reader, found in parts]
    return Prompt(
        id=new_run_id(),
        geometry=geometry,
        namespace=first.namespace,
        tokens=np.concatenate(tokens),
        # Blocks of a version that did not record salts: their names will tell.
        blocks=tuple(
            replace(block, ordinal=ordinal, salts=tuple(tag for tag in block.salts if tag != UNKNOWN_SALT))
            for ordinal, block in enumerate(blocks)
        ),
    )


def _layers(
    parts: Sequence[tuple[RunReader, tuple[StoredBlock, ...]]], prompt: Prompt
) -> Iterator[tuple[Bytes, Bytes]]:
    """Keys and values of each layer of the whole prompt, verified."""
    layout = Layout(prompt.geometry, len(prompt.tokens))
    for layer in range(len(prompt.geometry.layers)):
        keys, values = (np.empty(layout.shape(layer, kv), np.uint8) for kv in (0, 1))
        for reader, blocks in parts:
            t0, t1 = blocks[0].start, blocks[-1].end
            own = reader.header.geometry
            if own == prompt.geometry:
                reader.load_layer(layer, blocks, t1, keys[:, t0:t1], values[:, t0:t1])
                continue
            heads = own.layers[layer].kv_heads
            found = [np.empty((heads, t1 - t0, own.head_bytes(layer, kv)), np.uint8) for kv in (0, 1)]
            reader.load_layer(layer, blocks, t1, *found)
            for rows, target in zip(found, (keys, values), strict=True):
                widen_rows(rows, target[:, t0:t1], blocks)
        yield keys, values


def _verified(
    reader: RunReader, at: int, meta: Mapping[str, str], missing: Sequence[int]
) -> Iterator[tuple[Bytes, Bytes]]:
    """Keys and values of the blocks `missing[0]..missing[-1]`, layer by layer. Every block's checksum is compared, and
    before the last layer is handed out the whole file's digest."""
    header = reader.header
    digest = hashlib.sha256(FileSource(reader.fd).read(header.data_offset - at, at))
    layout = Layout(header.geometry, len(header.tokens))
    t0, t1 = header.blocks[missing[0]].start, header.blocks[missing[-1]].end
    count = len(header.geometry.layers)
    for layer in range(count):
        keys, values = (np.empty(layout.shape(layer, kv), np.uint8) for kv in (0, 1))
        reader.load_layer(layer, header.blocks, header.blocks[-1].end, keys, values)
        digest.update(keys.data)
        digest.update(values.data)
        if layer == count - 1 and digest.hexdigest() != meta["run_sha256"]:
            raise CorruptRun("its SHA-256 is another one than its header says")
        yield keys[:, t0:t1], values[:, t0:t1]


def _part(prompt: Prompt, first: int, last: int) -> Prompt:
    """The blocks `[first, last)` as a run of their own, under a new id."""
    blocks = prompt.blocks[first:last]
    return replace(
        prompt,
        id=new_run_id(),
        tokens=prompt.tokens[blocks[0].start : blocks[-1].end],
        blocks=tuple(replace(block, ordinal=ordinal) for ordinal, block in enumerate(blocks)),
    )


def _check_names(prompt: Prompt) -> None:
    """Raise BundleError unless every block's names follow from the token ids and the identity, from position 0 on."""
    if prompt.salts:
        raise BundleError("the prompt is under a salt: it is one tenant's own, and is not carried elsewhere")
    try:
        space = Namespace(
            ModelIdentity(**prompt.namespace["model"]), ArithmeticIdentity(**prompt.namespace["arithmetic"])
        )
    except (KeyError, TypeError) as error:
        raise BundleError(
            f"the identity it was computed under cannot be read here ({error}); use its version"
        ) from error
    if prompt.blocks[0].start:
        raise BundleError(f"the first block starts at {prompt.blocks[0].start}, not at 0")
    parent = space.exact_root
    for found, wanted in zip(prompt.blocks, chain(prompt.tokens, [b.end for b in prompt.blocks], space), strict=True):
        names = (found.prefix, found.content, found.parent_prefix, found.parent)
        fits = names == (wanted.prefix, wanted.content, wanted.parent_prefix, parent)
        exact = found.id == wanted.exact and parent == wanted.parent_exact
        if not fits or not (exact or found.id == derived_id(parent, wanted)):
            raise BundleError(
                f"the names of the block at {found.start} do not follow from its token ids and identity: the prompt is "
                "under a salt, or was not made by Keepwarm"
            )
        parent = found.id


def _check_model(file: Path, namespace: Mapping[str, Any], model: Mapping[str, Any] | None) -> None:
    if model is None:
        return
    different = differences(namespace["model"], model)
    if different:
        seen = ", ".join(f"{name} {_short(namespace['model'].get(name))}" for name in different)
        wanted = ", ".join(f"{name} {_short(model.get(name))}" for name in different)
        raise BundleError(
            f"{file} was made for another model: it has {seen}; the model given has {wanted}. Its KV would be wrong: "
            "warm the prompt with this model instead"
        )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 20 else text[:12] + "..."


def _meta(names: Sequence[str], sha256: bytes, signature: bytes, note: Mapping[str, Any]) -> dict[str, str]:
    return {
        "keepwarm_bundle": str(VERSION if note else _PLAIN),
        "names": canonical_json(list(names)),
        **({"note": json_text(dict(note))} if note else {}),  # in its order: it may be of tools
        "run_sha256": sha256.hex(),
        "signature": signature.hex(),
    }


def _signed(meta: Mapping[str, str]) -> bytes:
    """What a signature is over."""
    return canonical_json({k: v for k, v in meta.items() if k not in ("signature", "header_xxh3")}).encode()


def _header(meta: Mapping[str, str], size: int) -> bytes:
    checked = {**meta, "header_xxh3": xxhash.xxh3_128(canonical_json(dict(meta)).encode()).hexdigest()}
    tensors = {"__metadata__": checked, "run": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    text = json.dumps(tensors, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def _opened(file: Path) -> Iterator[tuple[int, dict[str, str], int]]:
    """An open bundle: its file, metadata, and where the run begins. Raises BundleError, StoreTooNew and OSError."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        size = os.fstat(fd).st_size
        try:
            length = int.from_bytes(_bytes_at(fd, 0, 8), "little")
            if length > _MAX_HEADER or (8 + length) % ALIGNMENT:
                raise BundleError(f"{file} is no bundle: expected a file that `keepwarm export` wrote")
            raw = _bytes_at(fd, 8, length)
            meta = dict(json.loads(raw)["__metadata__"])
            if "keepwarm_bundle" not in meta:
                raise BundleError(f"{file} is no bundle: expected a file that `keepwarm export` wrote")
            meta.pop("header_xxh3")
            if int(meta["keepwarm_bundle"]) > VERSION:
                raise StoreTooNew(f"{file} is a bundle of version {meta['keepwarm_bundle']}; use a newer Keepwarm")
            names = json.loads(meta["names"])
            if not all(isinstance(name, str) for name in names):
                raise CorruptRun("a name is no text")
            signature, sha256 = bytes.fromhex(meta["signature"]), bytes.fromhex(meta["run_sha256"])
            note = json.loads(meta.get("note", "{}"))
            if _header(_meta(names, sha256, signature, note), size - 8 - length)[8:] != raw:
                raise CorruptRun("its header does not match its checksum, or its size")
        except (CorruptRun, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise _damaged(file, error) from error
        yield fd, meta, 8 + length
    finally:
        os.close(fd)


def _damaged(file: Path, error: Exception) -> BundleError:
    return BundleError(f"{file} is damaged, nothing was imported: {error}; copy or export it again")


def _bytes_at(fd: int, at: int, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = os.pread(fd, count, at)
        if not part:
            raise CorruptRun(f"the file ends at {at}")
        parts.append(part)
        at, count = at + len(part), count - len(part)
    return b"".join(parts)


def _sha256(path: Path, at: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(at)
        return hashlib.file_digest(file, "sha256").digest()
