"""Many requests at once on one warm prefix: Keepwarm's `Batcher` beside vLLM and transformers' continuous batching.

    python benchmarks/peers/at_once.py [--peers vllm transformers ...] [--requests 1 4 16 32] [--rounds 3]

As run.py: environments of their own, one process at a time, the same prompts and greedy decoding, all requests sent at
the same moment. The prefix is warm: every peer has answered a request on it. llama.cpp's Python library decodes one
sequence at a time, so it has no place here. Writes `peers-at-once.jsonl` and prints a Markdown table. Needs an
otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from child import Child, PeerFailed
from run import HERE, PEERS, chats, say, start

from keepwarm.config import cache_dir
from keepwarm.errors import KeepwarmError

DEFAULT = ("transformers", "vllm")


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians per number of requests and peer; `times_keepwarm` is paired within a round."""
    made = []
    for count, name in sorted({(row["requests"], row["peer"]) for row in rows}):
        own = [row for row in rows if (row["requests"], row["peer"]) == (count, name)]
        base = {row["round"]: row for row in rows if (row["requests"], row["peer"]) == (count, "keepwarm")}
        ratios = [base[row["round"]]["tokens_per_second"] / row["tokens_per_second"] for row in own]
        made.append({
            "requests": count,
            "peer": name,
            "tokens_per_second": round(statistics.median(row["tokens_per_second"] for row in own), 1),
            "ttft_p50_ms": round(statistics.median(row["ttft_p50_ms"] for row in own), 1),
            "ttft_max_ms": round(statistics.median(row["ttft_max_ms"] for row in own), 1),
            "keepwarm_is_times_faster": round(statistics.median(ratios), 2),
        })
    return made


def markdown(lines: list[dict[str, Any]]) -> str:
    head = "| requests | peer | tokens/s | TTFT p50, ms | TTFT max, ms | Keepwarm is ... times faster |"
    cells = [" | ".join(str(value) for value in line.values()) for line in lines]
    return "\n".join([head, "|---|---|---|---|---|---|", *(f"| {line} |" for line in cells)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [name for name in PEERS if name.startswith(("vllm", "transformers"))]
    parser.add_argument("--peers", nargs="*", choices=known, default=DEFAULT)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefix", type=int, default=3000, help="tokens, about")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--work", type=Path, default=cache_dir() / "peers", help="environments, model files, logs")
    parser.add_argument("--output", type=Path, default=HERE.parent / "results")
    options = parser.parse_args()
    options.work = options.work.expanduser().resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    options.output.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack, (options.output / "peers-at-once.jsonl").open("w") as out:
        peers: dict[str, Child] = {}
        for name in dict.fromkeys(("keepwarm", *options.peers)):
            try:
                peers[name] = start(name, options, sequences=max(options.requests))
                stack.callback(peers[name].close)
            except (PeerFailed, KeepwarmError, subprocess.CalledProcessError, OSError) as error:
                if name == "keepwarm":
                    raise
                failed[name] = str(error)
        about = {"machine": platform.machine(), "dtype": options.dtype, "threads": options.threads}
        print(json.dumps(about | {"peers": {name: peer.about for name, peer in peers.items()}}), file=out)
        base = peers["keepwarm"]
        for count in options.requests:
            prompts = base.awake("prompts", chats=chats(options.prefix, count, 1))
            for number in range(-1, options.rounds):
                for name, peer in list(peers.items()):
                    say(f"{count} requests, round {number}: {name}")
                    try:
                        found = peer.awake("batch", prompts=prompts, new_tokens=options.new_tokens)
                    except PeerFailed as error:
                        if peer is base:
                            raise
                        failed[name] = str(error)
                        peers.pop(name).close()
                        continue
                    if number < 0:
                        continue
                    tokens = sum(len(answer) for answer in found["tokens"])
                    row = {
                        "requests": count,
                        "round": number,
                        "peer": name,
                        "seconds": round(found["seconds"], 3),
                        "tokens": tokens,
                        "tokens_per_second": tokens / found["seconds"],
                        "ttft_p50_ms": statistics.median(found["ttft"]),
                        "ttft_max_ms": max(found["ttft"]),
                    }
                    rows.append(row)
                    print(json.dumps(row), file=out, flush=True)
        lines = summary(rows)
        for line in lines:
            print(json.dumps({"summary": line}), file=out)
        for name, why in failed.items():
            print(json.dumps({"failed": name, "why": why}), file=out)
    print(markdown(lines))
    for name, why in failed.items():
        print(f"{name} left out: {why}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)  # a comparison that lacks a peer is told as a failure
