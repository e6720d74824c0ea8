"""The disk tier: one immutable file per run, shared by all processes that use the folder."""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TypeVar

import numpy as np

from keepwarm.core.blocks import TokenIds
from keepwarm.core.ports import BlockRef, KVSink
from keepwarm.errors import CorruptRun, StoreFull, StoreTooNew
from keepwarm.store.format import Run, RunHeader, checksums_of, encode_header
from keepwarm.store.health import Health, logger
from keepwarm.store.index import Index, Orphan, RunRow
from keepwarm.store.layers import run_layers, targets
from keepwarm.store.reading import RunReader
from keepwarm.store.recovery import RUNS, TEMPORARY, open_folder, quarantine_file, run_file, unlink_rows
from keepwarm.store.schema import WAL_BYTES

_Result = TypeVar("_Result")
_CHUNK = 16 << 20  # bytes per write call
_NO_FAULT_OF_THE_FILE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EINTR}


class DiskTier:
    """Run files and their catalogue. Safe for use from several threads and processes."""

    name = "disk"

    def __init__(
        self, folder: Path, cap: int, index: Index, *, executor: Executor | None = None, health: Health | None = None
    ) -> None:
        self.folder = folder
        self.cap = cap
        self.index = index
        self.health = health or Health()
        self._executor = executor
        self._refused: set[str] = set()  # runs that failed here, should their rows outlive them

    @classmethod
    def open(
        cls,
        folder: Path,
        cap: int,
        *,
        executor: Executor | None = None,
        health: Health | None = None,
        clock: Callable[[], float] = time.time,
    ) -> DiskTier:
        """Open or create a store. `cap` bounds all bytes in the folder, the catalogue and quarantine included; it is
        applied when something is stored, not here.

        Raises StoreNotWritable, StoreUnusable, StoreTooNew and StoreFull.
        """
        return cls(folder, cap, open_folder(folder, clock), executor=executor, health=health)

    def close(self) -> None:
        """Merge access times and counters, and close the catalogue."""
        try:
            self.index.merge()
        except sqlite3.Error as error:
            self.health.failed("closing the store", error)
        finally:
            self.index.close()

    # Finding

    def find(self, ids: Sequence[bytes]) -> dict[bytes, BlockRef]:
        """The stored ones of some blocks; none when the catalogue fails."""
        try:
            found = self.index.find(ids)
        except sqlite3.Error as error:
            self.health.failed("looking up blocks on disk", error)
            return {}
        self.health.worked("looking up blocks on disk")
        return {key: ref for key, ref in found.items() if ref.run_id not in self._refused}

    def lookup(self, ids: Sequence[bytes]) -> tuple[BlockRef, ...]:
        """The longest leading part of `ids` that is stored."""
        found = self.find(ids)
        refs: list[BlockRef] = []
        for block_id in ids:
            if block_id not in found:
                break
            refs.append(found[block_id])
        return tuple(refs)

    def children(self, prefix: bytes) -> tuple[BlockRef, ...]:
        """Stored blocks whose left context has this prefix name; none when the catalogue fails."""
        try:
            found = self.index.children(prefix)
        except sqlite3.Error as error:
            self.health.failed("looking up blocks on disk", error)
            return ()
        return tuple(ref for ref in found if ref.run_id not in self._refused)

    def path(self, run_id: str) -> Path:
        return self.folder / run_file(run_id)

    def header(self, run_id: str) -> RunHeader:
        """A run's verified header. Raises CorruptRun, also for a missing file."""
        return self._reading(run_id, lambda reader: reader.header)

    # Loading

    def load(self, run_id: str, first: int, ids: Sequence[bytes], tokens: TokenIds, end: int, sink: KVSink) -> None:
        """Read the blocks `ids`, from ordinal `first` on and up to position `end`, straight into the sink.

        `tokens` are the expected ids from the first block's start to `end`. Every layer is committed, in order and in
        this thread, after its bytes are verified. Raises CorruptRun for anything amiss: wrong bytes, token ids or
        blocks, a short or missing file.
        """

        def read(reader: RunReader) -> None:
            header = reader.header
            blocks = header.blocks[first : first + len(ids)]
            if not blocks or [block.id for block in blocks] != list(ids):
                raise CorruptRun("the file holds other blocks")
            start = blocks[0].start
            if not blocks[-1].start < end <= blocks[-1].end:
                raise CorruptRun(f"position {end} is not in the block [{blocks[-1].start}, {blocks[-1].end})")
            if not np.array_equal(header.tokens[start - header.start : end - header.start], tokens):
                raise CorruptRun("token ids differ from the prompt's")
            layers = len(header.geometry.layers)
            views = targets(sink, layers, start, end)
            for layer, shape in enumerate(header.geometry.layers):
                for kv, view in enumerate(views[layer]):
                    expected = (shape.kv_heads, end - start, header.geometry.head_bytes(layer, kv))
                    if view.shape != expected:
                        raise CorruptRun(f"layer {layer} has {expected} bytes, the model expects {view.shape}")
            run_layers(
                self._executor,
                layers,
                lambda layer: reader.load_layer(layer, blocks, end, *views[layer]),
                lambda layer: sink.commit(layer, start, end),
            )

        self._reading(run_id, read)

    def read_run(self, run_id: str) -> Run:
        """A whole run, verified. Raises CorruptRun, also for a missing file."""
        return self._reading(run_id, RunReader.read_run)

    def _reading(self, run_id: str, read: Callable[[RunReader], _Result]) -> _Result:
        try:
            with RunReader.open(self.path(run_id), run_id) as reader:
                return read(reader)
        except (CorruptRun, StoreTooNew) as error:
            # The catalogue would be newer too: a single newer file is a damaged one.
            raise CorruptRun(f"run {run_id}: {error}") from error
        except OSError as error:
            raise CorruptRun(f"run {run_id}: {error.strerror or error}") from error

    def quarantine(self, run_id: str, error: CorruptRun) -> bool:
        """Take a run that failed verification out of use: its file is moved aside (and given up first when space is
        needed), its rows are deleted. Never raises.

        False when the run had only been evicted meanwhile, or when the failure was not the file's.
        """
        self._refused.add(run_id)
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in _NO_FAULT_OF_THE_FILE:
            self.health.failed("reading a run", cause)
            return False
        try:
            with self.index.transaction() as db:
                if db.execute("SELECT 1 FROM runs WHERE id = ? AND state = 'live'", [run_id]).fetchone() is None:
                    return False
                db.execute("DELETE FROM blocks WHERE run = ?", [run_id])
                try:
                    self.path(run_id).rename(self.folder / quarantine_file(run_id))
                    db.execute(
                        "UPDATE runs SET state = 'quarantined', file = ? WHERE id = ?",
                        [quarantine_file(run_id), run_id],
                    )
                except FileNotFoundError:
                    db.execute("DELETE FROM runs WHERE id = ?", [run_id])
        except (OSError, sqlite3.Error) as failure:
            self.health.failed("quarantining a run", failure)
        self.health.count("corrupt")
        logger.warning("%s; quarantined, its blocks will be computed again", error)
        return True

    # Storing

    def fits(self, nbytes: int) -> bool:
        """Whether a run of about so many bytes could ever be stored under the cap."""
        return nbytes + WAL_BYTES < self.cap

    def put(self, run: Run) -> bool:
        """Store a run durably: reserve, write, sync, rename, publish. Never raises; False when it is not stored.

        A run that does not fit, or whose parent block is not stored, counts as dropped; anything else as an error.
        """
        header = encode_header(run, checksums_of(run))
        try:
            given_up = self.index.reserve(run.id, run_file(run.id), len(header) + run.nbytes, self.cap, run)
        except StoreFull as error:
            self.health.dropped("storing a run under the cap", error)
            return False
        except Orphan:
            self.health.dropped("storing a run", "the block it continues is not stored")
            return False
        except sqlite3.Error as error:
            self.health.failed("reserving space", error)
            return False
        try:
            self._give_up(given_up)
            self._write(run, header)
            added = self.index.publish(run.id, run)
        except (OSError, sqlite3.Error) as error:
            self._abandon(run.id)
            self.health.failed("storing a run on disk", error)
            return False
        if not added:
            self._unlink(self.path(run.id))
        for what in ("storing a run on disk", "reserving space", "storing a run under the cap"):
            self.health.worked(what)
        return added is not None

    def remove(self, run_ids: Iterable[str]) -> list[RunRow]:
        """Forget runs and unlink their files; returns those that were there. Raises sqlite3.Error and OSError."""
        gone = self.index.forget(run_ids)
        unlink_rows(self.folder, gone)
        return gone

    def size_on_disk(self) -> int:
        """Bytes of every file in the folder, in bytes as `ls` shows them."""
        total = 0
        for root, _, names in os.walk(self.folder):
            for name in names:
                try:
                    total += os.stat(os.path.join(root, name)).st_size
                except OSError:
                    continue  # unlinked meanwhile
        return total

    def _give_up(self, rows: Sequence[RunRow]) -> None:
        self.health.count("evicted_disk", sum(row.state == "live" for row in rows))
        unlink_rows(self.folder, rows)

    def _write(self, run: Run, header: bytes) -> None:
        final = self.path(run.id)
        temporary = final.with_name(final.name + TEMPORARY)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for part in (memoryview(header), run.tokens.data.cast("B"), run.data.data):
                while part:
                    part = part[os.write(fd, part[:_CHUNK]) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, final)
        folder = os.open(self.folder / RUNS, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _abandon(self, run_id: str) -> None:
        """Undo a write that broke off. Should the catalogue fail too, the reservation ends with its lease."""
        try:
            self.index.forget([run_id])
        except sqlite3.Error as error:
            self.health.failed("releasing a reservation", error)
        path = self.path(run_id)
        self._unlink(path.with_name(path.name + TEMPORARY))
        self._unlink(path)

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self.health.failed("unlinking a file", error)
