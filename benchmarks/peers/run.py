"""Keepwarm beside other engines: cold and warm time to first token and time per decoded token, paired in one run.

    python benchmarks/peers/run.py [--peers transformers vllm ...] [--rounds 7] [--dtype float32] [--work FOLDER]

One command: every peer gets a virtual environment of its own in `--work` (made once: minutes, some gigabytes), loads
the same model, and then takes its turn in every round, so that ratios compare like with like. All get the same
prompts, greedy decoding and number of threads. Only the peer whose turn it is runs: the others are stopped (SIGSTOP),
as idle threads that spin would slow it. Keepwarm gets chat messages, and its clock holds rendering, tokenizing, lookup
and loading; the others get token ids.

Writes `peers.jsonl` (every measurement, then the summary) and prints a Markdown table. A peer that cannot be installed
or started, or that fails, is reported and left out. Needs Linux or macOS, and an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import environments
from child import Child, PeerFailed
from table import markdown, summary

from keepwarm.config import cache_dir
from keepwarm.errors import KeepwarmError
from keepwarm.runtime.demo_model import demo_model
from keepwarm.runtime.processor import cpu_flags

HERE = Path(__file__).parent
CAPACITY = 4096  # tokens, of the longest request
KV = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # as llama.cpp names them


@dataclass(frozen=True)
class Kind:
    """How one peer is run."""

    adapter: str
    environment: Any  # makes it in the work folder and returns its Python
    options: dict[str, Any] = field(default_factory=dict)
    gguf: str | None = None  # dtype of the weights file it wants instead of a folder; "" is the comparison's


PEERS = {
    "keepwarm": Kind("keepwarm_peer.py", environments.own),
    "transformers": Kind("transformers_peer.py", environments.own),
    "vllm": Kind("vllm_peer.py", environments.vllm),
    "vllm-eager": Kind("vllm_peer.py", environments.vllm, {"eager": True}),
    "kvboost": Kind("kvboost_peer.py", environments.kvboost),
    "llamacpp": Kind("llamacpp_peer.py", environments.llamacpp, gguf=""),
    "llamacpp-f16": Kind("llamacpp_peer.py", environments.llamacpp, gguf="float16"),
}
DEFAULT = ("transformers", "vllm", "llamacpp", "llamacpp-f16")


def start(name: str, options: argparse.Namespace, **more: Any) -> Child:
    """Start a peer and load the model, with `more` of its own options.

    Raises PeerFailed and what making environments and files raises.
    """
    kind = PEERS[name]
    python = kind.environment(options.work)
    model, extra = demo_model(print), kind.options | more
    if kind.gguf is not None:
        dtype = kind.gguf or options.dtype
        model, extra = environments.gguf(options.work, dtype), extra | {"kv": KV[dtype]}
    environment = environments.variables(python) | {"OMP_NUM_THREADS": str(options.threads)}
    say(f"{name}: loading")
    child = Child(name, [str(python), str(HERE / kind.adapter)], options.work / f"{name}.log", environment)
    try:
        child.load(
            model=str(model),
            dtype=options.dtype,
            threads=options.threads,
            capacity=CAPACITY,
            work=str(options.work),
            options=extra,
        )
    except PeerFailed:
        child.close()
        raise
    return child


def chats(prefix: int, rounds: int, each: int) -> list[list[dict[str, str]]]:
    """Chats with one system prompt of about `prefix` tokens and a question each: 24 tokens with the template's own."""
    lines, system = [], ""
    for n in range(10_000):
        lines.append(f"Rule {n}: on day {n % 31} a clerk files form {n * 37 % 1009} before noon.")
        system = "\n".join(lines)
        if len(lines) * 21 >= prefix:  # tokens of a line
            break
    questions = (f"{n}: write a long letter about rule {n % 80}." for n in range(1000, 1000 + rounds * each))
    return [[{"role": "system", "content": system}, {"role": "user", "content": asked}] for asked in questions]


def play(peers: dict[str, Child], options: argparse.Namespace, failed: dict[str, str], out: Any) -> dict[str, Any]:
    """All rounds, after one that is not counted. Returns the rows and the prompts' lengths."""
    each = 2 + max(len(peer.hits) for peer in peers.values())
    base = peers["keepwarm"]
    made = base.awake("prompts", chats=chats(options.prefix, options.rounds + 1, each))
    prefix, lengths = made[0]["prefix"], [len(prompt["ids"]) for prompt in made]
    about = {"prefix_tokens": prefix, "suffix_tokens": sorted({length - prefix for length in lengths})}
    print(json.dumps(about), file=out)
    rows = []
    for number in range(-1, options.rounds):
        prompts, made = made[:each], made[each:]
        for name, peer in list(peers.items()):
            say(f"round {number}: {name}")
            try:
                row = peer.turn(prompts, options.new_tokens, cold=number < options.cold)
            except PeerFailed as error:
                if peer is base:
                    raise
                failed[name] = str(error)
                peers.pop(name).close()
                continue
            if number >= 0:
                rows.append({"round": number, "peer": name} | row)
                print(json.dumps(rows[-1]), file=out, flush=True)
    return {"rows": rows, "prompt": lengths[-1], "suffix": lengths[-1] - prefix}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="*", choices=[name for name in PEERS if name != "keepwarm"], default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cold", type=int, default=3, help="rounds with a cold run: those are long and steady")
    parser.add_argument(
        "--prefix",
        type=int,
        default=2000,
        help="tokens, about; the default makes 2060: vLLM's blocks of 128 end just before",
    )
    parser.add_argument("--new-tokens", type=int, default=33)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--work", type=Path, default=cache_dir() / "peers", help="environments, model files, logs")
    parser.add_argument("--output", type=Path, default=HERE.parent / "results")
    parser.add_argument("--install", action="store_true", help="only make the environments and model files")
    options = parser.parse_args()
    if options.new_tokens < 2 or options.rounds < 1 or options.cold < 1:
        parser.error("--new-tokens must be at least 2, --rounds and --cold at least 1")
    options.work = options.work.expanduser().resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    options.output.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        peers: dict[str, Child] = {}
        for name in dict.fromkeys(("keepwarm", *options.peers)):
            try:
                peers[name] = start(name, options)
                stack.callback(peers[name].close)
            except (PeerFailed, KeepwarmError, subprocess.CalledProcessError, OSError) as error:
                if name == "keepwarm":
                    raise
                failed[name] = str(error)
                say(f"{name} left out: {error}")
            if options.install and name in peers:
                peers.pop(name).close()
        if options.install:
            return len(failed)
        asked = {
            k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items() if k not in ("work", "output")
        }
        about = {name: peer.about | {"hits": peer.hits} for name, peer in peers.items()}
        with (options.output / "peers.jsonl").open("w") as out:
            flags = sorted(cpu_flags() & {"avx2", "avx512f", "avx512_bf16", "amx_bf16"})
            print(json.dumps({"machine": platform.machine(), "flags": flags, "asked": asked, "peers": about}), file=out)
            played = play(peers, options, failed, out)
            about = {name: told for name, told in about.items() if name in peers}
            lines = summary(played["rows"], about, played["prompt"], played["suffix"])
            print(json.dumps({"summary": lines, "failed": failed}), file=out)
        print(markdown(lines, about, failed))
    return len(failed)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)  # a comparison that lacks a peer is told as a failure
