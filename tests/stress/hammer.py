"""Several processes at one store for a bounded time: the cap holds, counters add up, no wrong bytes.

python tests/stress/hammer.py [--processes 8] [--seconds 30] [--seed 0] [--out results.jsonl]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.stress.common import TURNS, check_books, conversation, folder_size

from keepwarm.errors import StoreError
from keepwarm.store import Archive
from keepwarm.store.eviction import PolicyName
from keepwarm.store.retention import Rules

CAP = 2_000_000  # bytes
RAM = 200_000
CONVERSATIONS = 60  # shared by all processes; about a third fits


def work(folder: Path, seed: int, seconds: float) -> dict[str, int]:
    """Store, load, pin, compact and remove at random; returns what this process counted itself."""
    chance = random.Random(seed)
    rules = Rules(ram_policy=chance.choice(get_args(PolicyName)), disk_policy=chance.choice(get_args(PolicyName)))
    mine: Counter[str] = Counter()
    end = time.monotonic() + seconds
    with Archive.open(folder, max_ram=RAM, max_disk=CAP, rules=rules) as archive:
        while time.monotonic() < end:
            each = conversation(int(chance.triangular(0, CONVERSATIONS, 0)))
            turns = each.check(archive)
            mine["loads"] += turns > 0
            mine["turns"] += turns
            archive.contents.count("asked")
            mine["asked"] += 1
            if turns < TURNS and chance.random() < 0.7:
                each.put(archive, 0, min(TURNS, turns + chance.randint(1, 4)))
            elif chance.random() < 0.05:
                with suppress(StoreError):
                    archive.contents.retain(each.ids[0], chance.uniform(0.1, 2.0), chance.randint(0, 2))
            elif chance.random() < 0.03 and (refs := archive.lookup(each.ids)):
                archive.remove(refs[-1].run_id)
            elif chance.random() < 0.03:
                archive.compact()
            if chance.random() < 0.1:
                archive.flush()
            assert archive.stats()["bytes"]["ram"] <= RAM, "RAM exceeds its cap"
        archive.flush()
        stats = archive.stats()
    mine.update(
        evicted_disk=stats["evictions"]["disk"],
        corrupt=stats["corrupt"],
        store_errors=stats["store_errors"],
        dropped_writes=stats["dropped_writes"],
        compacted=stats["extra"]["compacted"],
    )
    return dict(mine)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the store is made; a temporary folder by default")
    parser.add_argument("--out", type=Path, help="the figures are added to this file")
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="keepwarm-hammer-", dir=options.folder))
    try:
        figures = hammer(folder, options.processes, options.seconds, options.seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(figures))
    if options.out:
        with options.out.open("a") as file:
            file.write(json.dumps(figures) + "\n")
    return figures


def hammer(folder: Path, processes: int, seconds: float, seed: int) -> dict[str, Any]:
    """Raises AssertionError when something is not as promised."""
    for number in range(CONVERSATIONS):  # made once, shared by the forks
        conversation(number)
    workers = [start(folder, seed * 1000 + number, seconds) for number in range(processes)]
    most, looks, over = 0, 0, 0
    left = {pid for pid, _ in workers}
    while left:
        # A walk over a changing folder may count a file that is gone by its end; three in a row do not.
        size = folder_size(folder)
        over = over + 1 if size > CAP else 0
        if over >= 3:
            parts: Counter[str] = Counter()
            for path in folder.rglob("*"):
                with suppress(OSError):
                    parts[path.suffix or path.name] += path.stat().st_size if path.is_file() else 0
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"{size} bytes under a cap of {CAP}: {dict(parts)}")
        most, looks = max(most, size if size <= CAP else 0), looks + 1
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.01)
    totals: Counter[str] = Counter()
    for _, read in workers:
        with os.fdopen(read) as lines:
            said = json.loads(lines.read() or '{"error": "a worker died"}')
        assert "error" not in said, said
        totals.update(said)
    with Archive.open(folder, max_ram=0, max_disk=CAP) as archive:
        shared = archive.contents.counters()
        for name in ("asked", "evicted_disk", "corrupt", "store_errors", "dropped_writes", "compacted"):
            assert shared.get(name, 0) == totals[name], f"{name}: {shared.get(name, 0)} merged, {totals[name]} counted"
        assert totals["corrupt"] == 0, "a run was damaged"
        served = sum(conversation(number).check(archive) for number in range(CONVERSATIONS))
    check_books(folder)
    return {
        "what": "hammer",
        "seed": seed,
        "processes": processes,
        "seconds": seconds,
        "cap": CAP,
        "most_bytes": most,
        "looks": looks,
        "turns_left": served,
        **totals,
        "wrong_bytes": 0,
    }


def start(folder: Path, seed: int, seconds: float) -> tuple[int, int]:
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    try:
        os.close(read)
        said: dict[str, Any] = work(folder, seed, seconds)
    except BaseException as error:
        said = {"error": repr(error)}
    with suppress(OSError):
        os.write(write, json.dumps(said).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
