"""What a hit loads, and a store holds, of a model whose layers attend to a window.

    python benchmarks/windows.py MODEL [--kind segment|tokens] [--tokens 2600] [--rounds 5] [--out FILE]

MODEL is a folder, say of Gemma 3 270M, where 15 of 18 layers slide over 512 positions. A text of so many tokens is
stored and asked about in new processes, once as a segment (the hit ends where it ends) and once as bare tokens (it ends
at the last whole step). `before` is how it was when every layer was stored and loaded as a whole: the same program with
both taken back. `read_bytes` is what the process read during the request, by the system's count, from a store in the
page cache; `ttft_ms` the median of its time to the first token over the processes; `store_bytes` what the run files
take. `cold_ms` is the same question without a cache. Prints one JSON line per case.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from keepwarm import Engine
from keepwarm.core.geometry import KVGeometry
from keepwarm.runtime.arena.arena import Arena

KINDS = ("segment", "tokens")
QUESTION = " So the harbour master was asked which of them might still enter, and said:"


def text_of(engine: Engine, tokens: int) -> str:
    """A made-up text of so many tokens, about."""
    said, number = "", 0
    while engine.count_tokens(said) < tokens:
        number += 1
        berth, day = number % 23, number * 7 % 365
        said += f"Ship {number} of {number % 17 + 3} metres came on day {day} and took berth {berth}. "
    return said


def arguments(engine: Engine, kind: str, tokens: int, *more: str) -> dict[str, Any]:
    """A prompt: a text, and what follows it."""
    text = text_of(engine, tokens)
    if kind == "segment":
        return {"segments": [text, *more]}
    return {"prompt": "".join((text, *more))}


def read_so_far() -> int:
    """Bytes that this process has read."""
    return int(Path("/proc/self/io").read_text().split()[1])


def take_back() -> None:
    """Store and load every layer as a whole."""
    KVGeometry.stored = property(lambda geometry: geometry)  # type: ignore[assignment, method-assign]
    Arena.needed_from = lambda arena, layer: 0  # type: ignore[method-assign]


def child(model: str, store: str, kind: str, tokens: int, what: str) -> dict[str, Any]:
    """One process: `warm`, `hit` or `cold`."""
    with Engine.from_pretrained(model, store=store, max_ram=0) as engine:
        if what == "warm":
            engine.warm(**arguments(engine, kind, tokens, QUESTION))
            engine.flush()
            return {"store_bytes": sum(file.stat().st_size for file in (Path(store) / "runs").iterdir())}
        engine.generate([5, 6, 7], max_new_tokens=2)  # what only the first request in a process pays
        prompt = arguments(engine, kind, tokens, QUESTION)
        before = read_so_far()
        answer = engine.generate(**prompt, max_new_tokens=1, trace=True, reuse="off" if what == "cold" else None)
        return {
            "read_bytes": read_so_far() - before,
            "ttft_ms": answer.ttft_ms,
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": answer.cached_tokens,
            "digest": answer.logits_digest,
            "exactness": answer.exactness,
        }


def run(how: str, *rest: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, *rest, "--child", how], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def case(model: str, kind: str, tokens: int, rounds: int) -> dict[str, Any]:
    """A kind of prompt, before and after."""
    figures: dict[str, Any] = {"model": Path(model).name, "prompt": kind}
    with tempfile.TemporaryDirectory() as folder:
        stores = {how: str(Path(folder) / how) for how in ("before", "after")}
        given = ["--kind", kind, "--tokens", str(tokens)]
        for how, store in stores.items():
            figures[how] = run(how, model, *given, "--store", store, "--what", "warm")
        hits: dict[str, list[dict[str, Any]]] = {how: [] for how in stores}
        for _ in range(rounds):  # in turns, as others may use the machine
            for how, store in stores.items():
                hits[how].append(run(how, model, *given, "--store", store, "--what", "hit"))
        cold = run("after", model, *given, "--store", stores["after"], "--what", "cold")
    for how, found in hits.items():
        figures[how] |= {
            "read_bytes": min(each["read_bytes"] for each in found),
            "ttft_ms": round(statistics.median(each["ttft_ms"] for each in found), 1),
            "cached_tokens": found[0]["cached_tokens"],
            "same": all(each["digest"] == cold["digest"] for each in found),
        }
    for name in ("read_bytes", "store_bytes"):
        figures[f"{name}_ratio"] = round(figures["after"][name] / figures["before"][name], 3)
    return figures | {"prompt_tokens": cold["prompt_tokens"], "cold_ms": round(cold["ttft_ms"], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kind", choices=KINDS, help="both, if left out")
    for name in ("--child", "--store", "--what"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        if given.child == "before":
            take_back()
        print(json.dumps(child(given.model, given.store, given.kind, given.tokens, given.what)))
        return
    for kind in (given.kind,) if given.kind else KINDS:
        line = json.dumps(case(given.model, kind, given.tokens, given.rounds))
        print(line, flush=True)
        if given.out is not None:
            with given.out.open("a") as out:
                out.write(line + "\n")


if __name__ == "__main__":
    main()
