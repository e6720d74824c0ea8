"""What `keepwarm prove --url` says of servers: Keepwarm's own beside vLLM's and llama.cpp's, each alone, asked again
after a restart.

    python benchmarks/peers/prove.py [--servers keepwarm vllm-eager llama.cpp] [--new 16] [--output FILE]

Adds a line for each server to `prove.jsonl`. Needs an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from servers import SERVERS, started

from keepwarm.cli.phases import PROOF_FAILED
from keepwarm.config import cache_dir

HERE = Path(__file__).parent


def prove(port: int, *more: str) -> list[dict[str, Any]]:
    """The checks of one call. Raises RuntimeError if the server could not be asked."""
    command = [sys.executable, "-m", "keepwarm.cli", "prove", "--url", f"http://127.0.0.1:{port}", "--json", *more]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode not in (0, PROOF_FAILED):
        raise RuntimeError(f"keepwarm prove ended with {found.returncode}")
    checks: list[dict[str, Any]] = json.loads(found.stdout)["checks"]
    return checks


def visit(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Ask a server, and ask it once more after a restart."""
    with tempfile.TemporaryDirectory() as folder:
        start, saved = SERVERS[name](options, Path(folder)), str(Path(folder) / "asked.json")
        log = options.work / f"prove-{name}.log"
        with started(start, log) as port:
            checks = prove(port, "--save", saved, "-n", str(options.new))
        with started(start, log) as port:
            checks += [check | {"check": "after a restart"} for check in prove(port, "--compare", saved)]
    return {"server": name, **start.about, "threads": options.threads, "new_tokens": options.new, "checks": checks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="*", choices=SERVERS, default=["keepwarm", "vllm-eager", "llama.cpp"])
    parser.add_argument("--clients", type=int, default=16, help="sequences at once that a server is started for")
    parser.add_argument("--new", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--gguf", choices=("float32", "bfloat16", "float16"), default="float16", help="llama.cpp's")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--work", type=Path, default=cache_dir() / "peers", help="environments, model files, logs")
    parser.add_argument("--output", type=Path, default=HERE.parent / "results" / "prove.jsonl")
    options = parser.parse_args()
    options.work = options.work.expanduser().resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    for name in options.servers:
        found = json.dumps(visit(name, options))
        print(found, flush=True)
        with options.output.open("a") as out:
            print(found, file=out)


if __name__ == "__main__":
    main()
