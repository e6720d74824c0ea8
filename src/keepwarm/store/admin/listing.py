"""Questions that people ask a store: its entries, one of them in full, and how they are connected. Reads both tiers."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from keepwarm.core.identity import model_digest
from keepwarm.core.ports import BlockRef
from keepwarm.core.results import Entry
from keepwarm.core.snapshots import PURPOSE
from keepwarm.errors import CorruptRun, StoreError
from keepwarm.store.catalog.rows import namespace_digest
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.health import Health
from keepwarm.store.ram.tier import RamTier
from keepwarm.store.runfile.header import RunHeader, file_bytes
from keepwarm.store.runfile.layout import Run

_MODEL_DIGITS = 12
_SHORTEST_PREFIX = 4


def model_name(namespace: Mapping[str, Any]) -> str:
    """First hex digits of a described namespace's model identity, as in `ModelIdentity.digest`."""
    return model_digest(namespace.get("model", {})).hex()[:_MODEL_DIGITS]


def kind_of(namespace: Mapping[str, Any]) -> str:
    """The kind of the runs under a described namespace, as in `Entry.kind`."""
    purpose = namespace.get("purpose", {}).get("name", "")
    return "snapshot" if purpose == PURPOSE else "chunk" if purpose else "kv"


def entries(ram: RamTier, disk: DiskTier | None, names: Mapping[str, bytes]) -> list[Entry]:
    """One entry per stored run, the most recently used first. Raises sqlite3.Error."""
    in_ram = {run.id: run for run in ram.runs()}
    by_leaf = _names_by_run(ram, disk, names)
    found: list[Entry] = []
    if disk is not None:
        spaces = disk.index.namespaces()
        models = {key: model_name(description) for key, description in spaces.items()}
        kinds = {key: kind_of(description) for key, description in spaces.items()}
        blocks = disk.index.block_counts()
        for row in disk.index.runs():
            found.append(
                Entry(
                    id=row.id,
                    name=by_leaf.get(row.id, ""),
                    tokens=row.tokens,
                    blocks=blocks.get(row.id, 0),
                    start=row.start,
                    bytes=row.nbytes,
                    created=row.created,
                    last_used=row.last_used,
                    tier=ram.name if row.id in in_ram else disk.name,
                    model=models.get(row.namespace, ""),
                    kind=kinds.get(row.namespace, "kv"),
                )
            )
    on_disk = {entry.id for entry in found}
    for run in in_ram.values():
        if run.id not in on_disk:
            created, last_used = ram.times(run.id)
            found.append(
                Entry(
                    id=run.id,
                    name=by_leaf.get(run.id, ""),
                    tokens=len(run.tokens),
                    blocks=len(run.blocks),
                    start=run.start,
                    bytes=run.nbytes,
                    created=created,
                    last_used=last_used,
                    tier=ram.name,
                    model=model_name(run.namespace),
                    kind=kind_of(run.namespace),
                )
            )
    return sorted(found, key=lambda entry: entry.last_used, reverse=True)


@dataclass(frozen=True)
class Node:
    """A stored run and its place in the tree of prefixes."""

    entry: Entry
    parent: str | None  # id of the run it continues
    salts: frozenset[bytes]  # tags of the salts it is under; empty: it is public
    uses: int  # since it was stored, as merged so far; 0 for a run that is only in RAM
    pinned_until: float | None  # seconds since the epoch


def tree(ram: RamTier, disk: DiskTier | None, names: Mapping[str, bytes]) -> list[Node]:
    """Every stored run with the run it continues. Raises sqlite3.Error."""
    places = disk.index.places() if disk is not None else {}
    found = []
    for entry in entries(ram, disk, names):
        parent, salts, uses, pinned = places.get(entry.id, (None, frozenset[bytes](), 0, None))
        run = ram.get(entry.id)
        if entry.id not in places and run is not None:
            parent, salts = _run_of(ram, disk, run.blocks[0].parent), frozenset(run.salts)
            kept = ram.retention(entry.id)
            pinned = kept.expires if kept is not None and kept.priority else None
        found.append(Node(entry, parent, salts, uses, pinned))
    return found


def show(ram: RamTier, disk: DiskTier | None, names: Mapping[str, bytes], wanted: str) -> dict[str, Any]:
    """Return one run in full, as JSON-ready data.

    `wanted` is a given name, or the first digits (at least 4) of a run id or block id. Raises StoreError when no run
    or more than one fits, and sqlite3.Error.
    """
    run_id = _resolve(ram, disk, names, wanted)
    every = {entry.id: entry for entry in entries(ram, disk, names)}
    entry = every.get(run_id)
    described: Run | RunHeader | None = ram.get(run_id)
    damage = ""
    if described is None and disk is not None:
        try:
            described = disk.files.header(run_id)
        except CorruptRun as error:
            damage = str(error)
    if entry is None:
        raise StoreError(f"run {run_id} is gone")
    shown: dict[str, Any] = {
        "id": run_id,
        "name": entry.name,
        "kind": entry.kind,
        "tier": entry.tier,
        "file": _file(disk, run_id),
        "bytes": entry.bytes,
        "start": entry.start,
        "tokens": entry.tokens,
        "created": entry.created,
        "last_used": entry.last_used,
        "model": entry.model,
    }
    if described is None:
        return shown | {"error": damage or "gone"}
    return shown | {
        "namespace_digest": namespace_digest(described.namespace),
        "identity": dict(described.namespace),
        "geometry": described.geometry.describe(),
        "salted": bool(described.salts),
        "encrypted": disk is not None and disk.files.key is not None,
        "blocks": [block.describe() for block in described.blocks],
        "snapshots": _snapshots(tree(ram, disk, names), run_id),
        "token_ids": described.tokens.tolist(),
        "file_bytes": described.file_bytes if isinstance(described, RunHeader) else file_bytes(described),
        "chain": _chain(ram, disk, described.blocks[0].parent, run_id),
    }


def _snapshots(nodes: Iterable[Node], run_id: str) -> list[dict[str, Any]]:
    """Return the snapshots of recurrent state that stand on a run."""
    found = [node.entry for node in nodes if node.parent == run_id and node.entry.kind == "snapshot"]
    return [{"position": e.end, "id": e.id, "bytes": e.bytes} for e in sorted(found, key=lambda entry: entry.end)]


def leaf(ram: RamTier, disk: DiskTier, names: Mapping[str, bytes], wanted: str) -> bytes:
    """Return the last block of the `wanted` prompt: the named block, the block whose id starts with these digits, or
    the last block of the run whose id does. For a snapshot, return the block at whose end it stands.

    Raises StoreError as `show` does, and sqlite3.Error.
    """
    run_id = _resolve(ram, disk, names, wanted)
    if wanted in names:
        return names[wanted]
    ids, row = disk.index.block_ids(run_id), disk.index.run(run_id)
    if not ids or row is None:
        raise StoreError(f"run {run_id} is not on disk")
    if kind_of(disk.index.namespaces().get(row.namespace, {})) == "snapshot":
        return row.parent
    if run_id.startswith(wanted.lower()):
        return ids[-1]
    return next(block_id for block_id in ids if block_id.hex().startswith(wanted.lower()))


def content(ram: RamTier, disk: DiskTier | None, health: Health, content_id: bytes) -> list[dict[str, Any]]:
    """See `Archive.find_content`. Each block is described as by `Index.content`."""
    found = [
        {
            "id": block.id,
            "prefix": block.prefix,
            "run_id": run.id,
            "start": block.start,
            "length": block.length,
            "parent_exact": block.parent,
            "parent_prefix": block.parent_prefix,
            "namespace": dict(run.namespace),
        }
        for run, block in ram.content(content_id)
    ]
    if disk is not None:
        index, nothing = disk.index, list[dict[str, Any]]()
        below = health.asking(lambda: index.content(content_id), nothing)
        known = {row["id"] for row in below}
        found = below + [row for row in found if row["id"] not in known]
    return found


def namespaces(ram: RamTier, disk: DiskTier | None, health: Health) -> dict[str, dict[str, Any]]:
    """See `Archive.namespaces`."""
    found = {namespace_digest(run.namespace): dict(run.namespace) for run in ram.runs()}
    if disk is not None:
        found |= health.asking(disk.index.namespaces, dict[str, dict[str, Any]]())
    return found


def namespace_of(ram: RamTier, disk: DiskTier | None, ref: BlockRef) -> Mapping[str, Any] | None:
    """See `Archive.namespace_of`."""
    held = ram.find(ref.id)
    if held is not None:
        return held[0].namespace
    if disk is None or ref.tier != DiskTier.name:
        return None
    try:
        return disk.files.header(ref.run_id).namespace
    except CorruptRun:
        return None


def eviction_reason(ram: RamTier, disk: DiskTier | None, health: Health, block_id: bytes) -> str | None:
    """See `Archive.eviction_reason`."""
    if disk is None:
        return ram.eviction_reason(block_id)
    index = disk.index
    return health.asking(lambda: index.eviction_reason(block_id), None)


def stats(ram: RamTier, disk: DiskTier | None, health: Health, remotes: Mapping[str, Any]) -> dict[str, Any]:
    """Present sizes of the local tiers, and counts of this process. `remotes` are the remote tiers' statistics."""
    blocks, size = {RamTier.name: ram.block_count}, {RamTier.name: ram.nbytes}
    evictions = {RamTier.name: ram.evictions}
    snapshots = {RamTier.name: ram.snapshots()}
    if disk is not None:
        blocks[DiskTier.name], size[DiskTier.name] = health.asking(disk.index.totals, (0, 0))
        evictions[DiskTier.name] = health["evicted_disk"]
        snapshots[DiskTier.name] = health.asking(disk.index.snapshots, (0, 0))
    return {
        "blocks": blocks,
        "bytes": size,
        "evictions": evictions,
        "snapshots": {tier: count for tier, (count, _) in snapshots.items()},
        "snapshot_bytes": {tier: nbytes for tier, (_, nbytes) in snapshots.items()},
        "corrupt": health["corrupt"],
        "dropped_writes": health["dropped_writes"],
        "store_errors": health["store_errors"],
        "extra": {
            **{name: health[name] for name in ("not_admitted", "over_budget", "compacted")},
            **({"remote": remotes} if remotes else {}),
        },
    }


def descendants(ram: RamTier, disk: DiskTier | None, run_id: str) -> list[str]:
    """Return a run and every run that continues it, the furthest last. Raises sqlite3.Error."""
    found = [run_id]
    for current in found:
        run = ram.get(current)
        ids = {block.id for block in run.blocks} if run is not None else set()
        if disk is not None:
            ids.update(disk.index.block_ids(current))
        for block_id in ids:
            following = [*ram.continued_by(block_id), *(disk.index.continued_by(block_id) if disk is not None else ())]
            found.extend(dict.fromkeys(child for child in following if child not in found))
    return found


def _run_of(ram: RamTier, disk: DiskTier | None, block_id: bytes) -> str | None:
    held = ram.find(block_id)
    if held is not None:
        return held[0].id
    ref = disk.index.find([block_id]).get(block_id) if disk is not None else None
    return None if ref is None else ref.run_id


def _names_by_run(ram: RamTier, disk: DiskTier | None, names: Mapping[str, bytes]) -> dict[str, str]:
    runs = ((name, _run_of(ram, disk, leaf)) for name, leaf in names.items())
    return {run_id: name for name, run_id in runs if run_id is not None}


def _resolve(ram: RamTier, disk: DiskTier | None, names: Mapping[str, bytes], wanted: str) -> str:
    if wanted in names:
        run_id = _run_of(ram, disk, names[wanted])
        if run_id is None:
            raise StoreError(f"the prompt named {wanted!r} is not stored any more; warm it again")
        return run_id
    digits = wanted.lower()
    if len(digits) < _SHORTEST_PREFIX or set(digits) - set("0123456789abcdef"):
        raise StoreError(
            f"nothing is named {wanted!r}; give a name, or at least {_SHORTEST_PREFIX} digits of an id (`keepwarm ls`)"
        )
    ids = {run.id for run in ram.runs()}
    if disk is not None:
        ids.update(row.id for row in disk.index.runs())
    found = {run_id for run_id in ids if run_id.startswith(digits)}
    if not found:
        found = {run.id for run in ram.runs() for block in run.blocks if block.id.hex().startswith(digits)}
        if disk is not None:
            even = digits[: len(digits) // 2 * 2]
            refs = disk.index.blocks_like(bytes.fromhex(even))
            found.update(ref.run_id for ref in refs if ref.id.hex().startswith(digits))
    if len(found) == 1:
        return found.pop()
    if not found:
        raise StoreError(f"no run or block starts with {wanted!r}; `keepwarm ls` lists what is stored")
    raise StoreError(f"{wanted!r} fits {len(found)} runs; give more digits")


def _chain(ram: RamTier, disk: DiskTier | None, parent: bytes, run_id: str) -> list[str]:
    """Runs from the start of the prompt to this one."""
    chain = [run_id]
    while (above := _run_of(ram, disk, parent)) is not None and above not in chain:
        chain.append(above)
        held = ram.get(above)
        if held is not None:
            parent = held.parent
        else:
            row = disk.index.run(above) if disk is not None else None
            if row is None:
                break
            parent = row.parent
    return chain[::-1]


def _file(disk: DiskTier | None, run_id: str) -> str | None:
    try:
        row = disk.index.run(run_id) if disk is not None else None
    except sqlite3.Error:
        return None
    return None if disk is None or row is None else str(disk.folder / row.file)
