"""Keepwarm's chunk reuse beside KVBoost's, in one run: the same weights, texts and threads, wall-clock times.

    python benchmarks/peers/chunks.py [--rounds 5] [--documents 4] [--dtype float32] [--work FOLDER]

KVBoost comes from the Python Package Index into an environment of its own in `--work`, made once. Two workloads, over
documents that were warmed one by one: `same beginning` (header and documents were asked about before, the question is
new) and `documents moved` (another order, after a header that was never seen). The engines take turns in every round;
only the one whose turn it is runs. Right is what an engine's own full prefill answers greedily: the share of the first
16 tokens before the first other one, and how often all are the same.

Writes `peers-chunks.jsonl`, which `python -m papers chunks --peers` puts into its report, and prints it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import environments
from child import Child

from keepwarm.config import cache_dir
from keepwarm.runtime.demo_model import demo_model
from papers.chunks.bench import HEADERS, documents

HERE = Path(__file__).parent
ADAPTERS = {"keepwarm": ("keepwarm_chunks.py", environments.own), "kvboost": ("kvboost_peer.py", environments.kvboost)}
ANSWER = 16
CASES = ("same beginning", "documents moved")


def parts(case: str, number: int, count: int) -> list[str]:
    """A request's text in parts; no two requests have the same question."""
    chosen = documents()[:count]
    asked = chosen[number % count]["question"]
    header = HEADERS[0]
    if case == CASES[1]:
        turned = chosen[number % (count - 1) + 1 :] + chosen[: number % (count - 1) + 1]
        chosen, header = turned, f"Request {number}. {HEADERS[number % len(HEADERS)]}"
    return [f"{header}\n\n", *(body(document) for document in chosen), f"Question {number}: {asked}\nAnswer:"]


def body(document: dict[str, str]) -> str:
    return f"# {document['title']}\n\n{document['text']}\n\n"


def play(peers: dict[str, Child], options: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """All rounds; after each, the rows of all so far."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for name, peer in peers.items():
        peer.awake("warm", texts=[body(document) for document in documents()[: options.documents]])
        for kind in peer.hits:
            peer.awake("ask", kind=kind, parts=parts(CASES[0], 999, options.documents), new_tokens=1)
        print(f"{name}: warm", file=sys.stderr, flush=True)
    for number in range(options.rounds):
        for case in CASES:
            given = parts(case, number, options.documents)
            for name, peer in peers.items():
                cold = peer.awake("ask", kind="off", parts=given, new_tokens=ANSWER)
                found[name, "off", case].append(cold | {"right": cold["tokens"]})
                for kind in peer.hits:
                    answer = peer.awake("ask", kind=kind, parts=given, new_tokens=ANSWER)
                    found[name, kind, case].append(answer | {"right": cold["tokens"]})
        print(f"round {number}", file=sys.stderr, flush=True)
        yield [row(*key, answers) for key, answers in found.items()]


def row(peer: str, kind: str, case: str, answers: list[dict[str, Any]]) -> dict[str, Any]:
    leading = []
    for answer in answers:
        pairs = list(zip(answer["tokens"], answer["right"], strict=False))
        leading.append(next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs)) / len(answer["right"]))
    told = [answer["told"] for answer in answers if answer["told"] is not None]
    return {
        "peer": peer,
        "kind": kind,
        "case": case,
        "n": len(answers),
        "prompt_tokens": answers[-1]["prompt"],
        "ttft_ms": round(statistics.median(answer["ttft"] for answer in answers), 1),
        "told_ms": round(statistics.median(told), 1) if told else None,
        "reused": round(statistics.fmean(answer["cached"] / answer["prompt"] for answer in answers), 4),
        "agree": round(statistics.fmean(leading), 4),
        "same": sum(share == 1 for share in leading),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--work", type=Path, default=cache_dir() / "peers", help="environments, logs")
    parser.add_argument("--output", type=Path, default=HERE.parent / "results" / "peers-chunks.jsonl")
    options = parser.parse_args()
    work = options.work.expanduser().resolve()
    work.mkdir(parents=True, exist_ok=True)
    model = demo_model(print)
    with ExitStack() as stack:
        peers: dict[str, Child] = {}
        for name, (adapter, environment) in ADAPTERS.items():
            python = environment(work)
            child = Child(
                name,
                [str(python), str(HERE / adapter)],
                work / f"{name}-chunks.log",
                {"OMP_NUM_THREADS": str(options.threads)},
            )
            stack.callback(child.close)
            child.load(
                model=str(model),
                dtype=options.dtype,
                threads=options.threads,
                capacity=4096,
                work=str(work),
                options={},
            )
            peers[name] = child
        about = {
            "model": model.name,
            "dtype": options.dtype,
            "threads": options.threads,
            "kvboost": peers["kvboost"].about["kvboost"],
            "repair": peers["keepwarm"].about["repair"],
        }
        lines = [about]
        for rows in play(peers, options):
            lines = [about, *rows]
            options.output.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print("\n".join(json.dumps(line) for line in lines))


if __name__ == "__main__":
    main()
