"""`keepwarm stats`, and what other commands ask of a fleet's remote tier."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepwarm.cli import output
from keepwarm.cli.options import Json
from keepwarm.cli.stored import KeyFile, StoreFolder, open_store
from keepwarm.config import default_remotes, store_key
from keepwarm.errors import ConfigError, RemoteUnavailable, StoreError

if TYPE_CHECKING:
    from keepwarm.engine import Engine
    from keepwarm.store.books import Books

_TIMEOUT = 30.0  # seconds: somebody waits for an answer, not for a token
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
    """Counters of a store's processes so far or, with --fleet, of all replicas in the last 30 days."""
    if not fleet:
        with open_store(store, key_file) as archive:
            found = dict(sorted(archive.contents.counters().items()))
        if as_json:
            output.print_json({"counters": found})
        elif not found:
            output.note("nothing was counted yet")
        else:
            output.print_fields([(name, f"{count:,}") for name, count in found.items()])
        return
    books = _books(remote, store_key(key_file))
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
    _print(total, len(reports), live, stored)


def _print(total: Mapping[str, int], replicas: int, live: int, stored: Mapping[str, int]) -> None:
    asked, hit = total.get("prompt_tokens", 0), total.get("cached_tokens", 0)
    rows = [
        ("replicas", f"{replicas:,} in 30 days, {live:,} in the last two minutes"),
        ("stored", f"{output.counted(stored['runs'], 'run')}, {output.in_bytes(stored['bytes'])}"),
        ("hit rate", f"{100 * hit / asked:.1f} % of prompt tokens" if asked else "nothing was asked yet"),
        *((name, f"{count:,}") for name, count in sorted(total.items())),
    ]
    output.print_fields(rows)


def arrived(engine: Engine, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where a warmed prompt is stored whole, remotely. Raises StoreError when it is missing from one of the remotes."""
    from keepwarm.core.request import split

    compiled = engine._compile(split(None, asked, answer=False, decoding=False)[0], 0)
    ids = [block.exact for block in engine.linked(compiled).blocks]
    found = []
    for behind in engine.archive.remotes:
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


def _books(url: str | None, key: bytes | None) -> Books:
    from keepwarm.store.books import Books
    from keepwarm.store.crypto import StoreKey
    from keepwarm.store.remote import Limits, RemoteTier
    from keepwarm.store.remotes import open_blobs

    chosen = url or next(iter(default_remotes()), None)
    if chosen is None:
        raise ConfigError("which fleet? --remote names the remote tier that its replicas share, or $KEEPWARM_REMOTE")
    limits = Limits(timeout=_TIMEOUT)
    tier = RemoteTier(open_blobs(chosen, limits), limits=limits, key=None if key is None else StoreKey(key))
    _asked(tier.check)
    return Books(tier)


def _asked(ask: Any) -> Any:
    try:
        return ask()
    except RemoteUnavailable as error:
        raise StoreError(str(error)) from error
