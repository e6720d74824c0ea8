"""Chunk reuse: documents in a new order after a header that was never seen.

    python benchmarks/chunks.py quality [--model demo] [--documents 4] [--questions 8] [--skip 0] [--threads N]
    python benchmarks/chunks.py speed   [--model demo] [--tokens 4000] [--rounds 3] [--threads N]

Both append rows to `--output` (results/chunks.jsonl). The documents are those of
`python -m papers chunks`. Each is warmed by itself; a request has a header of its own, some of the documents in a
random order, and a question about one of them.

`quality`, per question and repair: KL of the first token's distribution to that of a full prefill by the same engine;
of the first 16 greedy tokens of the full prefill's answer, how many the blended one would say at the same place, led
along that answer (`agree`), and how many it says before it first differs (`leading`; 16 is the same answer); the share
of document tokens that were reused and of those that were repaired; and the request's own estimate of its divergence.
`table` prints medians and means of all such rows in the file.

`speed`: in every round a full prefill (one bare forward pass over all tokens, which is faster than this engine's own
schedule and knows no tokenizing) and a request per repair, in turn, with documents in a new order: medians of the times
to first token, and of the ratios within a round; what choosing and recomputing took; and the cost of the recomputing
pass beside an ordinary step of as many rows with as many tokens before it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import defaultdict
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from ratios import paired, spread

from keepwarm import Engine
from keepwarm.pipeline.shadow import kl_divergence
from papers.chunks.bench import document_tokens, documents, follow, rag, step_ms, warm_documents

HERE = Path(__file__).parent
ANSWER = 16
REPAIRS = (
    "none",
    "seam:16",
    "leading:16",
    "leading:48",
    "deviation:0.05",
    "deviation:0.15",
    "deviation:0.3",
    "attention:0.05",
    "attention:0.1",
    "attention:0.15",
    "attention:0.3",
    "impact:0.05",
    "impact:0.1",
    "impact:0.13",
    "impact:0.15",
    "impact:0.3",
)


def reference() -> list[dict[str, str]]:
    """Python's own language reference, its long topics cut to about 250 tokens: what the strategies were chosen on."""
    found = []
    for name, text in sorted(topics.items()):
        if len(text) >= 1500:
            found.append({
                "title": name,
                "text": text[:1100].rsplit("\n", 1)[0].strip(),
                "question": f"What does the document say about {name}?",
            })
    return found


TEXTS = {"handbook": documents, "reference": reference}


def engine_of(options: argparse.Namespace, **settings: Any) -> Engine:
    return Engine.from_pretrained(options.model, dtype=options.dtype, reuse="chunks", learn_chunks=False, **settings)


def quality(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    every = TEXTS[options.texts]()
    chance = random.Random(options.seed)
    with engine_of(options, chunk_start=options.start) as engine:
        for number in range(options.skip + options.questions):
            chosen = chance.sample(every, options.documents)
            asked = chance.choice(chosen)
            if number < options.skip:
                continue
            given = rag(chosen, asked["question"], number)
            warm_documents(engine, chosen)
            cold = follow(engine, given, ANSWER, reuse="off")
            length, size = engine.explain(**given).prompt_tokens, document_tokens(engine, given)
            for repair in options.repair:
                led = follow(engine, given, cold.ids, repair=repair)
                agreed = [a == b for a, b in zip(led.greedy, cold.ids, strict=True)]
                row = {
                    "what": "quality",
                    "model": options.name,
                    "dtype": options.dtype,
                    "texts": options.texts,
                    "documents": options.documents,
                    "question": number,
                    "prompt_tokens": length,
                    "repair": repair,
                    "reused": round(led.blended_tokens / size, 4),
                    "repaired": round(led.repaired_tokens / max(led.blended_tokens, 1), 4),
                    "kl": round(kl_divergence(cold.logits[0], led.logits[0]), 6),
                    "agree": round(sum(agreed) / len(agreed), 4),
                    "leading": agreed.index(False) if False in agreed else len(agreed),
                    "of": len(cold.ids),
                    "start": len(engine.pipeline.chunks.opening),
                    "estimate": None if led.divergence is None else round(led.divergence, 5),
                }
                rows.append(row)
                say(row, options)
    return rows


def speed(options: argparse.Namespace) -> None:
    every = TEXTS[options.texts]()
    chance = random.Random(options.seed)
    with engine_of(options) as engine:
        warm_documents(engine, every)
        chosen, size = [], 0
        for document in chance.sample(every, len(every)):
            chosen.append(document)
            size = engine.explain(**rag(chosen, document["question"], 0)).prompt_tokens
            if size >= options.tokens:
                break

        def given(number: int) -> dict[str, Any]:
            order = chance.sample(chosen, len(chosen))
            return rag(order, order[0]["question"], number)

        def fresh(**arguments: Any) -> Any:
            engine.pipeline.pool.forget()
            return engine.generate(**given(chance.randrange(10**6)), max_new_tokens=1, **arguments)

        fresh(reuse="off")
        scheduled = statistics.median(fresh(reuse="off").ttft_ms for _ in range(3))
        full: list[float] = []
        results: dict[str, list[Any]] = {repair: [] for repair in options.repair}
        for _ in range(options.rounds):
            full.append(step_ms(engine, size, size, 1))
            for repair, found in results.items():
                found.append(fresh(repair=repair))
        say(
            {
                "what": "speed",
                "model": options.name,
                "dtype": options.dtype,
                "prompt_tokens": size,
                "threads": torch.get_num_threads(),
                "rounds": options.rounds,
                "scheduled_ms": round(scheduled),
                "oneshot_ms": round(statistics.median(full)),
                "fastest_ms": round(min(full)),
            },
            options,
        )
        for repair, found in results.items():
            median = {part: statistics.median(result.timings[part] for result in found) for part in found[0].timings}
            result = found[-1]
            rows = result.repaired_tokens + result.prompt_tokens - result.cached_tokens
            ordinary = step_ms(engine, result.prompt_tokens, rows, options.rounds)
            say(
                {
                    "what": "speed",
                    "model": options.name,
                    "dtype": options.dtype,
                    "repair": repair,
                    "ttft_ms": round(statistics.median(result.ttft_ms for result in found)),
                    **spread(paired(full, [result.ttft_ms for result in found])),
                    "reused": round(result.blended_tokens / result.prompt_tokens, 3),
                    "load_ms": round(median["load"], 1),
                    "select_ms": round(median["select"]),
                    "repair_ms": round(median["repair"]),
                    "carry_ms": round(median["carry"]),
                    "rows": rows,
                    "ordinary_ms": round(ordinary),
                    "repair_per_ordinary": round(min(r.timings["repair"] for r in found) / ordinary, 2),
                },
                options,
            )


def table(options: argparse.Namespace) -> None:
    groups: dict[tuple[str, str, str, int, int, str], list[dict[str, Any]]] = defaultdict(list)
    for line in options.output.read_text().splitlines():
        row = json.loads(line)
        if row["what"] == "quality":
            groups[row["model"], row["dtype"], row["texts"], row["documents"], row["start"], row["repair"]].append(row)
    headers = (
        "model",
        "dtype",
        "texts",
        "documents",
        "start",
        "repair",
        "n",
        "repaired",
        "reused",
        "KL median",
        "KL p90",
        "agreement",
        "same answer",
    )
    print(f"| {' | '.join(headers)} |")
    print("|" + "---|" * 13)
    for (model, dtype, texts, count, start, repair), rows in groups.items():
        kl = sorted(row["kl"] for row in rows)
        mean = {key: statistics.mean(row[key] for row in rows) for key in ("repaired", "reused", "agree")}
        same = statistics.mean(row["leading"] == row["of"] for row in rows)
        cells = (
            model,
            dtype,
            texts,
            count,
            start,
            repair,
            len(rows),
            f"{mean['repaired']:.0%}",
            f"{mean['reused']:.1%}",
            f"{statistics.median(kl):.4f}",
            f"{kl[int(0.9 * (len(kl) - 1))]:.4f}",
            f"{mean['agree']:.1%}",
            f"{same:.0%}",
        )
        print(f"| {' | '.join(map(str, cells))} |")


def say(row: dict[str, Any], options: argparse.Namespace) -> None:
    text = json.dumps(row)
    print(text, flush=True)
    with options.output.open("a") as out:
        print(text, file=out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["quality", "speed", "table"])
    parser.add_argument("--model", default="demo", help="a folder, or demo")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--skip", type=int, default=0, help="questions of the same order that another run has asked")
    parser.add_argument("--texts", choices=TEXTS, default="handbook", help="reference: Python's own, to choose on")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repair", nargs="+", default=list(REPAIRS))
    parser.add_argument("--start", help="text that chunks are computed after, instead of the engine's own")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "chunks.jsonl")
    options = parser.parse_args()
    options.name = Path(options.model).name
    if options.threads:
        torch.set_num_threads(options.threads)
    {"quality": quality, "speed": speed, "table": table}[options.what](options)


if __name__ == "__main__":
    main()
