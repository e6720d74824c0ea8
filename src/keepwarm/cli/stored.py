"""`keepwarm ls` and `keepwarm show`: what a store holds. They open only the store and need no model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepwarm.cli import output
from keepwarm.cli.options import Json, default_store, key_of
from keepwarm.config import EngineConfig
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.results import Entry
from keepwarm.errors import StoreUnusable

if TYPE_CHECKING:
    from keepwarm.store.archive import Archive

_SHORT = 4  # items of a list that are shown

StoreFolder = Annotated[
    Path | None, typer.Option("--store", help="Folder of the store. [default: ~/.cache/keepwarm/store]")
]
KeyFile = Annotated[
    Path | None,
    typer.Option("--store-key-file", help="File with an encrypted store's key. [default: $KEEPWARM_STORE_KEY]"),
]


def existing_store(folder: Path | None) -> Path:
    """Return a store's folder. Raises StoreUnusable when there is none: looking must not create one."""
    path = (folder or default_store()).expanduser()
    if not path.is_dir():
        raise StoreUnusable(f"there is no store at {path}: `keepwarm warm` or `run` makes one, --store names another")
    return path


def open_store(folder: Path | None, key_file: Path | None = None, remotes: Sequence[str] = ()) -> Archive:
    """Open the store in a folder, with remote tiers where those matter.

    Raises StoreUnusable when there is none, and what `Archive.open` does."""
    from keepwarm.store.archive import Archive

    path = existing_store(folder)
    cap = EngineConfig.build().max_disk  # matters only for writes; looking writes nothing
    return Archive.open(path, max_ram=0, max_disk=cap, key=key_of(key_file), remotes=remotes)


def snapshots_in(entries: Sequence[Entry]) -> dict[str, int]:
    """Count the snapshots of recurrent state among some entries, their bytes, and the bytes of the KV beside them."""
    states = [entry.bytes for entry in entries if entry.kind == "snapshot"]
    kv = sum(entry.bytes for entry in entries if entry.kind != "snapshot")
    return {"snapshots": len(states), "snapshot_bytes": sum(states), "kv_bytes": kv}


def ls(store: StoreFolder = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """List the stored runs, the last used first. A snapshot of recurrent state has a position, and no tokens."""
    with open_store(store, key_file) as archive:
        entries = archive.contents.entries()
        size = archive.contents.size_on_disk()
    stored = snapshots_in(entries)
    if as_json:
        output.print_json({"entries": [asdict(entry) for entry in entries], "size_on_disk": size} | stored)
        return
    rows = [
        (
            entry.id[:8],
            entry.name or "-",
            entry.kind,
            f"{entry.start + 1:,}" if entry.kind == "snapshot" else f"{entry.start:,}",
            "-" if entry.kind == "snapshot" else f"{entry.tokens:,}",
            output.in_bytes(entry.bytes),
            entry.tier,
            output.in_short_time(entry.created),
            output.in_short_time(entry.last_used),
        )
        for entry in entries
    ]
    headers = ("id", "name", "kind", "start", "tokens", "size", "tier", "created", "last used")
    output.print_table(headers, rows, right=(3, 4, 5))
    told = f"{output.counted(len(rows), 'run')}, {output.in_bytes(size)} on disk in {store or default_store()}"
    output.note(f"{told}: {output.in_snapshots(stored)}")


def show(
    which: Annotated[str, typer.Argument(metavar="ID|NAME", help="A run's id (its first characters do) or name.")],
    store: StoreFolder = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Show everything the catalogue knows about one stored run."""
    with open_store(store, key_file) as archive:
        found = archive.contents.show(which)
    if as_json:
        output.print_json(found)
        return
    blocks, states = found.pop("blocks", []), found.pop("snapshots", [])
    output.print_fields(list(_flat(found)))
    if blocks:
        print()
        rows = []
        for block in blocks:
            start, tokens = block["start"], block["length"]
            there = [each for each in states if start < each["position"] <= start + tokens]
            kept = (f"{each['id'][:8]} of {output.in_bytes(each['bytes'])} at {each['position']:,}" for each in there)
            rows.append((f"{start:,}", f"{start + tokens:,}", f"{tokens:,}", block["exact"][:16], ", ".join(kept)))
        columns = ("start", "end", "tokens", "block", "snapshots")
        width = len(columns) if states else len(columns) - 1
        output.print_table(columns[:width], [row[:width] for row in rows], right=(0, 1, 2))


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield names and texts, one per line. Long lists are counted instead of shown (`--json` has them whole)."""
    for name, item in value.items():
        if name == "geometry":
            geometry = KVGeometry.from_description(item)
            size = "in all" if geometry.is_state else f"per token in {geometry.dtype}"
            text = f"{output.counted(len(geometry.layers), 'layer')}, {geometry.bytes_per_token:,} bytes {size}"
        elif isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{name}.")
            continue
        elif name in ("created", "last_used"):
            text = output.in_time(item)
        elif name in ("bytes", "file_bytes"):
            text = f"{item:,} ({output.in_bytes(item)})"
        elif isinstance(item, list):
            text = " ".join(str(part) for part in item) if len(item) <= _SHORT else f"{len(item):,} of them"
        else:
            text = "-" if item in ("", None) else str(item)
        yield prefix + name, text
