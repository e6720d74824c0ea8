"""The beginnings that a store's next requests will probably have: what prompts have in common, and what has a name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from keepwarm.core.identity import same_origin
from keepwarm.store.admin.listing import kind_of
from keepwarm.store.catalog.index import Index


@dataclass(frozen=True)
class Header:
    """A stored beginning: runs that continue each other, up to one that other prompts continue or that has a name."""

    names: tuple[str, ...]  # given to prompts that end in its last run
    runs: tuple[str, ...]  # ids, in order, each followed by the snapshots of recurrent state on it
    tokens: int  # up to the end of its last run
    nbytes: int  # of all its runs
    last_used: float  # seconds since the epoch


def headers(index: Index, origin: Mapping[str, Any]) -> list[Header]:
    """Return the headers stored by a described namespace's model and arithmetic, the most recently used first.

    A run that leads to a more recently used header is not one by itself. Raises sqlite3.Error.
    """
    kinds = {digest: kind_of(space) for digest, space in index.namespaces().items() if same_origin(space, origin)}
    rows = {row.id: row for row in index.runs() if kinds.get(row.namespace) in ("kv", "snapshot")}
    kv = {run_id for run_id, row in rows.items() if kinds[row.namespace] == "kv"}
    above = {run_id: parent for run_id, (parent, *_) in index.places().items() if run_id in rows and parent in rows}
    snapshots: dict[str, list[str]] = {}
    for run_id in rows.keys() - kv:
        if (on := above.get(run_id)) is not None:
            snapshots.setdefault(on, []).append(run_id)
    named = _names_by_run(index, kv)
    ends = named.keys() | {parent for run_id, parent in above.items() if run_id in kv and parent is not None}
    found: list[Header] = []
    leads: set[str] = set()
    for last in sorted((rows[run_id] for run_id in ends), key=lambda row: (row.last_used, row.start), reverse=True):
        if last.id in leads:
            continue
        chain = [*_up(last.id, above)]
        leads.update(chain)
        runs = tuple(each for run_id in reversed(chain) for each in (run_id, *snapshots.get(run_id, ())))
        size = sum(rows[run_id].nbytes for run_id in runs)
        found.append(Header(named.get(last.id, ()), runs, last.start + last.tokens, size, last.last_used))
    return found


def _names_by_run(index: Index, runs: Collection[str]) -> Mapping[str, tuple[str, ...]]:
    names = index.names()
    refs = index.find([*set(names.values())])
    found: dict[str, tuple[str, ...]] = {}
    for name, leaf in names.items():
        ref = refs.get(leaf)
        if ref is not None and ref.run_id in runs:
            found[ref.run_id] = (*found.get(ref.run_id, ()), name)
    return found


def _up(run_id: str | None, above: Mapping[str, str | None]) -> Iterator[str]:
    """Yield a run, the one it continues, and so on."""
    while run_id is not None:
        yield run_id
        run_id = above.get(run_id)
