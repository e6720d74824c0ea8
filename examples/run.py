"""Runs the examples, each request cold beside warm.

    python examples/run.py [--list] [--example NAME ...] [--model MODEL] [--tokens N]

Defaults come from the environment, then from `examples/.env` (see `.env.example`): KEEPWARM_MODEL, a folder, a hub id
or "demo"; KEEPWARM_TOKENS, new tokens per answer; HF_TOKEN for gated models.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import chatbot
import code_context
import fewshot
import multiturn
import rag

from keepwarm import Engine

EXAMPLES = {"chatbot": chatbot, "rag": rag, "fewshot": fewshot, "multiturn": multiturn, "code": code_context}


def read_env(file: Path) -> None:
    """Lines NAME=VALUE become defaults of the environment; other lines are comments."""
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        name, given, value = line.strip().partition("=")
        if given and not name.startswith("#"):
            os.environ.setdefault(name.strip(), value.strip().strip("'\""))


def main() -> None:
    read_env(Path(__file__).parent / ".env")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the examples")
    parser.add_argument("--example", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    parser.add_argument("--model", default=os.environ.get("KEEPWARM_MODEL", "demo"))
    parser.add_argument("--tokens", type=int, default=int(os.environ.get("KEEPWARM_TOKENS", "32")))
    options = parser.parse_args()
    if options.list:
        for name, module in EXAMPLES.items():
            print(f"{name:10} {(module.__doc__ or '').strip()}")
        return
    with Engine.from_pretrained(options.model, reuse="chunks", learn_chunks=False) as engine:
        for name in options.example:
            print(f"\n== {name}: {(EXAMPLES[name].__doc__ or '').strip()}")
            EXAMPLES[name].run(engine, options.tokens)


if __name__ == "__main__":
    main()
