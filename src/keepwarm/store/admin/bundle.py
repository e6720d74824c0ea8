"""Bundles: one stored prompt, from its first block to its last, as one file for another machine, with the snapshots of
recurrent state along it.

A bundle says for which model, and under which arithmetic, its KV was computed. Its blocks' names follow from that and
from the token ids. Both are checked on import, so only an engine of the same model ever finds an imported prompt. An
engine of another arithmetic finds it only by its `prefix` names. `store.admin.bundle_file` describes the bytes. See
docs/decisions/0012-bundles.md.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from keepwarm.core.blocks import Chain, TokenIds, chain, derived_id
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.identity import ArithmeticIdentity, ModelIdentity, Namespace, differences, same_origin
from keepwarm.core.ports import Bytes
from keepwarm.errors import BundleError, CorruptRun, StoreError
from keepwarm.store.admin import bundle_states, signing
from keepwarm.store.admin.bundle_file import MAX_HEADER, damaged, encode, metadata, opened, signed_part, snapshots_in
from keepwarm.store.admin.bundle_run import Carried, keep, sha256_of
from keepwarm.store.catalog.rows import BudgetSpent, Orphan
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.runfile.codec import common_geometry, widen_rows
from keepwarm.store.runfile.header import RunHeader, file_bytes
from keepwarm.store.runfile.layout import UNKNOWN_SALT, Layout, StoredBlock, check_geometry, new_run_id
from keepwarm.store.runfile.new_run import NewRun
from keepwarm.store.runfile.reader import RunReader
from keepwarm.store.runfile.writer import write_run

_SHA256 = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Exported:
    """What a bundle holds."""

    names: tuple[str, ...]
    tokens: int
    blocks: int
    nbytes: int  # of the file
    signed: bool
    snapshots: int = 0  # of recurrent state


@dataclass(frozen=True)
class Imported:
    """The result of an import."""

    names: tuple[str, ...]
    tokens: int
    blocks: int
    new_blocks: int  # the others were stored already
    signed: bool
    namespace: Mapping[str, Any]
    note: Mapping[str, Any]
    snapshots: int = 0  # of recurrent state


def export_bundle(
    disk: DiskTier,
    leaf: bytes,
    names: Sequence[str],
    file: Path,
    sign_key: Path | None = None,
    note: Mapping[str, Any] | None = None,
    check: Callable[[Collection[bytes]], None] = lambda tags: None,
) -> Exported:
    """Write the prompt that ends with block `leaf` into a new bundle. Only one layer's KV at a time is in memory.

    `note` is plain JSON for the importer to read. `sign_key` is an Ed25519 private key in PEM. `check` is called with
    tags of salts. It raises when something under them was purged since the export began; the bundle is deleted then.
    Raises BundleError, ConfigError for a bad key, CorruptRun for a damaged run, OSError and sqlite3.Error. `file`
    appears whole or not at all.
    """
    key = None if sign_key is None else signing.private_key(sign_key)
    with ExitStack() as stack:
        parts = _chain(disk, leaf, stack)
        salts = {salt for part in parts for block in part.blocks for salt in block.salts}
        prompt = _joined(parts)
        states = bundle_states.along(disk, prompt, _check_names(prompt), stack)
        note = note or {}
        size, sizes = file_bytes(prompt), [file_bytes(state) for _, state in states]
        unknown = bytes(0 if key is None else signing.SIGNATURE_BYTES)
        meta = metadata(names, bytes(_SHA256), unknown, note, [(each, bytes(_SHA256)) for each in sizes])
        header = encode(meta, size)
        if len(header) > MAX_HEADER:
            raise BundleError(f"names and note take {len(header)} bytes; a bundle has room for {MAX_HEADER}")
        temporary = file.with_name(f".{file.name}.{new_run_id()[:8]}.tmp")
        try:
            with open(temporary, "xb") as out:
                write_run(out.fileno(), prompt, _layers(parts, prompt), at=len(header))
                digest, at, snapshots = sha256_of(temporary, len(header), size), len(header) + size, []
                for (reader, state), nbytes in zip(states, sizes, strict=True):
                    write_run(out.fileno(), state, _layers_of(reader), at=at)
                    snapshots.append((nbytes, sha256_of(temporary, at, nbytes)))
                    at += nbytes
                meta = metadata(names, digest, b"", note, snapshots)
                if key is not None:
                    meta = metadata(names, digest, signing.sign(key, signed_part(meta)), note, snapshots)
                os.pwrite(out.fileno(), encode(meta, size), 0)
                os.fsync(out.fileno())
            check(salts)  # before it replaces an existing file
            temporary.rename(file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        try:
            check(salts)  # a purge that began before now did not see the file; a later one came after the export
        except StoreError:
            file.unlink(missing_ok=True)
            raise
    whole = len(header) + size + sum(sizes)
    return Exported(tuple(names), len(prompt.tokens), len(prompt.blocks), whole, key is not None, len(states))


def import_bundle(
    disk: DiskTier,
    file: Path,
    epoch: int,
    *,
    verify_key: Path | None = None,
    model: Mapping[str, Any] | None = None,
    geometry: KVGeometry | None = None,
) -> Imported:
    """Store a bundle's prompt and its names; a name in use is moved. Nothing is published before all of it is verified.

    With `verify_key` (an Ed25519 public key in PEM) the bundle must be signed by its private key. With `model` (a
    described model identity) and `geometry` (of that model's KV) it must be of that model. Nothing is stored if
    everything was purged since `epoch`. Raises BundleError, PurgedMeanwhile, ConfigError for a bad key, StoreTooNew,
    StoreFull, OSError and sqlite3.Error.
    """
    key = None if verify_key is None else signing.public_key(verify_key)
    with opened(file) as (fd, meta, at, nbytes):
        if key is not None and not signing.verify(key, signed_part(meta), bytes.fromhex(meta["signature"])):
            seen = "by another key, or changed since" if meta["signature"] else "by nobody"
            raise BundleError(f"{file} is signed {seen}; expected a signature by the counterpart of {verify_key}")
        try:
            run, states = Carried.read(fd, at, nbytes, meta["run_sha256"]), _states(fd, at + nbytes, meta)
        except CorruptRun as error:
            raise damaged(file, error) from error
        prompt = run.outline
        blocks = _check_names(prompt)
        _check_model(file, run.reader.header, model, geometry)
        stored = disk.index.find([block.id for block in prompt.blocks])
        missing = [block.ordinal for block in prompt.blocks if block.id not in stored]
        try:
            bundle_states.check(states, prompt, blocks)
            keep(disk, run, missing, epoch)
            bundle_states.store(disk, states, epoch)
        except CorruptRun as error:
            raise damaged(file, error) from error
        except (Orphan, BudgetSpent) as error:
            why = "the stored beginning of its prompt is gone" if isinstance(error, Orphan) else str(error)
            raise BundleError(f"{file} cannot be imported now: {why}; try again later") from error
        names = tuple(json.loads(meta["names"]))
        for name in names:
            disk.index.set_name(name, prompt.blocks[-1].id, partial(disk.epochs.check, epoch))
        return Imported(
            names,
            len(prompt.tokens),
            len(prompt.blocks),
            len(missing),
            bool(meta["signature"]),
            prompt.namespace,
            json.loads(meta.get("note", "{}")),
            len(states),
        )


def _states(fd: int, at: int, meta: Mapping[str, str]) -> list[Carried]:
    """Read the snapshots in an open bundle, from byte `at` on. Raises CorruptRun."""
    found = []
    for nbytes, digest in snapshots_in(meta):
        found.append(Carried.read(fd, at, nbytes, digest.hex()))
        at += nbytes
    return found


@dataclass(frozen=True)
class _Part:
    """Blocks of a run that lead to a prompt's end, and the position where the next part continues. That position lies
    inside the last block if the next part continues with the rest of a page."""

    reader: RunReader
    blocks: tuple[StoredBlock, ...]
    end: int

    @property
    def tokens(self) -> TokenIds:
        header = self.reader.header
        return header.tokens[: self.end - header.start]


def _chain(disk: DiskTier, leaf: bytes, stack: ExitStack) -> list[_Part]:
    """Open the runs that lead to `leaf`, from the prompt's start on. Return each with its blocks of this prompt."""
    parts: list[_Part] = []
    wanted, end = leaf, None
    while True:
        ref = disk.index.find([wanted]).get(wanted)
        if ref is None:
            raise BundleError("a part of the prompt is not stored any more; warm it again, then export it")
        try:
            reader = stack.enter_context(RunReader.open(disk.files.path(ref.run_id), ref.run_id, disk.files.key))
        except CorruptRun as error:
            raise CorruptRun(f"run {ref.run_id}: {error}; `keepwarm verify --repair` takes it out of use") from error
        blocks = reader.header.blocks[: ref.ordinal + 1]
        if blocks[-1].id != wanted:
            raise CorruptRun(f"run {ref.run_id}: the file holds other blocks")
        parts.append(_Part(reader, blocks, blocks[-1].end if end is None else end))
        if blocks[0].start == 0:
            return parts[::-1]
        wanted, end = blocks[0].parent, blocks[0].start


def _joined(parts: Sequence[_Part]) -> NewRun:
    first = parts[0].reader.header
    geometry = common_geometry([part.reader.header.geometry for part in parts])
    for part in parts:
        if geometry is None or not same_origin(part.reader.header.namespace, first.namespace):
            raise BundleError(
                "parts of this prompt were computed under different arithmetics (another torch, device or thread "
                "count) or stored by different versions, so it has no one origin that a bundle could name; warm it "
                "anew in an empty store, then export"
            )
    assert geometry is not None
    tokens = np.concatenate([part.tokens for part in parts])
    blocks: list[StoredBlock] = []
    for block in (block for part in parts for block in part.blocks):
        above = block
        while block.shared and blocks and blocks[-1].start >= block.page_start:  # parts of the same page
            above = blocks.pop()
        if block.shared:
            block = block.whole(above.parent_prefix)
        blocks.append(block)
    return NewRun(
        id=new_run_id(),
        geometry=geometry,
        namespace=first.namespace,
        tokens=tokens,
        # An older version did not record the salts of its blocks. The check of the names will find them.
        blocks=tuple(
            replace(block, ordinal=ordinal, salts=tuple(tag for tag in block.salts if tag != UNKNOWN_SALT))
            for ordinal, block in enumerate(blocks)
        ),
    )


def _layers(parts: Sequence[_Part], prompt: NewRun) -> Iterator[tuple[Bytes, Bytes]]:
    """Yield the verified keys and values of each layer of the whole prompt."""
    layout = Layout.of(prompt)
    for layer in range(len(prompt.geometry.layers)):
        keys, values = (np.empty(layout.shape(layer, kv), np.uint8) for kv in (0, 1))
        at = 0
        for part in parts:
            reader, blocks = part.reader, part.blocks
            own = reader.header.geometry
            first, last = reader.layout.rows(layer, blocks)
            end = at + last - first - (blocks[-1].end - part.end)  # less the end of a split page; no layer is cut then
            if own == prompt.geometry:
                reader.load_layer(layer, blocks, part.end, keys[:, at:end], values[:, at:end])
            else:
                heads = own.layers[layer].kv_heads
                found = [np.empty((heads, end - at, own.head_bytes(layer, kv)), np.uint8) for kv in (0, 1)]
                reader.load_layer(layer, blocks, part.end, *found)
                for rows, target in zip(found, (keys, values), strict=True):
                    widen_rows(rows, target[:, at:end], reader.layout.each(layer, blocks))
            at = end
        yield keys, values


def _layers_of(reader: RunReader) -> Iterator[tuple[Bytes, Bytes]]:
    """Yield the verified keys and values of each layer of a run of one block."""
    for layer in range(len(reader.header.geometry.layers)):
        keys, values = (np.empty(reader.layout.shape(layer, kv), np.uint8) for kv in (0, 1))
        reader.load_layer(layer, reader.header.blocks, reader.header.blocks[-1].end, keys, values)
        yield keys, values


def _check_names(prompt: NewRun) -> Chain:
    """Compute the prompt's blocks, from position 0 on, with the names that follow from its token ids and identity.
    Raises BundleError when the prompt's own names differ."""
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
    blocks, parent = chain(prompt.tokens, [block.end for block in prompt.blocks], space), space.exact_root
    for found, wanted in zip(prompt.blocks, blocks, strict=True):
        names = (found.prefix, found.content, found.parent_prefix, found.parent)
        fits = names == (wanted.prefix, wanted.content, wanted.parent_prefix, parent)
        exact = found.id == wanted.exact and parent == wanted.parent_exact
        if not fits or not (exact or found.id == derived_id(parent, wanted)):
            raise BundleError(
                f"the names of the block at {found.start} do not follow from its token ids and identity: the prompt is "
                "under a salt, or was not made by Keepwarm"
            )
        parent = found.id
    return blocks


def _check_model(file: Path, header: RunHeader, model: Mapping[str, Any] | None, geometry: KVGeometry | None) -> None:
    namespace = header.namespace
    different = [] if model is None else differences(namespace["model"], model)
    if different:
        seen = ", ".join(f"{name} {_short(namespace['model'].get(name))}" for name in different)
        wanted = ", ".join(f"{name} {_short((model or {}).get(name))}" for name in different)
        raise BundleError(
            f"{file} was made for another model: it has {seen}; the model given has {wanted}. Its KV would be wrong: "
            "warm the prompt with this model instead"
        )
    if geometry is not None and not header.geometry.is_coded:
        try:
            check_geometry(header.geometry, geometry)
        except CorruptRun as error:
            raise BundleError(f"{file} names the model given, and {error}: it was not made by Keepwarm") from error


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 20 else text[:12] + "..."
