"""A model on the compiled kernels beside the same model through transformers, paired in one process.

    python benchmarks/families.py MODEL [--random NAME] [--dtype bfloat16] [--prefix 2000] [--rounds 7] [--out FILE]

MODEL is a folder, say of Gemma 3 270M, or a GGUF file, whose weights transformers widens. With `--random` it gives
its tokenizer to a model of random weights, whose times are those of any weights: a small Qwen3-MoE (8 layers of 32
experts, four for each token), one of Gemma 4's form with half of E2B's widths (20 layers, of which 10 share keys and
values), or a hybrid of the shape of LFM2 350M (10 short convolutions, 6 layers with attention),
Granite 4 H 350M (28 layers of Mamba-2, 4 with attention) or Qwen3.5 0.8B (18 gated delta nets, 6 with attention).
`decode`: milliseconds per token, greedy, after the prefix. `hit`: a question of 24 tokens after a prefix that is
there. For Keepwarm that is a whole `generate` of one token with its lookup, the prefix resident in memory. For
transformers it is the forward pass over a copy of a DynamicCache that holds the prefix; the copy is not counted.
`cold`: the whole prompt. The two take turns. Figures are medians of the rounds; `times` is the median of the paired
ratios, with their quartiles. Prints one JSON line per figure.

The prompts are text: the beginning of ARCHITECTURE.md, and after it other parts of it as questions. On text, a model is
surer of the next token than on random tokens, and a head in Q8_0 is then read by half (kernels.md#heads).
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hybrids
import torch
from lines import tell
from ratios import spread
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, GgufConfig

from keepwarm import Engine
from keepwarm.core.results import Generation

NEW, SUFFIX, COLD = 33, 24, 3  # tokens, tokens, rounds
TEXT = Path(__file__).parents[1] / "ARCHITECTURE.md"
Figures = dict[str, Any]


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": (
        "qwen3_moe",
        {
            "hidden_size": 512,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 256,
            "norm_topk_prob": True,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "hidden_size": 1024,
            "intermediate_size": 6656,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        },
    ),
    "granite4": (
        "granitemoehybrid",
        {
            "hidden_size": 768,
            "num_hidden_layers": 32,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "layers_block_type": ["attention" if layer in (10, 13, 17, 27) else "mamba" for layer in range(32)],
            "mamba_n_heads": 48,
            "mamba_d_head": 32,
            "mamba_d_state": 128,
            "num_local_experts": 0,
            "shared_intermediate_size": 2048,
            "max_position_embeddings": 32768,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 20,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 4,
            "hidden_size_per_layer_input": 128,
            "num_kv_shared_layers": 10,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 30.0,
        },
    ),
    "qwen3.5": hybrids.SHAPES["qwen3.5-0.5b"],
}


def random_model(name: str, tokenizer: Path, parent: Path) -> Path:
    """Save a model of random weights, and return its folder."""
    folder = parent / f"random-{name}"
    reader = AutoTokenizer.from_pretrained(tokenizer)
    kind, settings = SHAPES[name]
    sizes = {"vocab_size": len(reader), "eos_token_id": reader.eos_token_id}
    if "hidden_size_per_layer_input" in settings:
        sizes["vocab_size_per_layer_input"] = len(reader)
    config = AutoConfig.for_model(kind, **sizes, **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        if kind == "gemma4_text" and name.endswith("q_norm.weight"):  # its scores have no other scale
            weight.data *= len(weight) ** -0.5
    model.save_pretrained(folder)
    reader.save_pretrained(folder)
    return folder


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Transformers:
    """The model as transformers runs it."""

    def __init__(self, model: Path, dtype: torch.dtype) -> None:
        file = {"gguf_file": model.name, "quantization_config": GgufConfig(dequantize=True)}
        where, more = (model.parent, file) if model.suffix == ".gguf" else (model, {})
        self.model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **more).eval()

    @torch.inference_mode()
    def run(self, ids: list[int], cache: DynamicCache) -> int:
        logits = self.model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())

    def cold(self, ids: list[int]) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        self.run(ids, cache)
        return cache

    def decode(self, token: int, cache: DynamicCache) -> float:
        def work() -> None:
            following = token
            for _ in range(NEW - 1):
                following = self.run([following], cache)

        return timed(work) / (NEW - 1)


def one_round(
    engine: Engine, theirs: Transformers, question: list[int], held: DynamicCache, *, cold: bool
) -> dict[str, tuple[float, float]]:
    """Seconds of ours and theirs for a question of which all but the last tokens are held."""
    found = {}
    cache, suffix = copy.deepcopy(held), question[-SUFFIX:]
    ours = timed(lambda: engine.generate(question, max_new_tokens=1))
    found["hit"] = ours, timed(lambda: theirs.run(suffix, cache))
    answers: list[Generation] = []
    whole = timed(lambda: answers.append(engine.generate(question, max_new_tokens=NEW)))
    again = timed(lambda: engine.generate(question, max_new_tokens=1))
    if (count := len(answers[0].token_ids)) > NEW // 2:
        found["decode"] = (whole - again) / (count - 1), theirs.decode(7, cache)
    if cold:
        ours = timed(lambda: engine.generate(question, max_new_tokens=1, reuse="off"))
        found["cold"] = ours, timed(lambda: theirs.cold(question))
    return found


def measured(folder: Path, dtype: str, prefix: int, rounds: int) -> Iterator[Figures]:
    theirs = Transformers(folder, getattr(torch, dtype))
    times: dict[str, list[tuple[float, float]]] = {"cold": [], "hit": [], "decode": []}
    with Engine.from_pretrained(folder, dtype=dtype, max_disk=0, draft_tokens=0) as engine:  # a step is one token
        ids = engine.pipeline.tokenizer.encode(TEXT.read_text())[0]
        if len(ids) < prefix + rounds * SUFFIX:
            raise SystemExit(f"{TEXT.name} has {len(ids)} tokens: --prefix {prefix} and --rounds {rounds} need more")
        engine.generate(ids[:prefix], max_new_tokens=1)
        held = theirs.cold(ids[:prefix])
        for number in range(rounds):
            begins = len(ids) - (number + 1) * SUFFIX
            question = [*ids[:prefix], *ids[begins : begins + SUFFIX]]
            for what, pair in one_round(engine, theirs, question, held, cold=number < COLD).items():
                times[what].append(pair)
        attention = engine.pipeline.model.attention.split(":")[0]
    for what, pairs in times.items():
        yield {
            "model": folder.name,
            "dtype": dtype,
            "what": what,
            "attention": attention,
            "tokens": prefix + SUFFIX,
            "keepwarm_ms": round(statistics.median(a for a, _ in pairs) * 1e3, 2),
            "transformers_ms": round(statistics.median(b for _, b in pairs) * 1e3, 2),
            **spread([b / a for a, b in pairs]),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--random", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prefix", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = random_model(options.random, options.model, Path(made)) if options.random else options.model
        tell(measured(folder, options.dtype, options.prefix, options.rounds), options.out)


if __name__ == "__main__":
    main()
