"""The files of a store's runs: read and verified in bounded time, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from keepwarm.core.blocks import TokenIds
from keepwarm.core.ports import Bytes, KVSink
from keepwarm.errors import CorruptRun, StoreLocked, StoreTooNew
from keepwarm.store.disk.mmap import map_run
from keepwarm.store.disk.prefetch import Fetch
from keepwarm.store.disk.recovery import RUNS, TEMPORARY, quarantine_file, run_file
from keepwarm.store.disk.timeouts import BoundedCalls
from keepwarm.store.health import Health
from keepwarm.store.runfile.codec import Coding
from keepwarm.store.runfile.crypto import StoreKey
from keepwarm.store.runfile.header import KnownHeaders, RunHeader
from keepwarm.store.runfile.layout import Outline, Run, StoredBlock, check_sink
from keepwarm.store.runfile.reader import RunReader, as_corrupt
from keepwarm.store.runfile.writer import write_run

_HEADERS = 8 << 20  # bytes of memory for headers that were read before

Refuse = Callable[[CorruptRun], None]  # gets the error that was found in a run's file


class RunFiles:
    """One immutable file per run, in one folder. Safe for use from several threads."""

    def __init__(
        self,
        folder: Path,
        health: Health,
        key: StoreKey | None,
        bounded: BoundedCalls,
        coding: Coding | None,
        map_files: bool,
    ) -> None:
        """`key` is the key of an encrypted store. With `map_files`, requests use files in place if the page cache holds
        them (see `store.disk.mmap`)."""
        self._folder, self._health = folder, health
        self.key = key
        self.bounded = bounded
        self._coding, self._map_files = coding, map_files
        self._headers = KnownHeaders(_HEADERS)

    def path(self, run_id: str) -> Path:
        return self._folder / run_file(run_id)

    # Reading

    def load(
        self, run_id: str, first: int, ids: Sequence[bytes], tokens: TokenIds, end: int, sink: KVSink, refuse: Refuse
    ) -> None:
        """Read the blocks `ids`, from ordinal `first` on and up to position `end`, directly into the sink: now, or, if
        the sink defers it, each layer when it is used.

        `tokens` are the expected ids from the first block's start to `end`. Every layer is committed, in order and in
        the sink's thread, after its bytes are verified. Raises CorruptRun, after a call of `refuse`, for wrong bytes,
        token ids or blocks, and for a short or missing file; and StoreStalled.
        """
        try:
            reader = self.bounded.call(lambda: self._reading(run_id))
            try:
                blocks = _taken(reader.header, first, ids, tokens, end)
                if self._coding is not None and not reader.header.geometry.is_state:  # blocks are decoded as a whole
                    sink = self._coding.sink(sink, reader.header.geometry, blocks, end)
                    end = blocks[-1].end
                check_sink(reader.header.geometry, sink)
                if not reader.header.geometry.layers:  # it holds only token ids
                    reader.close()
                    return
                if self._in_place(reader, blocks, end, sink, refuse):
                    return
                fetch = Fetch(reader, blocks, end, sink, self.bounded, refuse)
            except CorruptRun as error:
                reader.close()
                raise reader.corrupt(error) from error
        except CorruptRun as error:
            refuse(error)
            raise
        if not sink.defer(fetch):
            for layer in range(fetch.layers):
                fetch.ready(layer)

    def _in_place(
        self, reader: RunReader, blocks: Sequence[StoredBlock], end: int, sink: KVSink, refuse: Refuse
    ) -> bool:
        """Let the sink use the file in place, if that is wanted and possible. Return whether it does."""
        header = reader.header
        if not self._map_files or self._coding is not None or header.cipher is not None or header.geometry.is_state:
            return False
        run = map_run(reader, blocks, end, sink, refuse)
        if run is None:
            return False
        reader.close()
        run.fill()
        if not sink.defer(run):
            run.ready(len(reader.header.geometry.layers) - 1)
        return True

    def forget_headers(self) -> None:
        """Forget the headers that were read, with the token ids in them."""
        self._headers.clear()

    def header(self, run_id: str) -> RunHeader:
        """Read a run's header, verified. Raises CorruptRun, also for a missing file, and StoreStalled."""

        def read() -> RunHeader:
            with self._reading(run_id) as reader:
                return reader.header

        return self.bounded.call(read)

    def headers(self, run_ids: Sequence[str]) -> tuple[dict[str, RunHeader], dict[str, CorruptRun]]:
        """Read the headers of some runs in one bounded wait. Return those that are verified, and what is wrong with the
        others. Raises StoreStalled."""
        found: dict[str, RunHeader] = {}
        damaged: dict[str, CorruptRun] = {}

        def read() -> None:
            for run_id in run_ids:
                try:
                    with self._reading(run_id) as reader:
                        found[run_id] = reader.header
                except CorruptRun as error:
                    damaged[run_id] = error

        self.bounded.call(read)
        return found, damaged

    def read_run(self, run_id: str) -> Run:
        """Read a whole run, verified. Raises CorruptRun, also for a missing file. Waits as long as it takes."""
        with self._reading(run_id) as reader:
            try:
                return reader.read_run()
            except (CorruptRun, OSError) as error:
                raise reader.corrupt(error) from error

    def _reading(self, run_id: str) -> RunReader:
        try:
            return RunReader.open(self.path(run_id), run_id, self.key, self._headers)
        except (CorruptRun, StoreTooNew, StoreLocked, OSError) as error:
            raise as_corrupt(run_id, error) from error

    # Writing

    def write(self, run: Outline, layers: Iterable[tuple[Bytes, Bytes]], is_reserved: Callable[[str], bool]) -> bool:
        """Write a run's file, durable. Return False when its space is no longer reserved; the caller then removes what
        is left.

        Raises OSError and what `layers` raises."""
        final = self.path(run.id)
        temporary = final.with_name(final.name + TEMPORARY)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # From now on, a process that evicts or purges the run finds the file. So check before the first byte.
            if not is_reserved(run.id):
                return False
            write_run(fd, run, layers, self.key)
            os.fsync(fd)
        finally:
            os.close(fd)
        try:
            os.rename(temporary, final)
        except FileNotFoundError:
            if final.parent.exists():  # another process evicted the parent, and with it this reservation
                return False
            raise
        folder = os.open(self._folder / RUNS, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return True

    def remove(self, run_id: str) -> None:
        """Remove a run's file, and what an interrupted write left of it. Never raises."""
        path = self.path(run_id)
        for each in (path.with_name(path.name + TEMPORARY), path):
            try:
                each.unlink(missing_ok=True)
            except OSError as error:
                self._health.failed("unlinking a file", error)

    def quarantine(self, run_id: str) -> str:
        """Move a run's file aside. Return its new name in the folder. Raises OSError."""
        name = quarantine_file(run_id)
        self.path(run_id).rename(self._folder / name)
        return name


def _taken(header: RunHeader, first: int, ids: Sequence[bytes], tokens: TokenIds, end: int) -> tuple[StoredBlock, ...]:
    """Return the blocks that a load takes. Raises CorruptRun when the file has other blocks or other token ids."""
    blocks = header.blocks[first : first + len(ids)]
    if not blocks or [block.id for block in blocks] != list(ids):
        raise CorruptRun("the file holds other blocks")
    start = blocks[0].start
    if not blocks[-1].start < end <= blocks[-1].end:
        raise CorruptRun(f"position {end} is not in the block [{blocks[-1].start}, {blocks[-1].end})")
    if not np.array_equal(header.tokens[start - header.start : end - header.start], tokens):
        raise CorruptRun("token ids differ from the prompt's")
    return blocks
