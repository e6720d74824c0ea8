"""Random edits of stored conversations: KV that is reused belongs to exactly the tokens it is used for.

python tests/stress/edits.py [--edits 10000] [--seed 0] [--tokenizer smollm2 ...] [--out results.jsonl]

Every edit is rendered, tokenized (canonically, or keeping ids as generated), linked against a real archive and loaded.
A made-up KV holds at every position a number drawn from all token ids up to there, so that a slice that is one token
off, or stands on another context, shows.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.helpers import tokenizers

from keepwarm.compiler.emit import fresh_blocks, stored_end
from keepwarm.compiler.segment import CompiledPrompt, segment
from keepwarm.core.blocks import PrefixNames, TokenIds, chain
from keepwarm.core.geometry import KVGeometry, LayerGeometry
from keepwarm.core.request import Request
from keepwarm.core.schedule import Pages, Schedule
from keepwarm.core.spans import Exactness, Reuse
from keepwarm.linker.link import NamedPrompt, link
from keepwarm.linker.text import TextPolicy, grown
from keepwarm.models.choose import choose_adapter
from keepwarm.store import Archive
from keepwarm.testing.kv import MemoryKV, namespace

SHAPE = KVGeometry((LayerGeometry(1, 4, 4),), "bfloat16")
GRIDS = Pages(96), Schedule(96, 32)  # of the two kinds of arithmetic
LETTERS = "abc XYZ 0189 .,'\n\t-é\u0301中文字🙂👩\u200d👧\u00a0ﬁß\u1100\u1161"
WORDS = [
    "the",
    "harbour",
    "ship",
    "clerk",
    "naïve",
    "e\u0301tude",
    "中文",
    "🙂",
    "42",
    "don't",
    "x=1;\n",
    "  ",
    "<|im_",
    "[INST",
]


def kv_of(tokens: TokenIds) -> MemoryKV:
    """KV whose every byte is a function of the tokens up to its position."""
    made = MemoryKV(SHAPE, len(tokens))
    rolled = 1469598103934665603
    for position, token in enumerate(tokens.tolist()):
        rolled = ((rolled ^ token) * 1099511628211) & (1 << 64) - 1
        number = np.frombuffer((rolled ^ rolled >> 29).to_bytes(8, "little"), np.uint8)
        for keys_or_values in made.arrays[0]:
            keys_or_values[0, position] = number
    return made


def text(chance: random.Random) -> str:
    if chance.random() < 0.3:
        return "".join(chance.choices(LETTERS, k=chance.randint(1, 30)))
    return " ".join(chance.choices(WORDS, k=chance.randint(1, 60)))


def edited(chance: random.Random, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """One change: inside a message, its end, white space; or the conversation goes on, back, or elsewhere."""
    copy = [dict(message) for message in messages]
    kind = chance.randrange(9)
    at = chance.randrange(len(copy))
    content = copy[at]["content"]
    place = chance.randint(0, len(content))
    if kind == 0:
        copy[at]["content"] = content[:place] + text(chance) + content[place:]
    elif kind == 1:
        copy[at]["content"] = content[:place] + content[place + chance.randint(1, 5) :]
    elif kind == 2:
        copy[at]["content"] = content[:place] + chance.choice(LETTERS) + content[place + 1 :]
    elif kind == 3:
        copy[at]["content"] = chance.choice((content.strip(), content + " ", " " + content, content + "\n\n"))
    elif kind == 4 and len(copy) > 3:
        del copy[-(2 - len(copy) % 2) :]
    elif kind == 5:
        copy[at]["content"] = text(chance)
    if copy[-1]["role"] == "user":
        if kind >= 6:
            copy += [{"role": "assistant", "content": text(chance)}, {"role": "user", "content": text(chance)}]
    else:
        copy.append({"role": "user", "content": text(chance)})
    return copy


class Stand:
    """One tokenizer, its conversations, and an archive of the KV of what was "run"."""

    def __init__(self, name: str, archive: Archive, chance: random.Random) -> None:
        self.tokenizer = tokenizers.wrapped(name)
        self.raw = tokenizers.loaded(name)
        self.adapter = choose_adapter({}, self.tokenizer)
        self.archive, self.chance = archive, chance
        self.spaces = [namespace(weights=name, torch=kind) for kind in ("invariant", "scheduled")]
        self.stored: list[tuple[list[dict[str, str]], Any]] = []
        self.counts: Counter[str] = Counter()

    def turn(self) -> None:
        """One edit of a stored conversation, or a new one; checked, then stored itself."""
        chance = self.chance
        if self.stored and chance.random() < 0.97:
            messages, ran = chance.choice(self.stored[-40:])
            messages = edited(chance, messages)
        else:
            messages, ran = [{"role": "user", "content": text(chance)}], None
        marked = [m | {"cache_control": {}} if m["role"] == "assistant" else m for m in messages]
        policy = TextPolicy(self.tokenizer, ran if chance.random() < 0.5 else None)
        compiled = segment(Request(messages=marked), policy, self.adapter)
        self.check_ids(compiled, ran)
        self.check_kv(compiled, chance.choice((Reuse.EXACT, Reuse.PREFIX)))
        wanted = text(chance)
        cut = chance.randint(0, len(wanted))  # a model may split words as the tokenizer would not, and stop anywhere
        answer = [
            i for part in (wanted[:cut], wanted[cut:]) for i in self.raw(part, add_special_tokens=False)["input_ids"]
        ]
        answer = answer[: chance.randint(1, len(answer))]
        assert compiled.source is not None
        said = self.tokenizer.decode(answer)
        self.stored.append((
            [*messages, {"role": "assistant", "content": said}],
            grown(compiled.source, answer, self.tokenizer),
        ))
        del self.stored[:-200]

    def check_ids(self, compiled: CompiledPrompt, ran: Any) -> None:
        assert compiled.source is not None
        if compiled.match.as_generated:
            kept = compiled.match.kept
            assert compiled.tokens[:kept].tolist() == ran.ids[:kept].tolist(), "ids that were not run"
            assert self.tokenizer.decode(compiled.tokens[kept:].tolist()) in self.forms(compiled, kept)
            self.counts["as_generated"] += 1
        else:
            whole = self.raw(compiled.source.text, add_special_tokens=False)["input_ids"]
            assert compiled.tokens.tolist() == whole, "not the ids of the whole text"
            self.counts["taken_from_earlier"] += compiled.match.kept > 0
        self.counts[compiled.match.outcome.value] += 1

    def forms(self, compiled: CompiledPrompt, kept: int) -> tuple[str, str]:
        """What the tokens after the kept ones must say: the text, or what the tokenizer makes of it."""
        assert compiled.source is not None
        ends = compiled.source.offsets[:, 1]
        rest = compiled.source.text[int(ends[kept - 1]) :]
        return rest, self.tokenizer.decode(self.raw(rest, add_special_tokens=False)["input_ids"])

    def check_kv(self, compiled: CompiledPrompt, reuse: Reuse) -> None:
        tokens = compiled.tokens
        grid, space = self.chance.choice(list(zip(GRIDS, self.spaces, strict=True)))
        blocks = chain(tokens, grid.cuts(len(tokens), compiled.breakpoints), space)
        plan = link(NamedPrompt(tokens, blocks, PrefixNames(tokens, space), grid), self.archive, reuse)
        expected, sink = kv_of(tokens), MemoryKV(SHAPE, len(tokens))
        for load in plan.loads:
            self.archive.load(load.refs, tokens[load.start : load.end], load.end, sink)
        assert sink.same(expected, 0, plan.cached_tokens), "KV of other tokens was reused"
        self.counts["tokens"] += len(tokens)
        self.counts["reused_tokens"] += plan.cached_tokens
        if plan.exactness is not Exactness.EXACT:  # what follows is named after the stored block that it stands on
            blocks = chain(tokens, grid.cuts(len(tokens), compiled.breakpoints, [stored_end(plan)]), space)
        fresh = fresh_blocks(blocks, plan)
        self.archive.put(expected, fresh.blocks, space, fresh.ids, parent=fresh.parent)
        if self.chance.random() < 0.3:
            self.archive.flush()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", nargs="+", default=list(tokenizers.NAMES), choices=tokenizers.NAMES)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    chance = random.Random(options.seed)
    started = time.perf_counter()
    with Archive.open(None, max_ram=64 << 20, max_disk=0) as archive:
        stands = [Stand(name, archive, chance) for name in options.tokenizer]
        for number in range(options.edits):
            stands[number % len(stands)].turn()
    total = sum((stand.counts for stand in stands), Counter())
    memos = [stand.tokenizer._memo for stand in stands]
    figures = {
        "edits": options.edits,
        "seed": options.seed,
        "tokenizers": options.tokenizer,
        "seconds": round(time.perf_counter() - started, 1),
        **total,
        "seams_compared": sum(memo.resyncs for memo in memos if memo),
        "seams_that_differed": sum(memo.failed for memo in memos if memo),
        "wrong": 0,  # else an assertion ended the run
    }
    print(json.dumps(figures))
    if options.out:
        with options.out.open("a") as file:
            print(json.dumps(figures), file=file)
    return figures


if __name__ == "__main__":
    main()
