"""The store's own figures, without a model: reading, opening and looking up. `keepwarm simulate` replays traces.

    python benchmarks/store.py [read] [open] [lookup] [--out results.jsonl] [--folder DIR] [--catalogue DIR]

`read`: a stored 3,000-token prefix of SmolLM2's geometry, from cold pages, against the raw sequential bandwidth of
the same file in the same run. `open`, `lookup`: a catalogue of a million pages of 32 tokens, of prompts of 32,000
tokens each, made with bulk inserts in runs of 8 pages, whose files are empty. A lookup is what the engine does for a
prompt (`lookup_ms`): the pages' names (`names_ms`; `named_again_ms` where a prompt named before differs in its last 40
tokens), and the longest stored beginning, up to the token (`found_ms`). Every figure is the median of several rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from keepwarm.core.blocks import Chain, TokenIds, chain, lead, token_ids
from keepwarm.core.geometry import KVGeometry, LayerGeometry
from keepwarm.core.identity import Namespace
from keepwarm.core.naming import Naming
from keepwarm.core.ports import Bytes
from keepwarm.core.schedule import PAGE_TOKENS, Pages
from keepwarm.linker.prefix import matching_tokens
from keepwarm.store import Archive
from keepwarm.store.catalog.chains import lay_out_all
from keepwarm.store.catalog.schema import UNFILLED, open_catalogue
from keepwarm.store.disk.recovery import CATALOGUE, RUNS
from keepwarm.store.eviction import policy
from keepwarm.store.ram.tier import RamTier
from keepwarm.store.runfile.layout import Run, StoredBlock, new_run_id
from keepwarm.testing.kv import MemoryKV, blocks_of, namespace, prompt

TOKENS = 3000
STEP = 1024
BLOCKS, CHAIN, PER_RUN = 1_000_000, 1000, 8
GRID = Pages(2048)
Figures = dict[str, Any]


def smollm2(dtype: str) -> KVGeometry:
    return KVGeometry((LayerGeometry(3, 64, 64),) * 30, dtype)


def drop_pages(path: Path) -> None:
    """Have the kernel forget a file's pages."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def sequential(path: Path, buffer: Bytes) -> None:
    """What a plain program does to read a file into memory that is there already."""
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer.data):  # type: ignore[arg-type]
            pass


class Sink(MemoryKV):
    """Where the KV goes; its pages are touched beforehand, as an arena's are."""

    def commit(self, layer: int, start: int, end: int) -> None:
        pass


def read(folder: Path, rounds: int = 9) -> Iterator[Figures]:
    for dtype in ("bfloat16", "float32"):
        geometry, tokens = smollm2(dtype), prompt(TOKENS)
        blocks = blocks_of(tokens, STEP)
        store = folder / dtype
        with Archive.open(store, max_ram=0, max_disk=1 << 34) as archive:
            archive.put(MemoryKV.random(geometry, TOKENS), blocks, namespace())
            archive.flush()
            (path,) = (store / RUNS).iterdir()
            refs, sink = archive.lookup([block.exact for block in blocks]), Sink(geometry, TOKENS)
            for pair in sink.arrays:
                for array in pair:
                    array.fill(1)
            buffer = np.ones(8 << 20, np.uint8)
            raw, restored, warm = [], [], []
            for _ in range(rounds):  # in turns, so that a slow moment of the machine meets both
                drop_pages(path)
                raw.append(timed(partial(sequential, path, buffer)))
                drop_pages(path)
                restored.append(timed(partial(archive.load, refs, tokens, TOKENS, sink)))
                warm.append(timed(partial(archive.load, refs, tokens, TOKENS, sink)))
            size = path.stat().st_size
        rate = [size / statistics.median(times) / 1e9 for times in (raw, restored, warm)]
        yield {
            "what": f"restore {TOKENS} tokens, {dtype}",
            "MB": round(size / 1e6, 1),
            "raw_sequential_GBps": round(rate[0], 3),
            "restore_cold_GBps": round(rate[1], 3),
            "restore_cold_ms": round(statistics.median(restored) * 1e3, 1),
            "of_raw": round(rate[1] / rate[0], 3),
            "restore_page_cache_GBps": round(rate[2], 3),
        }


def prompt_of(number: int) -> TokenIds:
    return token_ids(np.random.default_rng(number).integers(0, 50_000, CHAIN * PAGE_TOKENS))


def named(tokens: TokenIds, space: Namespace) -> Chain:
    return chain(tokens, GRID.cuts(len(tokens)), space)


def make_catalogue(folder: Path, blocks: int) -> None:
    """A catalogue of so many pages, in chains of `CHAIN` and runs of `PER_RUN`, and empty files."""
    (folder / RUNS).mkdir(parents=True)
    db, _ = open_catalogue(folder / CATALOGUE)
    db.execute("PRAGMA synchronous = OFF")
    db.execute("PRAGMA cache_size = -500000")
    runs: list[tuple[Any, ...]] = []
    rows: list[tuple[Any, ...]] = []
    edges: list[tuple[str, str]] = []
    space = namespace()
    for number in range(blocks // CHAIN):
        pages = named(prompt_of(number), space)
        for above in range(0, CHAIN, PER_RUN):
            first = number * CHAIN + above
            run_id, part = f"{first:032x}", pages[above : above + PER_RUN]
            start, parent = part[0].start, part[0].parent_exact
            values = (
                run_id,
                f"{RUNS}/{run_id}.safetensors",
                4096,
                PER_RUN * PAGE_TOKENS,
                start,
                "live",
                parent,
                "x/1:1",
            )
            (folder / values[1]).touch()  # else they would be missed
            runs.append((*values, 0, 0, "", first, 1, 1, 1, first, 0, 0))
            if above:
                edges.append((f"{first - PER_RUN:032x}", run_id))
            rows += [
                (
                    page.exact,
                    run_id,
                    at,
                    page.start,
                    page.length,
                    page.prefix,
                    page.parent_exact,
                    page.parent_prefix,
                    page.content,
                    lead(page.tokens),
                )
                for at, page in enumerate(part)
            ]
    columns = (
        "id, file, bytes, tokens, start, state, parent, owner, created, last_used, namespace, seq, uses, weight, "
        "queue, entered, freq, children"
    )
    db.execute("BEGIN")
    db.executemany(f"INSERT INTO runs ({columns}) VALUES ({','.join('?' * 18)})", runs)
    db.executemany("INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", sorted(rows))
    db.executemany("INSERT INTO edges VALUES (?, ?)", edges)
    lay_out_all(db)
    db.execute("DELETE FROM settings WHERE name = ?", [UNFILLED])
    db.execute("COMMIT")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()


def resident() -> int:
    """Bytes of memory this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def opening(folder: Path, blocks: int, rounds: int = 5) -> Iterator[Figures]:
    times = []
    held = resident()
    for _ in range(rounds):
        drop_pages(folder / CATALOGUE)
        started = time.perf_counter()
        archive = Archive.open(folder, max_ram=0, max_disk=1 << 50)
        times.append(time.perf_counter() - started)
        grown = resident() - held
        archive._handover.close(None)  # without the merge and the wait for idle work that `close` implies
        archive._disk.index.database.close()  # type: ignore[union-attr]
    size = (folder / CATALOGUE).stat().st_size
    yield {
        "what": f"open a store of {blocks} blocks, catalogue pages cold",
        "ms": round(statistics.median(times) * 1e3, 1),
        "catalogue_bytes_per_block": round(size / blocks),
        "resident_bytes_per_block": round(max(0, grown) / blocks, 2),
    }


def lookup(folder: Path, blocks: int, rounds: int = 500) -> Iterator[Figures]:
    """The cases in turn, so that a machine that others use is as slow for each."""
    archive = Archive.open(folder, max_ram=0, max_disk=1 << 50)
    archive._disk.look_through()  # type: ignore[union-attr]  # now, not beside the lookups
    archive._maintenance._looked_through = True
    whole = CHAIN * PAGE_TOKENS
    apart = whole // 2 + 5  # inside a page
    times: dict[str, list[tuple[float, float, float]]] = {}
    space = namespace()
    for number in range(rounds):
        tokens = prompt_of(number)
        for what, asked, found in (
            ("stored", tokens, whole - 1),
            (f"stored up to token {apart}", np.concatenate([tokens[:apart], tokens[-apart:]]), apart),
            ("not stored", tokens[::-1].copy(), 0),
        ):
            times.setdefault(what, []).append(looked_up(archive, asked, found, space))
    for what, each in times.items():
        names, finds, again = ([seconds * 1e3 for seconds in column] for column in zip(*each, strict=True))
        both = sorted(map(sum, zip(names, finds, strict=True)))
        yield {
            "what": f"lookup of {whole} tokens in {CHAIN // PER_RUN} runs, of {blocks} pages: {what}",
            "lookup_ms": round(statistics.median(both), 3),
            "quartiles_ms": [round(quartile, 3) for quartile in statistics.quantiles(both)[::2]],
            "names_ms": round(statistics.median(names), 3),
            "named_again_ms": round(statistics.median(again), 3),
            "found_ms": round(statistics.median(finds), 3),
        }
    archive._handover.close(None)
    archive._disk.index.database.close()  # type: ignore[union-attr]


def looked_up(archive: Archive, tokens: TokenIds, found: int, space: Namespace) -> tuple[float, float, float]:
    """Seconds for names and match of a prompt, of which so many tokens are stored, and for the names of its edit."""
    started = time.perf_counter()
    pages = named(tokens, space)
    between = time.perf_counter()
    _, reached = matching_tokens(pages, archive, 0, {})
    ended = time.perf_counter()
    assert found <= reached <= found + 1, reached  # made-up prompts may agree in a token more
    cuts, naming = GRID.cuts(len(tokens)), Naming()
    naming.chain(tokens, cuts, space, {})
    edited = np.concatenate([tokens[:-40], tokens[:40]])
    edit = time.perf_counter()
    naming.chain(edited, cuts, space, {})
    return between - started, ended - between, time.perf_counter() - edit


def ram_block_cost(count: int = 20_000) -> Iterator[Figures]:
    """Memory that the RAM tier's books take per block, beside the KV."""
    import tracemalloc

    ids = [hashlib.sha256(b"%d" % number).digest() for number in range(count)]
    runs = [run_of(ids[first : first + PER_RUN], b"", 0) for first in range(0, count, PER_RUN)]
    tier = RamTier(1 << 40, policy=policy("s3fifo", 1 << 40))
    tracemalloc.start()
    for run in runs:
        tier.put(run)
    books = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    yield {"what": "books of the RAM tier", "bytes_per_block": round(books / count)}


_TINY = KVGeometry((LayerGeometry(1, 1, 1),), "float16")


def run_of(ids: list[bytes], parent: bytes, start: int) -> Run:
    """A run of one-token blocks with almost no KV."""
    above = [parent, *ids]
    blocks = tuple(
        StoredBlock(at, start + at, 1, name, name, name, above[at], above[at]) for at, name in enumerate(ids)
    )
    tokens = np.zeros(len(ids), "<u4")
    return Run(new_run_id(), _TINY, {}, tokens, blocks, np.zeros(4 * len(ids), np.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["read", "open", "lookup", []], default=[])
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; a temporary one by default")
    parser.add_argument("--catalogue", type=Path, help="where that of `open` and `lookup` is kept for another time")
    parser.add_argument("--out", type=Path, help="a JSON line per figure is added to this file")
    options = parser.parse_args()
    wanted = options.what or ["read", "open", "lookup"]
    folder = Path(tempfile.mkdtemp(prefix="keepwarm-bench-", dir=options.folder))

    def figures() -> Iterator[Figures]:
        if "read" in wanted:
            yield from read(folder / "read")
        if {"open", "lookup"} & set(wanted):
            made = options.catalogue or folder / "million"
            if not made.exists():
                yield {"what": "made the catalogue", "s": round(timed(lambda: make_catalogue(made, options.blocks)), 1)}
            if "open" in wanted:
                yield from opening(made, options.blocks)
                yield from ram_block_cost()
            if "lookup" in wanted:
                yield from lookup(made, options.blocks)

    try:
        for figure in figures():
            print(", ".join(f"{key} {value}" if key != "what" else f"{value}:" for key, value in figure.items()))
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps({"sqlite": sqlite3.sqlite_version, **figure}) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
