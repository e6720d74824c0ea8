"""Kill -9 at random moments of writing, evicting and compacting.

    python tests/stress/kill9.py [--rounds 100] [--seed 0] [--out results.jsonl]

Every round, two processes write growing conversations into one store, compact it, and are killed at random moments.
Then the store must open, serve nothing wrong, and (in the rounds without eviction) hold all that was acknowledged;
its books must add up, name exactly the files that are there, and stay under the cap. Stops at the first fault; prints
what was met.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.stress.common import TURNS, check_books, conversation, folder_size

from keepwarm.store import Archive
from keepwarm.store.retention import Rules

ROOMY = 1 << 30
TIGHT = 1_100_000  # bytes: the catalogue and some twenty conversations
FRESH_AFTER = 40  # rounds that a store is used for
WORKERS = 2
MOST_SECONDS = 2.0  # that a worker is waited for


def work(folder: Path, cap: int, seeds: list[int], seed: int, out: int) -> None:
    """Grow conversations until killed; each line says what is durable by then."""
    chance = random.Random(seed)
    policies = ("lru", "lfu", "s3fifo")
    archive = Archive.open(folder, max_ram=0, max_disk=cap, rules=Rules(disk_policy=policies[seed % 3]))  # type: ignore[arg-type]
    os.write(out, b"open\n")
    grown, evicted = dict.fromkeys(seeds, 0), 0
    while True:
        each = chance.choice(seeds)
        turns = min(TURNS, grown[each] + chance.randint(1, 3))
        if turns == grown[each]:
            conversation(each).check(archive)
            archive.flush()
            grown[each] = 0
            continue
        dropped = archive.stats()["dropped_writes"]
        conversation(each).put(archive, 0, turns)
        archive.flush()
        if archive.stats()["dropped_writes"] == dropped:
            os.write(out, b"%d %d\n" % (each, turns))
        grown[each] = turns
        merged = archive.compact() if chance.random() < 0.3 else 0
        gone = archive.stats()["evictions"]["disk"]
        if merged or gone > evicted:
            os.write(out, b"note %d %d\n" % (gone - evicted, merged))
            evicted = gone


def start(folder: Path, cap: int, seeds: list[int], seed: int) -> tuple[int, int]:
    """Fork a worker; returns its process number and where it writes its lines."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    try:
        os.close(read)
        work(folder, cap, seeds, seed, write)
    except BaseException as error:
        os.write(write, f"failed {error!r}\n".encode())
    finally:
        os._exit(1)


def run_round(folder: Path, cap: int, number: int, chance: random.Random, totals: Counter[str]) -> dict[int, int]:
    """Start workers, kill them; returns the turns acknowledged by conversation."""
    workers = [
        start(folder, cap, [number * 100 + worker * 10 + at for at in range(3)], number * WORKERS + worker)
        for worker in range(WORKERS)
    ]
    said = {read: b"" for _, read in workers}
    # A worker is killed a moment after it said so many lines: before it has opened the store, or in the midst of work.
    alive = {read: (pid, chance.randint(0, 14)) for pid, read in workers}
    end = time.monotonic() + MOST_SECONDS
    while alive:
        left = max(0.0, end - time.monotonic())
        ready, _, _ = select.select(list(alive), [], [], left) if any(n for _, n in alive.values()) else ([], [], [])
        for read in ready:
            said[read] += os.read(read, 1 << 16)
        for read, (pid, lines) in list(alive.items()):
            if said[read].count(b"\n") >= lines or not left:
                time.sleep(chance.uniform(0.0, 0.02))
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                del alive[read]
    acknowledged: dict[int, int] = {}
    for read, begun in said.items():
        with os.fdopen(read, "rb") as pipe:
            text = (begun + pipe.read()).decode()
        for line in text.splitlines():
            if line.startswith("failed"):
                raise AssertionError(f"a worker {line}")
            if line.startswith("note"):
                totals["evicted_runs"] += int(line.split()[1])
                totals["compacted_files"] += int(line.split()[2])
            elif line != "open":
                each, turns = map(int, line.split())
                acknowledged[each] = max(acknowledged.get(each, 0), turns)
                totals["acknowledged_writes"] += 1
    totals["kills"] += len(workers)
    return acknowledged


def verify(folder: Path, cap: int, acknowledged: dict[int, int], recent: list[int]) -> Counter[str]:
    """Open the store and look at everything; raises AssertionError when something is not as promised."""
    found: Counter[str] = Counter()
    with Archive.open(folder, max_ram=0, max_disk=cap) as archive:
        for each in {*acknowledged, *recent}:
            turns = conversation(each).check(archive)
            found["served"] += turns
            if cap == ROOMY:
                wanted = acknowledged.get(each, 0)
                assert turns >= wanted, f"conversation {each}: {wanted} turns were acknowledged, {turns} are there"
        stats = archive.stats()
        assert stats["corrupt"] == 0, "a run was damaged"
        assert stats["store_errors"] == 0, "the store failed"
    size = folder_size(folder)
    assert size <= cap, f"{size} bytes under a cap of {cap}"
    check_books(folder)
    return found


def main(arguments: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="of two kills each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the stores are made; a temporary folder by default")
    parser.add_argument("--out", type=Path, help="the figures are added to this file")
    options = parser.parse_args(arguments)
    chance = random.Random(options.seed)
    base = Path(tempfile.mkdtemp(prefix="keepwarm-kill9-", dir=options.folder))
    totals: Counter[str] = Counter()
    began = time.monotonic()
    kept: dict[int, dict[int, int]] = {ROOMY: {}, TIGHT: {}}
    try:
        for number in range(options.rounds):
            cap = (ROOMY, TIGHT)[number % 2]
            folder = base / f"{cap}-{number // FRESH_AFTER}"
            if not folder.exists():
                kept[cap] = {}
            acknowledged = run_round(folder, cap, options.seed * 1_000_000 + number, chance, totals)
            kept[cap].update(acknowledged)
            some = chance.sample(sorted(kept[cap]), min(6, len(kept[cap])))
            checked = {each: kept[cap][each] for each in {*acknowledged, *some}}
            totals.update(verify(folder, cap, checked, list(checked)))
            if (number + 1) % FRESH_AFTER == 0 or number + 1 == options.rounds:
                for old in base.iterdir():
                    shutil.rmtree(old)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    figures: dict[str, object] = {
        "what": "kill -9",
        "seed": options.seed,
        "kills": totals["kills"],
        "acknowledged_writes": totals["acknowledged_writes"],
        "turns_verified": totals["served"],
        "evicted_runs": totals["evicted_runs"],
        "compacted_files": totals["compacted_files"],
        "wrong_bytes": 0,
        "lost_acknowledged": 0,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(figures))
    if options.out:
        with options.out.open("a") as file:
            file.write(json.dumps(figures) + "\n")
    return figures


if __name__ == "__main__":
    main()
