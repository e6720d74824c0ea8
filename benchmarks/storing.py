"""What is worth the disk: coding-agent sessions under several rules of what is written.

    python benchmarks/storing.py TRACE... [--out FILE]

Each request goes the engine's way, but for the model, over a store on disk with nothing in RAM: as if every request
were the first of a new process. A request's answer is what the next one that goes on from its prompt has there, as many
tokens as the trace says; an answer that none goes on from is asked for nowhere. Per rule and over all traces: `found`,
tokens that need not be computed; `written`, tokens on disk; and against writing everything `lost`, tokens computed
again, `saved`, tokens not written, and `lost_per_saved`. Writing a token is worth it while computing one takes longer
than writing `1 / lost_per_saved` of them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from traces import GRID, ROOM, Zeros, prompts

from keepwarm.compiler.emit import fresh_blocks
from keepwarm.core.blocks import PrefixNames, TokenIds, chain, token_ids
from keepwarm.core.spans import Reuse
from keepwarm.evaluation.traces import Trace
from keepwarm.linker.link import NamedPrompt, link
from keepwarm.store import Archive
from keepwarm.store.retention import Rules
from keepwarm.testing.kv import namespace

RULES: dict[str, tuple[Rules, bool]] = {  # and whether answers are stored
    "everything": (Rules(), True),
    "no answers": (Rules(), False),
    "at least 64 tokens": (Rules(min_write=64), True),
    "at least 256 tokens": (Rules(min_write=256), True),
    "at least 1,024 tokens": (Rules(min_write=1024), True),
    "what is asked twice": (Rules(admit="second_use"), True),
}


def answered(trace: Trace) -> Iterator[tuple[int, TokenIds]]:
    """Each prompt's length, and its tokens with those of its answer."""
    asked = list(prompts(trace))
    for number, tokens in enumerate(asked):
        length, count = len(tokens), trace.answers[number]
        later = (each for each in asked[number + 1 :] if len(each) > length and np.array_equal(each[:length], tokens))
        following = next(later, None)
        unknown = token_ids((1 << 30) + 8192 * number + np.arange(count))
        yield length, np.concatenate([tokens, unknown if following is None else following[length : length + count]])


def replay(trace: Trace, rules: Rules, with_answers: bool, folder: Path) -> tuple[int, int]:
    """One trace: tokens found, tokens on disk afterwards."""
    found, space = 0, namespace()
    with Archive.open(folder, max_ram=0, max_disk=ROOM, rules=rules) as archive:
        for length, tokens in answered(trace):
            prompt = tokens[:length]
            blocks = chain(prompt, GRID.cuts(length), space)
            plan = link(NamedPrompt(prompt, blocks, PrefixNames(prompt, space), GRID), archive, Reuse.EXACT)
            found += plan.prefix_end
            kept = tokens if with_answers else prompt
            fresh = fresh_blocks(chain(kept, GRID.cuts(len(kept)), space), plan)
            archive.put(Zeros(), fresh.blocks, space, names=PrefixNames(kept, space))
            archive.flush()
        return found, sum(entry.tokens for entry in archive.contents.entries())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    traces = [Trace.read(file) for file in options.traces]
    lines: list[dict[str, Any]] = []
    for name, (rules, with_answers) in RULES.items():
        pairs = []
        for trace in traces:
            with tempfile.TemporaryDirectory() as folder:
                pairs.append(replay(trace, rules, with_answers, Path(folder)))
        found, written = (sum(pair[at] for pair in pairs) for at in (0, 1))
        line: dict[str, Any] = {"rule": name, "tokens": sum(trace.tokens for trace in traces)}
        line |= {"answers": sum(sum(trace.answers) for trace in traces), "found": found, "written": written}
        if lines:
            lost, saved = lines[0]["found"] - found, lines[0]["written"] - written
            line |= {"lost": lost, "saved": saved, "lost_per_saved": round(lost / saved, 3) if saved else None}
        lines.append(line)
        print(json.dumps(line), flush=True)
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
