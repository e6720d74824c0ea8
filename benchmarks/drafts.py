"""Decoding with drafted tokens, without them, when the same was asked before, and by llama.cpp: six kinds of requests.

    python benchmarks/drafts.py MODEL ... [--peer PYTHON] [--rounds 5] [--new 120] [--out FILE]

MODEL is a folder or a GGUF file of a chat model. Each request is answered greedily, by turns with and without drafts
and, for a GGUF file, by llama-cpp-python in the environment PYTHON. All get the same token ids. Times are per token
after the first. Our answers must have the same logits, to the bit. Prints one JSON line per request.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lines import tell
from ratios import spread

from keepwarm import Engine

_REPORT = """The harbour of Norvik was closed on the third of March, after ice had reached the outer mole. Eleven
ships were inside. Captain Lund of the Aurora asked for permission to leave on the fourth and did not get it. The
harbour master, Ida Berg, wrote that the tug Bison could break at most 40 cm of ice, and that 55 cm had been
measured. On the ninth the tug Titan came from Stavby. It freed the Aurora, the Petrel and the Gull on the same
day. The other eight ships left on the tenth. The cost, 84,000 crowns for the tug and 12,500 for pilots, was
shared by tonnage. The owners of the Petrel did not pay, since their ship had been promised a berth in Stavby.
The court in Norvik decided for the harbour in November."""

_CODE = """class Queue:
    def __init__(self, limit):
        self.limit = limit
        self.items = []

    def push(self, item):
        if len(self.items) >= self.limit:
            raise ValueError("the queue is full")
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise ValueError("the queue is empty")
        return self.items.pop(0)

    def __len__(self):
        return len(self.items)
"""

REQUESTS = {
    "explain": "Explain how a refrigerator works.",
    "story": "Write a short story about a lighthouse keeper and his dog.",
    "summary": f"{_REPORT}\n\nSummarize this report.",
    "quote": f"{_REPORT}\n\nWhich sentences of this report are about money? Quote them.",
    "json": f"{_REPORT}\n\nList all ships, tugs and people of this report as JSON objects with the keys name and kind.",
    "edit": f"{_CODE}\nRename the class to Buffer and the method push to put. Print the whole code.",
}

_PEER = """
import json, sys, time, llama_cpp
threads = int(sys.argv[2])
llama = llama_cpp.Llama(sys.argv[1], n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
for line in sys.stdin:
    ids, new = json.loads(line)
    times = []
    for token in llama.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
        times.append(time.perf_counter())
        if len(times) == new:
            break
    print(json.dumps((times[-1] - times[0]) / (new - 1)), flush=True)
"""


class Peer:
    """llama-cpp-python with one file, in a process of its own."""

    def __init__(self, python: str, file: Path, threads: int) -> None:
        command = [python, "-c", _PEER, str(file), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self, ids: list[int], new: int) -> float:
        """Return the seconds that a token takes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([ids, new]), file=self._process.stdin, flush=True)
        return float(json.loads(self._process.stdout.readline()))


def measured(model: Path, peer: str | None, rounds: int, new: int) -> Iterator[dict[str, Any]]:
    import torch

    with (
        Engine.from_pretrained(model, max_disk=0) as drafting,
        Engine.from_pretrained(model, max_disk=0, draft_tokens=0) as plain,
    ):
        theirs = Peer(peer, model, torch.get_num_threads()) if peer and model.suffix == ".gguf" else None
        for name, content in REQUESTS.items():
            messages = [{"role": "user", "content": content}]
            ids = drafting.pipeline.model.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            given: dict[str, Any] = {"max_new_tokens": new, "trace": True, "ignore_eos": True}
            drafting.generate(ids, **given)  # what is asked again below
            rows: list[list[float]] = []
            for _ in range(rounds + 1):
                answers = [engine.generate(ids, **given, reuse="off") for engine in (drafting, plain)]
                answers.append(drafting.generate(ids, **given))
                if len({each.logits_digest for each in answers}) > 1:
                    raise SystemExit(f"{model}: {name}: drafts change the answer")
                rows.append([1 / each.tokens_per_sec for each in answers])
                rows[-1] += [theirs.seconds(ids, new)] if theirs else []
                time.sleep(0.05)
            rows = rows[1:]  # the first one warms up
            found = {
                "model": model.name,
                "request": name,
                "tokens": new,
                "drafted": answers[0].drafted_tokens,
                "accepted": answers[0].accepted_tokens,
                "drafts_ms": round(statistics.median(row[0] for row in rows) * 1e3, 2),
                "without_ms": round(statistics.median(row[1] for row in rows) * 1e3, 2),
                "again_ms": round(statistics.median(row[2] for row in rows) * 1e3, 2),
                **spread([row[1] / row[0] for row in rows]),
                "again": spread([row[1] / row[2] for row in rows]),
            }
            if theirs:
                found["llamacpp_ms"] = round(statistics.median(row[3] for row in rows) * 1e3, 2)
                found["llamacpp"] = spread([row[3] / row[0] for row in rows])
            yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--peer", help="the python of an environment with llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=120)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for model in options.models:
        tell(measured(model, options.peer, options.rounds, options.new), options.out)


if __name__ == "__main__":
    main()
