"""Models with recurrent state: cold, from RAM, from disk in a new process, after an edit; and a long conversation.

    python benchmarks/hybrids.py [--part hits conversation] [--output benchmarks/results]

Writes `hybrids-PART.jsonl`. Run it on an otherwise idle machine. The models have the shapes of Qwen3.5 (0.5B, gated
delta nets) and Granite 4 H 350M (Mamba-2), and random weights: nothing here depends on what they say.

* `hits`: a system prompt of 2,000 tokens and a question. Every answer is compared, logits bit for bit, with one that
  reuses nothing.
* `conversation`: an agent's 20 turns. What is reused is compared with what a plain model of the same schedule reuses,
  and the bytes of snapshots with those of KV.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from keepwarm import Engine
from keepwarm.runtime.demo_model import demo_model

REPEATS = 3
SYSTEM_TOKENS = 2000
TURNS = 20
_COMMON = {"vocab_size": 49152, "max_position_embeddings": 32768, "bos_token_id": 1, "eos_token_id": 2}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5-0.5b": (
        "qwen3_5_text",
        {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
        },
    ),
    "granite4-h-350m": (
        "granitemoehybrid",
        {
            "hidden_size": 768,
            "intermediate_size": 2048,
            "shared_intermediate_size": 2048,
            "num_hidden_layers": 32,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "num_local_experts": 0,
            "mamba_n_heads": 48,
            "mamba_d_head": 32,
            "mamba_d_state": 128,
            "layer_types": (["mamba"] * 7 + ["attention"]) * 4,
        },
    ),
    "plain": ("llama", {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}),
}


def made(name: str) -> tuple[Any, Any]:
    """A model of random weights, the same in every process, and the embedded model's tokenizer."""
    kind, settings = SHAPES[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**_COMMON, **settings})
    dtype = torch.float32 if name == "plain" else torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return model, transformers.AutoTokenizer.from_pretrained(demo_model())


def chat(tokenizer: Any, question: str) -> list[dict[str, str]]:
    lines = (f"Pier {n}: boats up to {n * 7 % 40} metres, keeper {n * 37 % 1009}." for n in range(9999))
    system = "You are the clerk of a harbour."
    while len(tokenizer(system).input_ids) < SYSTEM_TOKENS:
        system += "\n" + next(lines)
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def hits(work: Path) -> Iterator[dict[str, Any]]:
    for name in ("qwen3.5-0.5b", "granite4-h-350m"):
        model, tokenizer = made(name)
        store, digests = work / name, {}
        asked = {"hit": "Which pier takes the largest boats?", "edited": "Which pier takes no boats at all, then?"}
        times: dict[str, list[float]] = {"cold": [], "hit": [], "edited": []}
        with Engine.from_pretrained((model, tokenizer), store=store) as engine:
            for what, question in asked.items():
                cold = [
                    engine.generate(messages=chat(tokenizer, question), max_new_tokens=4, reuse="off", trace=True)
                    for _ in range(REPEATS if what == "hit" else 1)
                ]
                times["cold"] += [result.ttft_ms for result in cold]
                digests[what] = cold[0].logits_digest
            engine.generate(messages=chat(tokenizer, asked["hit"]), max_new_tokens=4)
            engine.flush()
            identical = True
            for _ in range(REPEATS):
                for what, question in asked.items():
                    warm = engine.generate(messages=chat(tokenizer, question), max_new_tokens=4, trace=True)
                    times[what].append(warm.ttft_ms)
                    identical &= warm.logits_digest == digests[what]
            layout = engine.pipeline.model
            entries = engine.pipeline.archive.contents.entries()
        restarted = child(store, name, asked["hit"])
        median = {what: statistics.median(values) for what, values in times.items()}
        yield {
            "model": name,
            "parameters": sum(each.numel() for each in model.parameters()),
            "prompt_tokens": warm.prompt_tokens,
            "cached_tokens": warm.cached_tokens,
            "kv_bytes_per_token": layout.geometry.bytes_per_token,
            "snapshot_bytes": layout.form.state_bytes,
            "stored_snapshots": sum(entry.kind == "snapshot" for entry in entries),
            "cold_ms": round(median["cold"], 1),
            "hit_ms": round(median["hit"], 1),
            "edited_ms": round(median["edited"], 1),
            "restart_ms": round(restarted["ttft_ms"], 1),
            "restart_cached_by_tier": restarted["cached_by_tier"],
            "cold_over_hit": round(median["cold"] / median["hit"], 1),
            "cold_over_restart": round(median["cold"] / restarted["ttft_ms"], 1),
            "bit_identical": identical and restarted["digest"] == digests["hit"],
        }


def child(store: Path, name: str, question: str) -> dict[str, Any]:
    """The same question as the first request of a new process."""
    command = [sys.executable, __file__, "--child", json.dumps([str(store), name, question])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def answer_child(arguments: str) -> None:
    store, name, question = json.loads(arguments)
    model, tokenizer = made(name)
    with Engine.from_pretrained((model, tokenizer), store=store) as engine:
        engine.generate("warm up " * 20, max_new_tokens=2, reuse="off")
        result = engine.generate(messages=chat(tokenizer, question), max_new_tokens=4, trace=True)
        print(
            json.dumps({
                "ttft_ms": result.ttft_ms,
                "cached_by_tier": result.cached_by_tier,
                "digest": result.logits_digest,
            })
        )


def conversation(work: Path) -> Iterator[dict[str, Any]]:
    """Each turn a question, an answer and the output of a tool, as agents have them."""
    reused: dict[str, list[int]] = {}
    for name in ("plain", "qwen3.5-0.5b", "granite4-h-350m"):
        model, tokenizer = made(name)
        messages, reused[name] = chat(tokenizer, "Begin.")[:1], []
        with Engine.from_pretrained((model, tokenizer), store=work / name, attention="model") as engine:
            for turn in range(TURNS):
                said = " ".join(f"Record {turn}.{n}: {(turn * 31 + n * 7) % 977} metres." for n in range(12))
                messages.append({"role": "user", "content": f"Step {turn}. {said}"})
                result = engine.generate(messages=messages, max_new_tokens=1)
                reused[name].append(result.cached_tokens)
                messages.append({"role": "assistant", "content": f"Done with step {turn}: {said}"})
                engine.flush()
            kinds = {
                kind: sum(e.bytes for e in engine.pipeline.archive.contents.entries() if e.kind == kind)
                for kind in ("kv", "snapshot")
            }
        if name != "plain":
            yield {
                "model": name,
                "turns": TURNS,
                "last_prompt_tokens": result.prompt_tokens,
                "reused_tokens": sum(reused[name]),
                "plain_reused_tokens": sum(reused["plain"]),
                "share_of_plain": round(sum(reused[name]) / sum(reused["plain"]), 4),
                "kv_bytes": kinds["kv"],
                "snapshot_bytes": kinds["snapshot"],
                "snapshots_over_kv": round(kinds["snapshot"] / kinds["kv"], 3),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Any] = {"hits": hits, "conversation": conversation}
    parser.add_argument("--part", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        answer_child(options.child)
        return
    options.output.mkdir(parents=True, exist_ok=True)
    about = {"machine": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    about |= {"transformers": transformers.__version__, "dtype": "bfloat16"}
    for part in options.part:
        with tempfile.TemporaryDirectory() as folder, (options.output / f"hybrids-{part}.jsonl").open("w") as out:
            for row in _rows(about, parts[part], Path(folder)):
                print(json.dumps(row), flush=True)
                out.write(json.dumps(row) + "\n")


def _rows(about: dict[str, Any], part: Any, folder: Path) -> Iterator[dict[str, Any]]:
    yield about
    yield from part(folder)


if __name__ == "__main__":
    main()
