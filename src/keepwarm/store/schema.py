"""The catalogue's tables, their numbered migrations, and how the file is opened."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from keepwarm.errors import StoreFull, StoreNotWritable, StoreTooNew, StoreUnusable

APPLICATION_ID = 0x4B57434B  # "KWCK": tells our catalogue from any other SQLite file
WAL_BYTES = 256 << 10  # allowance for the write-ahead log and its index; checkpoints below keep them under it
_CHECKPOINT_PAGES = 32
_BUSY_SECONDS = 10.0
_NETWORK = {"nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "glusterfs", "beegfs"}
_NETWORK_FUSE = ("sshfs", "s3fs", "gcsfuse", "rclone", "glusterfs", "goofys", "mountpoint-s3", "juicefs", "ceph")

MIGRATIONS: tuple[tuple[str, ...], ...] = (
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
)
SCHEMA = len(MIGRATIONS)


class DamagedCatalogue(Exception):
    """SQLite says the file is damaged; it can be made again from the runs. Never leaves the store."""


def connect(path: Path, *, writer: bool) -> sqlite3.Connection:
    """A connection in autocommit mode, for use under a lock from any thread.

    A reader waits at most 0.2 s for a lock, since a request waits for it; a writer 10 s.
    """
    connection = sqlite3.connect(
        path, timeout=_BUSY_SECONDS if writer else 0.2, isolation_level=None, check_same_thread=False
    )
    connection.execute("PRAGMA foreign_keys = ON")
    # What flush() acknowledged must survive a power cut: the log is synced at every commit. Commits are few and made
    # off the answering path.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES // 2}")
    if not writer:
        connection.execute("PRAGMA query_only = ON")
    return connection


def open_catalogue(path: Path) -> tuple[sqlite3.Connection, bool]:
    """Open for writing and migrate; also whether it was empty. The caller holds the store's opening lock.

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
        if version and (found := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise DamagedCatalogue(f"{path}: {found}")
        _migrate(connection, version)
        return connection, version == 0
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
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.execute("COMMIT")
    except BaseException:
        connection.rollback()
        raise


def translated(error: sqlite3.Error, path: Path) -> Exception:
    """What an error while opening means: DamagedCatalogue, StoreNotWritable, StoreFull or StoreUnusable."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return DamagedCatalogue(f"{path}: {error}")
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return StoreNotWritable(f"{path} cannot be written ({error}); choose another folder, or fix its permissions")
    if code == sqlite3.SQLITE_FULL:
        return StoreFull(f"no space on the device for {path}; free some, or choose another folder")
    return StoreUnusable(f"the catalogue {path} cannot be opened: {error}")


def network_file_system(folder: Path, mounts: str | None = None) -> str | None:
    """The type of the network file system a folder lies on, None when it is local or unknown.

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
