"""Damages run files in every way and asks the archive for them: each must be a miss, none may be served.

    python tests/stress/bitflips.py --count 10000 --seed 0

Prints one JSON line: damages made by kind, how many were misses, and how many were served (which must be 0). Ends
with 1 when any was served or went unnoticed. Half of the damages are made to an encrypted store.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from keepwarm.core.blocks import Block, TokenIds
from keepwarm.errors import CorruptRun
from keepwarm.store import Archive
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, namespace, prompt

LENGTH, HALF = 96, 6  # tokens of a prompt; blocks of its first run
PROMPTS = 4
KINDS = {
    "flip": 60,  # one bit
    "truncate": 10,
    "extend": 4,
    "zeros": 6,  # a stretch that was never written
    "swap files": 8,
    "swap pieces": 6,  # the same stretch of two files
    "move pieces": 6,  # two stretches of one file
}


class Store:
    """A store with some prompts, each in two runs."""

    def __init__(self, folder: Path, key: bytes | None) -> None:
        self.folder = folder
        self.archive = Archive.open(folder, max_ram=0, max_disk=1 << 26, key=key)
        self.tokens: list[TokenIds] = [prompt(LENGTH, seed) for seed in range(PROMPTS)]
        self.blocks: list[tuple[Block, ...]] = [blocks_of(tokens) for tokens in self.tokens]
        self.kv = [MemoryKV.random(UNEVEN, LENGTH, seed) for seed in range(PROMPTS)]
        self.mend()

    def mend(self) -> None:
        """Store again what is missing, and clear the quarantine."""
        for kv, blocks in zip(self.kv, self.blocks, strict=True):
            for last in (HALF, None):
                self.archive.put(kv, blocks[:last], namespace())
        self.archive.flush()
        for path in (self.folder / "quarantine").iterdir():
            path.unlink()
        assert [self.found(which) for which in range(PROMPTS)] == [LENGTH] * PROMPTS, (
            "an undamaged prompt must be served"
        )

    def path(self, which: int, run: int) -> Path:
        """File of a prompt's first or second run."""
        ref = self.archive.lookup([block.exact for block in self.blocks[which]])[0 if run == 0 else HALF]
        return self.folder / "runs" / f"{ref.run_id}.safetensors"

    def found(self, which: int) -> int:
        """Tokens of a prompt that are served, -1 when bytes are wrong; runs that fail are quarantined on the way."""
        tokens, blocks = self.tokens[which], self.blocks[which]
        while refs := self.archive.lookup([block.exact for block in blocks]):
            sink = MemoryKV(UNEVEN, LENGTH)
            try:
                self.archive.load(refs, tokens[: refs[-1].end], refs[-1].end, sink)
            except CorruptRun:
                continue
            return refs[-1].end if sink.same(self.kv[which], 0, refs[-1].end) else -1
        return 0


def damage(kind: str, one: Path, other: Path, generator: random.Random) -> bool:
    """Damage a file, or two; False when that changed no byte."""
    good, stranger = one.read_bytes(), other.read_bytes()
    bad, at = bytearray(good), generator.randrange(len(good))
    if kind == "flip":
        bad[at] ^= 1 << generator.randrange(8)
    elif kind == "truncate":
        del bad[at:]
    elif kind == "extend":
        bad += generator.randbytes(generator.randrange(1, 9000))
    elif kind == "zeros":
        size = min(generator.choice((1, 64, 4096)), len(bad) - at)
        bad[at : at + size] = bytes(size)
    elif kind == "swap files":
        bad = bytearray(stranger)
        other.write_bytes(good)
    else:
        size = generator.choice((8, 32, 512, 4096))
        at = generator.randrange(max(1, min(len(good), len(stranger)) - size))
        if kind == "swap pieces":
            changed = bytearray(stranger)
            bad[at : at + size], changed[at : at + size] = changed[at : at + size], bad[at : at + size]
            other.write_bytes(changed)
        else:
            to = generator.randrange(max(1, len(bad) - size))
            bad[at : at + size], bad[to : to + size] = bad[to : to + size], bad[at : at + size]
    one.write_bytes(bad)
    return bytes(bad) != good


def run(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Make `count` damages; returns the figures."""
    generator = random.Random(seed)
    stores = [Store(folder / "plain", None), Store(folder / "encrypted", bytes(range(32)))]
    made: Counter[str] = Counter()
    noticed = served = 0
    started = time.perf_counter()
    while sum(made.values()) < count:
        store = stores[sum(made.values()) % 2]
        kind = generator.choices(list(KINDS), list(KINDS.values()))[0]
        which, stranger = generator.sample(range(PROMPTS), 2)
        at = generator.randrange(2)
        two = kind.startswith("swap")
        if not damage(kind, store.path(which, at), store.path(stranger, at), generator):
            continue
        made[kind] += 1
        results = {each: store.found(each) for each in range(PROMPTS)}
        served += sum(tokens < 0 for tokens in results.values())
        left = 0 if at == 0 else HALF * 8
        hit = {which, stranger} if two else {which}
        noticed += all(tokens == (left if each in hit else LENGTH) for each, tokens in results.items())
        store.mend()
    for store in stores:
        store.archive.close()
    return {
        "stress": "bitflips",
        "count": count,
        "seed": seed,
        "by_kind": dict(sorted(made.items())),
        "misses": noticed,
        "served": served,
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="damages to make")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="append the line to this file, too")
    arguments = parser.parse_args()
    logging.getLogger("keepwarm").setLevel(logging.ERROR)  # a line per damage otherwise
    with tempfile.TemporaryDirectory() as folder:
        report = run(arguments.count, arguments.seed, Path(folder))
    line = json.dumps(report)
    print(line)
    if arguments.out:
        with arguments.out.open("a") as out:
            out.write(line + "\n")
    sys.exit(0 if report["misses"] == report["count"] and report["served"] == 0 else 1)


if __name__ == "__main__":
    main()
