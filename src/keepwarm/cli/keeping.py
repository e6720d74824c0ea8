"""`keepwarm verify`, `gc` and `purge`: looking after a store. They open only its folder and need no model."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from keepwarm.cli import output
from keepwarm.cli.options import Json, chosen_remotes, key_of
from keepwarm.cli.stored import KeyFile, StoreFolder, existing_store, open_store
from keepwarm.config import parse_bytes
from keepwarm.core.identity import salt_key
from keepwarm.errors import StoreError

DAMAGED = 6


def verify(
    store: StoreFolder = None,
    key_file: KeyFile = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Quarantine damaged runs, mend the catalogue, remove what nothing can reach."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare every byte of a store with its checksums and its catalogue.

    Ends with 0 when the store is sound or was repaired, and with 6 when there is damage. Without --repair nothing is
    changed. Files in quarantine are listed, but no damage: `gc` removes them.
    """
    from keepwarm.store.disk import fsck as check
    from keepwarm.store.runfile.crypto import StoreKey

    folder, secret = existing_store(store), key_of(key_file)
    with _failing(folder), output.counting("verifying") as progress:
        report = check.verify(folder, StoreKey(secret) if secret else None, repair=repair, progress=progress)
    found = report.findings
    if as_json:
        listed = [asdict(each) | {"damage": each.is_damage} for each in found]
        output.print_json({"runs": report.runs, "bytes": report.nbytes, "damage": report.damage, "findings": listed})
    elif found:
        headers = ("kind", "what", "size", "done about it", "detail")
        rows = [(e.kind, e.what, output.in_bytes(e.nbytes), e.repaired or "-", e.detail) for e in found]
        output.print_table(headers, rows, right=(2,))
    said = f"{report.damage} damaged, --repair takes them out of use" if report.damage else "sound"
    if not report.damage and any(each.is_damage for each in found):
        said = "repaired"
    output.note(f"{output.counted(report.runs, 'run')}, {output.in_bytes(report.nbytes)} read in {folder}: {said}")
    if report.damage:
        raise typer.Exit(DAMAGED)


def gc(
    store: StoreFolder = None,
    key_file: KeyFile = None,
    max_disk: Annotated[
        str | None, typer.Option("--max-disk", help="Evict runs until the folder has at most so many bytes: 20GiB.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Remove what nobody can use: writes of dead processes, quarantined, half-written and stray files, cut-off runs."""
    from keepwarm.store.disk import fsck as check
    from keepwarm.store.runfile.crypto import StoreKey

    folder, secret = existing_store(store), key_of(key_file)
    cap = None if max_disk is None else parse_bytes(max_disk)
    with _failing(folder), output.working(f"collecting in {folder}"):
        report = check.collect(folder, StoreKey(secret) if secret else None, max_disk=cap, dry_run=dry_run)
    if as_json:
        output.print_json(asdict(report) | {"dry_run": dry_run})
        return
    rows = [(kind, f"{n:,}", output.in_bytes(report.nbytes[kind])) for kind, n in report.counts.items() if n]
    if rows:
        output.print_table(("kind", "count", "size"), rows, right=(1, 2))
    freed, size = output.in_bytes(max(0, report.freed)), output.in_bytes(report.size)
    output.note(f"{freed} {'would be' if dry_run else 'were'} freed; the store then has {size}")


def purge(
    salt: Annotated[
        str | None, typer.Option("--salt", help="Whose KV shall go: the salt that its requests gave.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of it: under any salt, and under none.")] = False,
    store: StoreFolder = None,
    key_file: KeyFile = None,
    remote: Annotated[
        list[str] | None,
        typer.Option("--remote", help="Purge this remote tier, too; repeatable. [default: $KEEPWARM_REMOTE]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Remove everything stored under a salt, or all there is, so that no byte of it is left in the store's folder.

    Quarantined files, and names of prompts that are not stored any more, go too, since it is not known whose they are.
    Nothing of what is under way in other processes is stored afterwards. Replicas that share the remote follow within
    seconds.
    """
    if everything == (salt is not None):
        raise typer.BadParameter("give --salt SALT, or --all")
    with (
        open_store(store, key_file, chosen_remotes(remote)) as archive,
        output.resumable(lambda: "the purge is not complete; the same command finishes it"),
        output.working("purging"),
    ):
        report = archive.purge_all() if salt is None else archive.purge(salt_key(salt))
    if as_json:
        output.print_json(asdict(report))
        return
    print(
        f"{output.counted(report.runs, 'run')} and {output.counted(report.names, 'name')} removed, "
        f"{output.in_bytes(report.nbytes)} of files"
    )


@contextmanager
def _failing(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"the store at {folder} cannot be worked on: {error}") from error
