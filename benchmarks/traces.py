"""What the archive finds of coding-agent sessions, beside what a cache of single tokens without a bound would.

    python benchmarks/traces.py TRACE... [--out benchmarks/results/traces.jsonl]

Each prompt goes the engine's way, but for the model: its pages are named, linked against the archive, and what is new
is stored, with KV of four bytes a token. `best` is the sum over prompts of the longest common beginning with any
earlier one, less at most the last token; it is found by sorting, by none of our code. `share` and `best_share` are of
all prompt tokens. `written`: tokens stored over tokens computed.

A trace names whole blocks. Equal names are equal tokens here, and what a prompt holds behind its last whole block is
what the next request of the conversation goes on with (`evaluation.traces`). Answers are not told, so none is stored.
On disk the archive is closed and opened again at half of the requests.
"""

from __future__ import annotations

import argparse
import bisect
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from keepwarm.compiler.emit import fresh_blocks
from keepwarm.core.blocks import PrefixNames, TokenIds, chain, common_length, token_ids
from keepwarm.core.geometry import KVGeometry, LayerGeometry
from keepwarm.core.ports import Bytes
from keepwarm.core.schedule import Pages
from keepwarm.core.spans import Reuse
from keepwarm.evaluation.traces import UNKNOWN, Trace
from keepwarm.linker.link import NamedPrompt, link
from keepwarm.store import Archive
from keepwarm.testing.kv import namespace

GEOMETRY = KVGeometry((LayerGeometry(1, 1, 1),), "float16")
GRID = Pages(2048)
ROOM = 1 << 50


class Zeros:
    """KV that is all zeros, of a prompt of any length."""

    geometry = GEOMETRY

    def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        return np.zeros((1, end - start, 2), np.uint8)


def prompts(trace: Trace) -> Iterator[TokenIds]:
    """Token ids of each prompt: equal where the trace's blocks are, and nowhere else."""
    alone = trace.distinct
    inside = np.arange(trace.block)
    for number in range(len(trace)):
        nodes = trace.within(number)
        for at, node in enumerate(nodes):
            if node == UNKNOWN:
                nodes[at], alone = alone, alone + 1
        tokens = (np.array(nodes)[:, None] * trace.block + inside).ravel()[: trace.lengths[number]]
        yield token_ids(tokens % 2**32)


class Optimum:
    """All earlier prompts in order: the one that begins most like another is beside the place where that would be."""

    def __init__(self) -> None:
        self._sorted: list[bytes] = []

    def of(self, tokens: TokenIds) -> int:
        """What of a prompt was asked before, less at most the last token; from now on it was, too."""
        raw = tokens.astype(">u4").tobytes()
        at = bisect.bisect(self._sorted, raw)
        near = [np.frombuffer(each, ">u4") for each in self._sorted[max(0, at - 1) : at + 1]]
        self._sorted.insert(at, raw)
        return min(max((common_length(each, tokens) for each in near), default=0), len(tokens) - 1)


def asked(archive: Archive, tokens: TokenIds) -> int:
    """Ask for a prompt and store what is new: tokens found."""
    space = namespace()
    blocks = chain(tokens, GRID.cuts(len(tokens)), space)
    plan = link(NamedPrompt(tokens, blocks, PrefixNames(tokens, space), GRID), archive, Reuse.EXACT)
    fresh = fresh_blocks(blocks, plan)
    archive.put(Zeros(), fresh.blocks, space, names=PrefixNames(tokens, space))
    archive.flush()
    return plan.prefix_end


def replay(trace: Trace, tier: str, folder: Path) -> dict[str, Any]:
    """One trace through one tier."""

    def opened() -> Archive:
        if tier == "ram":
            return Archive.open(None, max_ram=ROOM, max_disk=0)
        return Archive.open(folder, max_ram=0, max_disk=ROOM)

    archive, optimum = opened(), Optimum()
    found = best = 0
    for number, tokens in enumerate(prompts(trace)):
        if tier == "disk" and number == len(trace) // 2:
            archive.close()
            archive = opened()
        best += optimum.of(tokens)
        found += asked(archive, tokens)
    stored = sum(entry.tokens for entry in archive.contents.entries())
    archive.close()
    return {
        "trace": trace.name,
        "tier": tier,
        "requests": len(trace),
        "tokens": trace.tokens,
        "found": found,
        "best": best,
        "share": round(found / trace.tokens, 6),
        "best_share": round(best / trace.tokens, 6),
        "of_best": round(found / best, 6) if best else 1.0,
        "written": round(stored / (trace.tokens - found), 4),
    }


def rows(files: list[Path]) -> Iterator[dict[str, Any]]:
    """Every trace by itself, and all together by time, in either tier."""
    traces = [Trace.read(file) for file in files]
    if len(files) > 1:
        traces.append(Trace.read(*files))
    for trace in traces:
        for tier in ("ram", "disk"):
            with tempfile.TemporaryDirectory() as folder:
                yield replay(trace, tier, Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = []
    for row in rows(options.traces):
        lines.append(json.dumps(row))
        print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
