"""The catalogue's tables, their numbered migrations, and how the file is opened."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

from keepwarm.errors import StoreFull, StoreNotWritable, StoreTooNew, StoreUnusable
from keepwarm.store.catalog.chains import lay_out_all

APPLICATION_ID = 0x4B57434B  # "KWCK": distinguishes our catalogue from other SQLite files
WAL_BYTES = 256 << 10  # allowance for the write-ahead log and its index; the checkpoints below keep them under it
CHECKED_AT_OPENING = 16 << 20  # bytes
UNFILLED = "unfilled"  # setting of a new catalogue until the existing runs are entered
_CHECKPOINT_PAGES = 32
BUSY_SECONDS = 10.0
_NETWORK = {"nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "glusterfs", "beegfs"}
_NETWORK_FUSE = ("sshfs", "s3fs", "gcsfuse", "rclone", "glusterfs", "goofys", "mountpoint-s3", "juicefs", "ceph")


def _keeping_up(table: str, value: str, fact: str, columns: str = "bytes") -> tuple[str, ...]:
    """Triggers that keep a fact equal to the sum of `value` over a table. `columns` are the columns in `value`."""
    new, old = (re.sub(r"\b(bytes|queue|state)\b", rf"{row}.\1", value) for row in ("NEW", "OLD"))
    change = f"UPDATE facts SET value = value + {{}} WHERE name = '{fact}'; END"
    made = f"CREATE TRIGGER {table}_{fact}_in AFTER INSERT ON {table} BEGIN " + change.format(new)
    gone = f"CREATE TRIGGER {table}_{fact}_out AFTER DELETE ON {table} BEGIN " + change.format(f"-({old})")
    if value == "1":
        return made, gone
    moved = f"CREATE TRIGGER {table}_{fact}_moved AFTER UPDATE OF {columns} ON {table} BEGIN "
    return made, gone, moved + change.format(f"({new}) - ({old})")


MIGRATIONS: tuple[tuple[str | Callable[[sqlite3.Connection], None], ...], ...] = (
    (
        """CREATE TABLE runs (
            id TEXT PRIMARY KEY,
            file TEXT NOT NULL,             -- relative to the store's folder
            bytes INTEGER NOT NULL,         -- of the file
            tokens INTEGER NOT NULL,
            start INTEGER NOT NULL,         -- position of the first token
            state TEXT NOT NULL CHECK (state IN ('reserved', 'live', 'quarantined')),
            parent BLOB NOT NULL,           -- id of the block before the first one
            owner TEXT NOT NULL,            -- process that reserved it
            lease REAL,                     -- end of a reservation, seconds since the epoch
            created REAL NOT NULL,
            last_used REAL NOT NULL,
            namespace TEXT NOT NULL
        ) WITHOUT ROWID""",
        """CREATE TABLE blocks (
            exact BLOB PRIMARY KEY,         -- exact or derived id
            run TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
            ordinal INTEGER NOT NULL,
            start INTEGER NOT NULL,
            length INTEGER NOT NULL,
            prefix BLOB NOT NULL,
            parent_exact BLOB NOT NULL,
            parent_prefix BLOB NOT NULL,
            content BLOB NOT NULL
        ) WITHOUT ROWID""",
        "CREATE INDEX runs_used ON runs(state, last_used, created, id)",
        "CREATE INDEX blocks_run ON blocks(run)",
        "CREATE INDEX blocks_parent_exact ON blocks(parent_exact)",
        "CREATE INDEX blocks_parent_prefix ON blocks(parent_prefix)",
        "CREATE INDEX blocks_content ON blocks(content)",
        "CREATE TABLE namespaces (digest TEXT PRIMARY KEY, description TEXT NOT NULL) WITHOUT ROWID",
        "CREATE TABLE names (name TEXT PRIMARY KEY, leaf BLOB NOT NULL, created REAL NOT NULL) WITHOUT ROWID",
        "CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    ),
    (
        # The salts that a run's blocks are under (`core.identity.salt_tag`); empty: written before runs recorded them.
        """CREATE TABLE salts (
            tag BLOB NOT NULL,
            run TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
            PRIMARY KEY (tag, run)
        ) WITHOUT ROWID""",
        "CREATE INDEX salts_run ON salts(run)",
        "INSERT INTO salts SELECT x'', id FROM runs WHERE state = 'live'",
        # Facts about the store itself, such as the id of its key.
        "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    ),
    (
        # What `store.catalog.ranking` notes of a live run. `seq` and `entered` are times of the catalogue's own clock.
        "ALTER TABLE runs ADD COLUMN seq INTEGER NOT NULL DEFAULT 0",  # last use
        "ALTER TABLE runs ADD COLUMN uses INTEGER NOT NULL DEFAULT 0",  # LFU
        "ALTER TABLE runs ADD COLUMN weight INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE runs ADD COLUMN queue INTEGER NOT NULL DEFAULT 0",  # S3-FIFO: 0 none, 1 small, 2 main
        "ALTER TABLE runs ADD COLUMN entered INTEGER NOT NULL DEFAULT 0",  # when it entered its queue
        "ALTER TABLE runs ADD COLUMN freq INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE runs ADD COLUMN children INTEGER NOT NULL DEFAULT 0",  # runs that continue it, reserved ones too
        "ALTER TABLE runs ADD COLUMN priority INTEGER NOT NULL DEFAULT 0",  # `retention.Retention`
        "ALTER TABLE runs ADD COLUMN ttl REAL",
        "ALTER TABLE runs ADD COLUMN expires REAL",
        "ALTER TABLE runs ADD COLUMN dead INTEGER NOT NULL DEFAULT 0",  # tokens of the file that other runs serve
        # Which run continues which.
        """CREATE TABLE edges (
            parent TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
            child TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
            PRIMARY KEY (parent, child)
        ) WITHOUT ROWID""",
        "CREATE INDEX edges_child ON edges(child)",
        # Files that are to be unlinked since their runs are gone. Until then they count under the cap.
        "CREATE TABLE doomed (id TEXT PRIMARY KEY, file TEXT NOT NULL, bytes INTEGER NOT NULL, owner TEXT NOT NULL)",
        "CREATE TABLE facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
        "CREATE TABLE ghosts (content BLOB PRIMARY KEY, seq INTEGER NOT NULL) WITHOUT ROWID",
        "CREATE INDEX ghosts_seq ON ghosts(seq)",
        "CREATE TABLE sightings (id BLOB PRIMARY KEY, seq INTEGER NOT NULL) WITHOUT ROWID",
        "CREATE INDEX sightings_seq ON sightings(seq)",
        "CREATE TABLE writes (day INTEGER PRIMARY KEY, bytes INTEGER NOT NULL)",  # since the epoch
        # A contiguous copy of a live run's rows in `blocks`: ids, prefix names, and start and length (int64) of each.
        """CREATE TABLE layouts (
            run TEXT PRIMARY KEY REFERENCES runs(id) ON DELETE CASCADE,
            first INTEGER NOT NULL,         -- ordinal of its first block that is served from it
            ids BLOB NOT NULL,
            prefixes BLOB NOT NULL,
            places BLOB NOT NULL
        ) WITHOUT ROWID""",
        lay_out_all,
        "UPDATE runs SET queue = 1, uses = 1, weight = 1, seq = n, entered = n FROM (SELECT id AS found, "
        "row_number() OVER (ORDER BY last_used, created, id) AS n FROM runs WHERE state = 'live') WHERE id = found",
        "INSERT INTO edges SELECT DISTINCT own.run, child.run FROM blocks child "
        "JOIN blocks own ON own.exact = child.parent_exact WHERE child.run <> own.run",
        "UPDATE runs SET children = (SELECT count(*) FROM edges WHERE parent = id)",
        "INSERT INTO facts SELECT 'seq', count(*) FROM runs",
        "INSERT INTO facts VALUES ('age', 0), ('ghosts', 0), ('sightings', 0)",
        "INSERT INTO facts SELECT 'bytes', coalesce(sum(bytes), 0) FROM runs",
        "INSERT INTO facts VALUES ('main', 0)",  # bytes in the queue "main"
        "INSERT INTO facts SELECT 'runs', count(*) FROM runs WHERE state = 'live'",
        "DROP INDEX runs_used",
        "CREATE INDEX runs_state ON runs(state) WHERE state <> 'live'",
        "CREATE INDEX runs_lru ON runs(seq) WHERE state = 'live' AND children = 0 AND priority = 0",
        "CREATE INDEX runs_lfu ON runs(weight, seq) WHERE state = 'live' AND children = 0 AND priority = 0",
        "CREATE INDEX runs_fifo ON runs(queue, entered) WHERE state = 'live' AND children = 0 AND priority = 0",
        "CREATE INDEX runs_pinned ON runs(priority, seq) WHERE state = 'live' AND children = 0 AND priority > 0",
        "CREATE INDEX runs_expires ON runs(expires, seq) WHERE expires IS NOT NULL",
        *_keeping_up("runs", "bytes", "bytes"),
        *_keeping_up("runs", "bytes * (queue = 2)", "main", "bytes, queue"),
        *_keeping_up("runs", "(state = 'live')", "runs", "state"),
        *_keeping_up("doomed", "bytes", "bytes"),
        *_keeping_up("ghosts", "1", "ghosts"),
        *_keeping_up("sightings", "1", "sightings"),
        "CREATE TRIGGER edges_made AFTER INSERT ON edges BEGIN "
        "UPDATE runs SET children = children + 1 WHERE id = NEW.parent; END",
        "CREATE TRIGGER edges_cut AFTER DELETE ON edges BEGIN "
        "UPDATE runs SET children = children - 1 WHERE id = OLD.parent; END",
    ),
    (
        # Why blocks are no longer here, so that a miss can be explained; only the newest notes.
        "CREATE TABLE departed (id BLOB PRIMARY KEY, seq INTEGER NOT NULL, why TEXT NOT NULL)",
        "CREATE INDEX departed_seq ON departed(seq)",
        "INSERT INTO facts VALUES ('departed', 0)",
        *_keeping_up("departed", "1", "departed"),
    ),
    (
        # The sort key of the blocks behind one parent (`core.blocks.lead`). NULL in an encrypted store, which must not
        # reveal token ids, in rows of earlier versions, and for blocks longer than a page: those never match in part.
        "ALTER TABLE blocks ADD COLUMN lead BLOB",
        "DROP INDEX blocks_parent_exact",
        "CREATE INDEX blocks_parent_exact ON blocks(parent_exact, lead)",
    ),
    (
        # Rests of pages, by the block before their page. Their `parent_exact` is the block with the page's beginning.
        """CREATE TABLE rests (
            behind BLOB NOT NULL,
            lead BLOB NOT NULL,
            exact BLOB NOT NULL REFERENCES blocks(exact) ON DELETE CASCADE,
            PRIMARY KEY (behind, lead, exact)
        ) WITHOUT ROWID""",
        "CREATE INDEX rests_exact ON rests(exact)",
    ),
    (
        # `departed` as the code calls it.
        "DROP TRIGGER departed_departed_in",
        "DROP TRIGGER departed_departed_out",
        "DROP INDEX departed_seq",
        "ALTER TABLE departed RENAME TO evictions",
        "CREATE INDEX evictions_seq ON evictions(seq)",
        "UPDATE facts SET name = 'evictions' WHERE name = 'departed'",
        *_keeping_up("evictions", "1", "evictions"),
    ),
)
SCHEMA = len(MIGRATIONS)


class DamagedCatalogue(Exception):
    """SQLite reports that the file is damaged; it can be rebuilt from the runs. Never leaves the store."""


def connect(path: Path, *, writer: bool) -> sqlite3.Connection:
    """A connection in autocommit mode, for use under a lock from any thread.

    A reader waits at most 0.2 s for a lock, since a request waits for it; a writer 10 s.
    """
    connection = sqlite3.connect(
        path, timeout=BUSY_SECONDS if writer else 0.2, isolation_level=None, check_same_thread=False
    )
    connection.execute("PRAGMA foreign_keys = ON")
    # Data that flush() acknowledged must survive a power cut, so the log is synced at every commit. Commits are few,
    # and no answer waits for them.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES // 2}")
    if not writer:
        connection.execute("PRAGMA query_only = ON")
    return connection


def open_catalogue(path: Path) -> tuple[sqlite3.Connection, bool]:
    """Open the catalogue for writing and migrate it. Return also whether it must still be filled from the runs. The
    caller holds the store's opening lock.

    Raises StoreTooNew (nothing is touched then), DamagedCatalogue, StoreNotWritable, StoreFull or StoreUnusable.
    """
    connection: sqlite3.Connection | None = None
    try:
        connection = connect(path, writer=True)
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        application = int(connection.execute("PRAGMA application_id").fetchone()[0])
        if version and application != APPLICATION_ID:
            raise DamagedCatalogue(f"{path} is not a Keepwarm catalogue")
        if version > SCHEMA:
            raise StoreTooNew(
                f"the store at {path.parent} has schema {version}, this Keepwarm knows {SCHEMA}; "
                "use the newer version, or another folder"
            )
        if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise StoreUnusable(f"{path} cannot use a write-ahead log on this file system; choose a local folder")
        if version and path.stat().st_size <= CHECKED_AT_OPENING:  # a larger one is checked in the background
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise DamagedCatalogue(f"{path}: {found}")
        _migrate(connection, version)
        waits = connection.execute("SELECT 1 FROM settings WHERE name = ?", [UNFILLED]).fetchone()
        return connection, waits is not None
    except sqlite3.Error as error:
        if connection is not None:
            connection.close()
        raise translated(error, path) from error
    except (DamagedCatalogue, StoreTooNew, StoreUnusable):
        if connection is not None:
            connection.close()
        raise


def _migrate(connection: sqlite3.Connection, version: int) -> None:
    if version == SCHEMA:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                if isinstance(statement, str):
                    connection.execute(statement)
                else:
                    statement(connection)
        if not version:  # in one transaction with the tables: if we die before filling it, the next process does that
            connection.execute("INSERT INTO settings VALUES (?, '1')", [UNFILLED])
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.execute("COMMIT")
    except BaseException:
        connection.rollback()
        raise


def translated(error: sqlite3.Error, path: Path) -> Exception:
    """Translate an error while opening into DamagedCatalogue, StoreNotWritable, StoreFull or StoreUnusable."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return DamagedCatalogue(f"{path}: {error}")
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return StoreNotWritable(f"{path} cannot be written ({error}); choose another folder, or fix its permissions")
    if code == sqlite3.SQLITE_FULL:
        return StoreFull(f"no space on the device for {path}; free some, or choose another folder")
    return StoreUnusable(f"the catalogue {path} cannot be opened: {error}")


def network_file_system(folder: Path, mounts: str | None = None) -> str | None:
    """Return the type of the network file system that a folder lies on; None when it is local or unknown.

    `mounts` is the text of /proc/mounts, read when None.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text(errors="replace")
        except OSError:
            return None
    folder = folder.resolve()
    best, kind = -1, ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(fields[1].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\"))
        # Later lines shadow earlier ones at the same place.
        if (point == folder or point in folder.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2]
    if kind in _NETWORK or (kind.startswith("fuse.") and kind.removeprefix("fuse.").startswith(_NETWORK_FUSE)):
        return kind
    return None
