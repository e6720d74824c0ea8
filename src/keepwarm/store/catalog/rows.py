"""Rows of the catalogue as Python objects, and the description of a run that needs space."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keepwarm.core.identity import json_digest
from keepwarm.core.snapshots import PURPOSE
from keepwarm.store.runfile.layout import Described


class Orphan(Exception):
    """The block that a run stands on is not stored (any more), so the run could not be reached."""


class BudgetSpent(Exception):
    """The bytes that may be written on this day are used up."""


@dataclass(frozen=True)
class RunRow:
    """One row of `runs`, or what is left of it in `doomed`."""

    id: str
    file: str
    nbytes: int  # of the file
    tokens: int
    start: int
    state: str
    parent: bytes
    created: float
    last_used: float
    namespace: str


# Digests of the namespaces of snapshots of recurrent state.
SNAPSHOT_SPACES = f"SELECT digest FROM namespaces WHERE json_extract(description, '$.purpose.name') = '{PURPOSE}'"
COLUMNS = "id, file, bytes, tokens, start, state, parent, created, last_used, namespace"


def namespace_digest(description: Mapping[str, Any]) -> str:
    """Hex name of a namespace in the catalogue."""
    return json_digest("keepwarm namespace 1", description)


def row_of(db: sqlite3.Connection, run_id: str) -> RunRow | None:
    row = db.execute(f"SELECT {COLUMNS} FROM runs WHERE id = ?", [run_id]).fetchone()
    return None if row is None else RunRow(*row)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A run that needs space."""

    id: str
    file: str
    nbytes: int  # of the file
    described: Described
