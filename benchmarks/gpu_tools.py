"""Tool sets at Qwen3-8B's geometry on a GPU: the counterpart of ContextCache's Table 3 (5, 10, 20 tools), and beyond.

    python benchmarks/gpu_tools.py --tokenizer FOLDER [--tools 5 10 20 50 100] [--device cuda] [--geometry qwen3-8b]
                             [--rounds 9] [--output benchmarks/results-gpu]

FOLDER holds a Qwen3 tokenizer with its chat template. Weights are random: times do not depend on them, answers do, and
none is looked at but for its logits, which with and without the cache must be equal to the bit. Writes
`tools-GEOMETRY.jsonl` and a plot, as `keepwarm bench tools` does, and `gpu-GEOMETRY.jsonl`: milliseconds per decoded
token by prefix length, and the peak of the device's memory. `--geometry small --device cpu` tries the script out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from keepwarm import Engine
from keepwarm.evaluation import economics

GEOMETRIES: dict[str, dict[str, int]] = {
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "small": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}
PREFIXES = (512, 2048, 8192, 24576)  # tokens
NEW = 64


def random_model(geometry: str, device: str, vocabulary: int) -> Qwen3ForCausalLM:
    """A Qwen3 of random bfloat16 weights, made on the device."""
    config = Qwen3Config(
        **GEOMETRIES[geometry], vocab_size=vocabulary, max_position_embeddings=40_960, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def decoding(engine: Engine, rounds: int) -> list[dict[str, Any]]:
    """Milliseconds per decoded token after prefixes of growing length."""
    lines = []
    for length in PREFIXES:
        if length + NEW > engine.pipeline.model.context_window:
            break
        prompt = [1 + n * 7919 % 50_000 for n in range(length)]
        times = []
        for _ in range(rounds):
            speed = engine.generate(prompt, max_new_tokens=NEW).tokens_per_sec
            times.append(1e3 / speed if speed else 0.0)  # 0: it ended with its first token
        lines.append({"prefix": length, "decode_ms_per_token": statistics.median(times)})
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tools", type=int, nargs="+", default=[5, 10, 20, 50, 100])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results-gpu")
    options = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    model = random_model(options.geometry, options.device, -(-len(tokenizer) // 64) * 64)
    with tempfile.TemporaryDirectory() as store, Engine.from_pretrained((model, tokenizer), store=store) as engine:
        about = {"model": options.geometry, "device": options.device} | economics.machine(engine)
        if options.device.startswith("cuda"):
            about["device"] = torch.cuda.get_device_name()
        found = list(economics.measure(engine, options.tools, options.rounds, lambda text: print(text, flush=True)))
        rows = [row for row in found if isinstance(row, economics.Row)]
        (growth,) = (each for each in found if isinstance(each, economics.Growth))
        economics.write(rows, growth, about, options.output)
        lines = [about, *decoding(engine, options.rounds)]
        if options.device.startswith("cuda"):
            lines.append({"peak_device_bytes": torch.cuda.max_memory_allocated()})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (options.output / f"gpu-{options.geometry}.jsonl").write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
