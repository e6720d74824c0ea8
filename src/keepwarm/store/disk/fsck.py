"""Check a store's folder without changing it, and repair what is found: `keepwarm verify` and `gc`.

A survey compares the files with the catalogue. Processes may use the store meanwhile, so a run that changes during the
survey is checked twice before it is reported as damage.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from keepwarm.errors import CorruptRun, StoreError, StoreLocked, StoreTooNew, StoreUnusable
from keepwarm.store.catalog import ranking
from keepwarm.store.catalog import reservations as reserving
from keepwarm.store.catalog.rows import COLUMNS, RunRow
from keepwarm.store.catalog.schema import SCHEMA, connect
from keepwarm.store.disk.files import size, size_of
from keepwarm.store.disk.owner import Owner
from keepwarm.store.disk.recovery import (
    CATALOGUE,
    QUARANTINE,
    RUNS,
    TEMPORARY,
    check_key,
    set_aside,
    sweep,
    unlink_rows,
)
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.retention import Rules
from keepwarm.store.runfile.crypto import StoreKey
from keepwarm.store.runfile.header import RunHeader
from keepwarm.store.runfile.reader import RunReader

# Kinds of findings. Damage: the stored data is less than the catalogue says, or differs from it.
DAMAGE = ("catalogue", "corrupt", "missing", "mismatch", "unreachable")
# Leftovers only cost space; `gc` frees it.
LEFTOVERS = ("expired", "quarantined", "orphan", "temporary")
KINDS = (*DAMAGE, *LEFTOVERS)

# Runs whose first block stands on a block that is not stored, and all runs that continue them.
_UNREACHABLE = """WITH RECURSIVE cut(id) AS (
    SELECT r.id FROM runs r JOIN blocks b ON b.run = r.id
    WHERE r.state = 'live' AND b.start > 0
      AND b.ordinal = (SELECT min(ordinal) FROM blocks WHERE run = r.id)
      AND NOT EXISTS (SELECT 1 FROM blocks above WHERE above.exact = b.parent_exact)
    UNION
    SELECT child.run FROM cut JOIN blocks own ON own.run = cut.id JOIN blocks child ON child.parent_exact = own.exact
) SELECT id FROM cut"""
_STRAY = "run NOT IN (SELECT id FROM runs)"
_BLOCK = "ordinal, start, length, exact, prefix, content, parent_exact, parent_prefix"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    kind: str  # of KINDS
    what: str  # a run id, or a file relative to the store's folder
    detail: str
    nbytes: int = 0
    repaired: str = ""  # what was done about it

    @property
    def is_damage(self) -> bool:
        return self.kind in DAMAGE


@dataclass
class Survey:
    """What a folder holds, compared with its catalogue."""

    rows: dict[str, RunRow] = field(default_factory=dict)  # live runs
    findings: list[Finding] = field(default_factory=list)
    unreadable: bool = False  # the catalogue

    def of(self, *kinds: str) -> list[Finding]:
        return [found for found in self.findings if found.kind in kinds]


@dataclass(frozen=True)
class Verified:
    """Outcome of `verify`."""

    runs: int
    nbytes: int  # read and compared
    findings: tuple[Finding, ...]

    @property
    def damage(self) -> int:
        """Findings of damage that were not repaired."""
        return sum(found.is_damage and not found.repaired for found in self.findings)


@dataclass(frozen=True)
class Collected:
    """Outcome of `collect`: files and bytes by kind. "evicted" are those evicted to fit into a size."""

    counts: dict[str, int]
    nbytes: dict[str, int]
    freed: int  # bytes of the folder before, minus those after; an estimate for a dry run
    size: int  # bytes of the folder after


def survey(folder: Path) -> Survey:
    """Check files and rows, but not KV. Raises StoreUnusable when there is no store, StoreTooNew, and OSError."""
    if not (folder / RUNS).is_dir():
        raise StoreUnusable(f"there is no store at {folder}: it has no folder {RUNS}")
    found = Survey()
    # List files first: a file's row is always written before the file. So if no row is found for a file, it has none.
    files = {f"{name}/{path.name}": path for name in (RUNS, QUARANTINE) for path in _files(folder / name)}
    try:
        known = _ask(folder, found)
    except _Unreadable as error:
        found.unreadable = True
        found.findings.append(Finding("catalogue", CATALOGUE, str(error)))
        known = set(files)
    for name, path in files.items():
        nbytes = size(path)
        if name.startswith(QUARANTINE):
            found.findings.append(Finding("quarantined", name, "set aside because of damage", nbytes))
        elif name.removesuffix(TEMPORARY) not in known:
            kind = "temporary" if name.endswith(TEMPORARY) else "orphan"
            found.findings.append(Finding(kind, name, "a file that no row of the catalogue names", nbytes))
    return found


def verify(
    folder: Path,
    key: StoreKey | None = None,
    *,
    repair: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Verified:
    """Read every byte of every run and compare it with its checksums and the catalogue. Only one layer at a time is in
    memory.

    With `repair`, damaged runs are quarantined, a damaged catalogue and wrong rows are rebuilt, and unreachable runs
    are removed. `progress` is called with the number of runs that are done, and of all. Raises StoreError, OSError and
    sqlite3.Error.
    """
    found = survey(folder)
    wanted = sorted(found.rows) or [path.stem for path in _files(folder / RUNS) if path.suffix == ".safetensors"]
    headers: dict[str, RunHeader] = {}
    read = 0
    for done, run_id in enumerate(wanted):
        progress(done, len(wanted))
        path = folder / RUNS / f"{run_id}.safetensors"
        try:
            with RunReader.open(path, run_id, key) as reader:
                reader.verify()
                read += reader.header.file_bytes
                if run_id in found.rows:
                    wrong = _differences(folder, found.rows[run_id], reader.header)
                    if wrong:
                        headers[run_id] = reader.header
                        found.findings.append(Finding("mismatch", run_id, wrong))
        except StoreLocked:
            if found.unreadable:
                raise
            check_store_key(folder, key)
            found.findings.append(Finding("corrupt", run_id, "encrypted otherwise than the store", size(path)))
        except (CorruptRun, StoreTooNew) as error:
            if not found.rows or _is_live(folder, run_id):
                found.findings.append(Finding("corrupt", run_id, str(error), size(path)))
        except FileNotFoundError:
            if _is_live(folder, run_id):
                found.findings.append(Finding("missing", run_id, "its file is gone"))
    progress(len(wanted), len(wanted))
    findings = found.findings
    if repair and findings:
        findings = _repair(folder, key, found, headers)
    return Verified(len(wanted), read, tuple(sorted(findings, key=lambda each: KINDS.index(each.kind))))


def collect(
    folder: Path, key: StoreKey | None = None, *, max_disk: int | None = None, dry_run: bool = False
) -> Collected:
    """Remove leftovers and unreachable runs. With `max_disk`, also evict runs, in the same order as storing would,
    until the folder has at most that many bytes. Raises StoreError, OSError and sqlite3.Error.
    """
    found = survey(folder)
    if found.unreadable:
        raise StoreUnusable(f"the catalogue of {folder} is damaged; `keepwarm verify --repair` makes it again")
    kinds = ("unreachable", *LEFTOVERS)
    counts = {kind: len(found.of(kind)) for kind in kinds}
    nbytes = {kind: sum(each.nbytes for each in found.of(kind)) for kind in kinds}
    before = size_of(folder)
    if dry_run:
        freed = sum(nbytes.values())
        victims = [] if max_disk is None else _would_evict(folder, before - freed, max_disk)
        counts["evicted"], nbytes["evicted"] = len(victims), sum(row.nbytes for row in victims)
        return Collected(counts, nbytes, freed + nbytes["evicted"], before - freed - nbytes["evicted"])
    with closing(DiskTier.open(folder, max_disk or 1 << 62, key=key)) as disk:
        disk.remove(each.what for each in found.of("unreachable"))
        _empty_quarantine(disk)
        sweep(folder, disk.index)
        evicted = [] if max_disk is None else _evict(disk, max_disk)
        counts["evicted"], nbytes["evicted"] = len(evicted), sum(row.nbytes for row in evicted)
        disk.index.database.rewrite()
    after = size_of(folder)
    return Collected(counts, nbytes, before - after, after)


class _Unreadable(Exception):
    """The catalogue is damaged or missing."""


def _connect(folder: Path) -> sqlite3.Connection:
    """Open a connection that only reads. Raises _Unreadable, StoreTooNew, StoreUnusable."""
    path = folder / CATALOGUE
    if not path.exists():
        raise _Unreadable("there is none")
    connection: sqlite3.Connection | None = None
    try:
        connection = connect(path, writer=False)
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA:
            raise StoreTooNew(
                f"the store at {folder} has schema {version}, this Keepwarm knows {SCHEMA}; use the newer"
            )
        if version < SCHEMA:
            raise StoreUnusable(f"the store at {folder} is of an older version; any other command brings it up to date")
    except (sqlite3.Error, StoreError) as error:
        if connection is not None:
            connection.close()
        raise (_unreadable(folder, error) if isinstance(error, sqlite3.Error) else error) from error
    return connection


def _unreadable(folder: Path, error: sqlite3.Error) -> Exception:
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return _Unreadable(str(error))
    return StoreUnusable(f"the catalogue of {folder} cannot be read: {error}; is another process holding it locked?")


def _ask(folder: Path, found: Survey) -> set[str]:
    """Fill in the live rows, and the findings from the catalogue. Return the files that any row names."""
    me, now = Owner.current(), time.time()
    with closing(_connect(folder)) as db:
        try:
            wrong = [row[0] for row in db.execute("PRAGMA integrity_check(5)") if row[0] != "ok"]
            if wrong:
                raise _Unreadable("; ".join(wrong))
            stray = db.execute(f"SELECT count(*) FROM blocks WHERE {_STRAY}").fetchone()[0]
            rows = {row[0]: RunRow(*row) for row in db.execute(f"SELECT {COLUMNS} FROM runs")}
            leases = db.execute("SELECT id, owner, lease FROM runs WHERE state = 'reserved'").fetchall()
            doomed = db.execute("SELECT file, bytes FROM doomed").fetchall()
            cut = [row[0] for row in db.execute(_UNREACHABLE)]
        except sqlite3.Error as error:
            raise _unreadable(folder, error) from error
    if stray:
        found.findings.append(Finding("catalogue", CATALOGUE, f"{stray} blocks of runs that are not there"))
    found.rows = {run_id: row for run_id, row in rows.items() if row.state == "live"}
    for run_id, owner, lease in leases:
        holder = Owner.parse(owner)
        if (lease or 0.0) < now or holder is None or holder.is_dead(me):
            path = folder / (rows[run_id].file + TEMPORARY)
            found.findings.append(Finding("expired", run_id, f"a write of {owner} that never ended", size(path)))
    for file, _ in doomed:
        found.findings.append(Finding("expired", file, "dropped, but not unlinked yet", size(folder / file)))
    for run_id in cut:
        detail = "what it continues is not stored, so nothing can find it"
        found.findings.append(Finding("unreachable", run_id, detail, rows[run_id].nbytes))
    return {row.file for row in rows.values()} | {file for file, _ in doomed}


def _differences(folder: Path, row: RunRow, header: RunHeader) -> str:
    """Say how a run's rows differ from its file; empty when they do not."""
    with closing(_connect(folder)) as db:
        rows = db.execute(f"SELECT {_BLOCK} FROM blocks WHERE run = ?", [row.id]).fetchall()
        live = db.execute("SELECT 1 FROM runs WHERE id = ? AND state = 'live'", [row.id]).fetchone()
        mine = {each[3] for each in rows}
        others = [b for b in header.blocks if b.id not in mine]
        absent = [b for b in others if not db.execute("SELECT 1 FROM blocks WHERE exact = ?", [b.id]).fetchone()]
    if not live:
        return ""  # gone meanwhile
    expected = {
        (b.ordinal, b.start, b.length, b.id, b.prefix, b.content, b.parent, b.parent_prefix) for b in header.blocks
    }
    if set(rows) - expected:
        return f"{len(set(rows) - expected)} blocks in the catalogue are not those of the file"
    if absent:
        return f"{len(absent)} blocks of the file are not in the catalogue"
    if (row.nbytes, row.tokens, row.start, row.parent) != (
        header.file_bytes,
        len(header.tokens),
        header.start,
        header.parent,
    ):
        return "size, length or place in the catalogue are not those of the file"
    return ""


def _repair(folder: Path, key: StoreKey | None, found: Survey, headers: dict[str, RunHeader]) -> list[Finding]:
    """Repair what can be repaired. Return the findings, each with what was done about it."""
    if found.unreadable:
        set_aside(folder, found.of("catalogue")[0].detail, key)
    with closing(DiskTier.open(folder, 1 << 62, key=key)) as disk:  # rebuilds the catalogue
        with disk.index.database.transaction() as db:
            db.execute(f"DELETE FROM blocks WHERE {_STRAY}")
        for each in found.of("corrupt"):
            disk.quarantine(each.what, CorruptRun(f"run {each.what}: {each.detail}"))
        sweep(folder, disk.index)
        for run_id, header in headers.items():
            with disk.index.database.transaction() as db:
                db.execute("DELETE FROM blocks WHERE run = ?", [run_id])
                db.execute(
                    "UPDATE runs SET bytes = ?, tokens = ?, start = ?, parent = ?, dead = 0 WHERE id = ?",
                    [header.file_bytes, len(header.tokens), header.start, header.parent, run_id],
                )
                if db.execute("SELECT 1 FROM runs WHERE id = ?", [run_id]).fetchone():
                    reserving.add_blocks(db, run_id, header)
        disk.remove(_unreachable(disk))
    did = {
        "catalogue": "made again from the runs" if found.unreadable else "removed",
        "corrupt": "quarantined",
        "missing": "forgotten",
        "mismatch": "rows made again from the file",
        "unreachable": "removed",
        "expired": "removed",
        "orphan": "removed",
        "temporary": "removed",
        "quarantined": "",  # kept for inspection; `gc` removes them
    }
    return [Finding(each.kind, each.what, each.detail, each.nbytes, did[each.kind]) for each in found.findings]


def _unreachable(disk: DiskTier) -> list[str]:
    with disk.index.database.transaction() as db:
        return [row[0] for row in db.execute(_UNREACHABLE)]


def _empty_quarantine(disk: DiskTier) -> None:
    with disk.index.database.transaction() as db:
        quarantined = [row[0] for row in db.execute("SELECT id FROM runs WHERE state = 'quarantined'")]
        gone = reserving.doom(db, quarantined)
    unlink_rows(disk.folder, gone)
    disk.index.unlinked(row.id for row in gone)
    for path in _files(disk.folder / QUARANTINE):
        path.unlink(missing_ok=True)


def _victims(db: sqlite3.Connection, size: int, max_disk: int) -> Iterator[RunRow]:
    """Yield the runs to evict, as storing would choose them, until `size` bytes fit under `max_disk`. Each is dropped
    when it is chosen."""
    rules = Rules(disk_policy=ranking.chosen_policy(db))
    while size > max_disk:
        victim = reserving.next_victim(db, rules, max_disk, "", time.time())
        if victim is None:
            return
        for row in reserving.doom(db, [victim]):
            size -= row.nbytes
            yield row


def _evict(disk: DiskTier, max_disk: int) -> list[RunRow]:
    disk.index.database.rewrite()
    size = size_of(disk.folder)
    with disk.index.database.transaction() as db:
        gone = list(_victims(db, size, max_disk))
    unlink_rows(disk.folder, gone)
    disk.index.unlinked(row.id for row in gone)
    return gone


def _would_evict(folder: Path, size: int, max_disk: int) -> list[RunRow]:
    with closing(connect(folder / CATALOGUE, writer=True)) as db:
        db.execute("BEGIN IMMEDIATE")
        try:
            return list(_victims(db, size, max_disk))
        finally:
            db.rollback()


def check_store_key(folder: Path, key: StoreKey | None) -> None:
    """Raise StoreLocked, with a remedy, unless the key is the store's. Also raises what reading the catalogue does."""
    with closing(_connect(folder)) as db:
        known = db.execute("SELECT value FROM settings WHERE name = 'key'").fetchone()
    check_key(folder, known[0] if known else "", key)


def _is_live(folder: Path, run_id: str) -> bool:
    with closing(_connect(folder)) as db:
        return db.execute("SELECT 1 FROM runs WHERE id = ? AND state = 'live'", [run_id]).fetchone() is not None


def _files(folder: Path) -> Iterable[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_file())
    except FileNotFoundError:
        return ()
