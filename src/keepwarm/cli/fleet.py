"""`keepwarm stats`, and what other commands ask of a fleet's remote tier."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepwarm.cli import output
from keepwarm.cli.options import Json, chosen_remotes, key_of
from keepwarm.cli.stored import KeyFile, StoreFolder, open_store, snapshots_in
from keepwarm.core.snapshots import snapshot_id
from keepwarm.errors import ConfigError, RemoteUnavailable, StoreError

if TYPE_CHECKING:
    from keepwarm.engine import Engine
    from keepwarm.store.remote.records import Books

_TIMEOUT = 30.0  # seconds: the user waits for a report, not for a token
_LIVE = 120.0  # seconds since its last report within which a replica counts as running


def stats(
    store: StoreFolder = None,
    key_file: KeyFile = None,
    fleet: Annotated[
        bool, typer.Option("--fleet", help="Sum the counters of all replicas that share a remote tier.")
    ] = False,
    remote: Annotated[
        str | None, typer.Option("--remote", help="The remote tier of --fleet. [default: $KEEPWARM_REMOTE]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how much was asked of a store by all engines, commands and services so far, and how much of it was found.
    With --fleet, show this for all replicas in the last 30 days.

    A running process adds its counts every half minute, and at its end.
    """
    if not fleet:
        if remote is not None:
            raise ConfigError("--remote belongs to --fleet: without it, stats counts what one folder's processes did")
        with open_store(store, key_file) as archive:
            found = archive.contents.counters()
            entries = archive.contents.entries()
            here = {"runs": len(entries), "bytes": archive.contents.size_on_disk()} | snapshots_in(entries)
        if as_json:
            output.print_json({"counters": dict(sorted(found.items())), "stored": here})
        else:
            output.print_fields(_rows(found, here))
        return
    books = _books(chosen_remotes(None if remote is None else [remote]), key_of(key_file))
    reports = _asked(books.reports)
    total: Counter[str] = Counter()
    for report in reports.values():
        total.update({name: count for name, count in report.items() if isinstance(count, int)})
    marks = _asked(books.marks)
    stored = {"runs": len(marks), "bytes": sum(mark.nbytes for mark in marks)}
    live = sum(time.time() - report["reported"] < _LIVE for report in reports.values())
    if as_json:
        output.print_json({"replicas": len(reports), "live": live, "counters": dict(total), "stored": stored})
        return
    replicas = f"{len(reports):,} in 30 days, {live:,} in the last two minutes"
    output.print_fields([("replicas", replicas), *_rows(total, stored)])


def _rows(total: Mapping[str, int], stored: Mapping[str, int]) -> list[tuple[str, str]]:
    asked, hit = total.get("prompt_tokens", 0), total.get("cached_tokens", 0)
    return [
        ("stored", f"{output.counted(stored['runs'], 'run')}, {output.in_bytes(stored['bytes'])}"),
        *([("of these", output.in_snapshots(stored))] if stored.get("snapshots") else []),
        ("hit rate", f"{100 * hit / asked:.1f} % of prompt tokens" if asked else "nothing was asked yet"),
        *((name, f"{count:,}") for name, count in sorted(total.items())),
    ]


def arrived(engine: Engine, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the remotes, each of which holds all of a warmed prompt. Raises StoreError when one lacks part of it."""
    from keepwarm.core.request import split

    compiled = engine.pipeline.prompts.compile(split(None, asked, answer=False, decoding=False)[0], 0)
    linked = engine.pipeline.linked(compiled)
    ids = [block.exact for block in linked.blocks]
    ids += [snapshot_id(ids[-1])] if linked.stateful and linked.blocks.ends[-1] > 1 else []
    found = []
    for behind in engine.pipeline.archive.remotes:
        where = behind.tier.blobs.label
        try:
            stored = behind.tier.find_now(ids)
        except RemoteUnavailable as error:
            raise StoreError(f"the prompt is warm here, but did not arrive: {error}") from error
        if len(stored) < len(ids):
            missing = len(ids) - len(stored)
            raise StoreError(f"the prompt is warm here, but {missing} of {len(ids)} blocks did not arrive at {where}")
        found.append({"tier": behind.tier.name, "where": where, "blocks": len(ids)})
    return found


def _books(remotes: Sequence[str], key: bytes | None) -> Books:
    from keepwarm.store.remote.limits import Limits
    from keepwarm.store.remote.records import Books
    from keepwarm.store.remote.tier import RemoteTier
    from keepwarm.store.remote.tiers import open_blobs
    from keepwarm.store.runfile.crypto import StoreKey

    if not remotes:
        raise ConfigError("which fleet? --remote names the remote tier that its replicas share, or $KEEPWARM_REMOTE")
    limits = Limits(timeout=_TIMEOUT)
    tier = RemoteTier(open_blobs(remotes[0], limits), limits=limits, key=None if key is None else StoreKey(key))
    _asked(tier.check)
    return Books(tier)


def _asked(ask: Any) -> Any:
    try:
        return ask()
    except RemoteUnavailable as error:
        raise StoreError(str(error)) from error
