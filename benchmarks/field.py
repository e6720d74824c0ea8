"""The field's own serving benchmarks, unchanged, against `keepwarm serve` and vLLM's server, on one machine.

    python benchmarks/field.py [--servers keepwarm vllm] [--tools prefix_repetition multi_turn ...]

| tool | whose | what it sends |
|---|---|---|
| `prefix_repetition` | vLLM: `vllm bench serve` | prompts of a few shared beginnings, eight at a time |
| `multi_turn` | vLLM: `benchmark_serving_multi_turn.py` | conversations that grow, two clients |
| `long_doc_qa` | LMCache: `lmcache bench engine` | each document once, then questions about them in random order |
| `multi_round_chat` | LMCache: `lmcache bench engine` | conversations on one system prompt, at a fixed rate |
| `agentic_code` | NVIDIA: `aiperf synthesize`, `aiperf profile` | sessions of a coding agent, two at a time |

Each tool meets each server with an empty cache, and sends it the same requests. Their sizes are made smaller, by the
tools' own options, to what two cores can do in a minute or two. vLLM's tools run in its peer environment
(`peers/environments.py`); the second one is taken from vLLM's source package, and LMCache's from its wheel. aiperf has
an environment of its own. Needs an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

sys.path.append(str(Path(__file__).parent / "peers"))
import environments
import servers

from keepwarm.config import cache_dir
from keepwarm.runtime.demo_model import demo_model

ROOT = Path(__file__).parents[1]
LMCACHE = "lmcache==0.5.6"
# Not in vLLM's wheels.
SOURCE = (
    "https://files.pythonhosted.org/packages/f7/25/aa5684e9c59d6fc75f78926b7f15e8d9adc7de2d9e6e7575b80776ad8169/"
    "vllm-0.33.0.tar.gz"
)
SHA256 = "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"
_LONGEST = 900  # seconds that a tool may take
_HUB_NAME = "keepwarm/demo"

# `vllm` itself asks for the metadata of a package of that name, which the build for CPUs has not.
_VLLM_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
_TURNS = {
    "filetype": "generate_conversations",
    "num_conversations": 6,
    "text_files": ["text.txt"],
    "print_stats": False,
    "prompt_input": {
        "num_turns": {"distribution": "constant", "value": 10},
        "common_prefix_num_tokens": {"distribution": "constant", "value": 500},
        "prefix_num_tokens": {"distribution": "uniform", "min": 400, "max": 600},
        "num_tokens": {"distribution": "uniform", "min": 60, "max": 80},
    },
    "prompt_output": {"num_tokens": {"distribution": "constant", "value": 32}},
}
# aiperf's default, with sizes and delays divided by about 22; sessions end earlier.
_AGENTS = {
    "new_tokens_per_turn": {"mean": 270, "median": 270, "max": 450, "bias": 1.1},
    "generation_length": {"mean": 32, "median": 32, "max": 48},
    "inter_turn_delay": {
        "agentic_fraction": 0.7,
        "agentic_delay": {"mean": 115, "median": 80, "max": 450},
        "human_delay": {"mean": 1800, "median": 1100, "max": 5400},
    },
    "reset": {"base_probability": 0.01, "context_scaling": 1.5},
    "max_prompt_tokens": 5000,
    "block_size": 64,
    "cache": {"layer1_tokens": 1472, "layer1_5_tokens": 0, "layer2": {"mean": 680, "median": 230, "max": 1360}},
}


def run(command: Sequence[str | Path], folder: Path, **environment: str) -> None:
    """Raises RuntimeError, with the last that the tool said, when it fails."""
    known = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | environment
    done = subprocess.run(
        command, cwd=folder, env=known, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_LONGEST
    )
    if done.returncode:
        raise RuntimeError(f"{command[:4]} ended with {done.returncode}: {done.stdout[-2000:]}")


def words(options: dict[str, Any]) -> list[str]:
    """Options as a command takes them."""
    return [str(part) for pair in options.items() for part in pair]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(values)
    found = {"p50": statistics.median(ordered), "p90": ordered[int(len(ordered) * 0.9)], "max": ordered[-1]}
    return {name: round(value, 1) for name, value in found.items()}


# ---- the tools ----


def prefix_repetition(url: str, model: str, work: Path, folder: Path) -> dict[str, Any]:
    options = {
        "--backend": "openai",
        "--base-url": url,
        "--model": model,
        "--tokenizer": demo_model(),
        "--dataset-name": "prefix_repetition",
        "--prefix-repetition-num-prefixes": 4,
        "--prefix-repetition-prefix-len": 1024,
        "--prefix-repetition-suffix-len": 64,
        "--prefix-repetition-output-len": 32,
        "--num-prompts": 32,
        "--max-concurrency": 8,
        "--seed": 1,
        "--percentile-metrics": "ttft,tpot",
        "--metric-percentiles": "50,90,100",
        "--result-filename": "result.json",
    }
    run([environments.vllm(work), "-c", _VLLM_BENCH, *words(options), "--save-result", "--ignore-eos"], folder)
    found = json.loads((folder / "result.json").read_text())
    ttft = {name: round(found[f"p{at}_ttft_ms"], 1) for name, at in (("p50", 50), ("p90", 90), ("max", 100))}
    return {
        "requests": found["completed"],
        "failed": found["failed"],
        "ttft_ms": ttft,
        "tokens_per_s": round(found["output_throughput"], 1),
    }


def multi_turn(url: str, model: str, work: Path, folder: Path) -> dict[str, Any]:
    (folder / "text.txt").write_text("\n".join(topics[name] for name in sorted(topics)))  # Python's own reference
    (folder / "turns.json").write_text(json.dumps(_TURNS))
    options = {
        "--model": demo_model(),
        "--served-model-name": model,
        "--url": url,
        "--input-file": folder / "turns.json",
        "--num-clients": 2,
        "--max-active-conversations": 4,
        "--seed": 1,
        "--stats-json-output": folder / "stats.json",
    }
    script = _source(work) / "benchmark_serving_multi_turn.py"
    run([environments.vllm(work), script, *words(options), "--no-early-stop"], folder)
    found = json.loads((folder / "stats.json").read_text())
    return {"requests": len(found), "ttft_ms": spread([each["ttft_ms"] for each in found])}


def _lmcache(workload: str, given: dict[str, Any], url: str, model: str, work: Path, folder: Path) -> dict[str, Any]:
    common = {
        "--engine-url": url,
        "--model": model,
        "--workload": workload,
        "--tokens-per-gb-kvcache": 40_000,
        "--kv-cache-volume": 0.3,
        "--seed": 1,
        "--output-dir": folder,
    }
    command = [environments.vllm(work), "-m", "lmcache.cli.main", "bench", "engine", *words(common | given)]
    run(
        [*command, "--json", "--no-csv", "--quiet", "--no-interactive", "--ignore-eos"],
        folder,
        PYTHONPATH=str(_wheel(work)),
    )
    (written,) = folder.glob("*.json")
    found = json.loads(written.read_text())["results"]
    ttft = {name: round(found[f"{name}_ttft_ms"], 1) for name in ("p50", "p90", "p99")}
    return {
        "requests": found["successful_requests"],
        "failed": found["failed_requests"],
        "ttft_ms": ttft,
        "tokens_per_s": round(found["output_throughput"], 1),
    }


def long_doc_qa(url: str, model: str, work: Path, folder: Path) -> dict[str, Any]:
    given = {"--ldqa-document-length": 2000, "--ldqa-query-per-document": 3, "--ldqa-max-output-length": 32}
    return _lmcache("long-doc-qa", given, url, model, work, folder)


def multi_round_chat(url: str, model: str, work: Path, folder: Path) -> dict[str, Any]:
    given = {
        "--mrc-shared-prompt-length": 1000,
        "--mrc-chat-history-length": 1500,
        "--mrc-user-input-length": 50,
        "--mrc-output-length": 32,
        "--mrc-qps": 0.5,
        "--mrc-duration": 40,
    }
    return _lmcache("multi-round-chat", given, url, model, work, folder)


def agentic_code(url: str, model: str, work: Path, folder: Path) -> dict[str, Any]:
    program = environments.aiperf(work)
    hub = _hub(folder / "hub")
    (folder / "agents.json").write_text(json.dumps(_AGENTS))
    trace = {"--config": folder / "agents.json", "--num-sessions": 4, "--seed": 1, "--output": folder / "trace"}
    run([program, "synthesize", "agentic-code", *words(trace)], folder)
    (made,) = (folder / "trace").glob("*/dataset.jsonl")
    options = {
        "--url": url,
        "--model": model,
        "--tokenizer": _HUB_NAME,
        "--endpoint-type": "chat",
        "--custom-dataset-type": "mooncake_trace",
        "--input-file": made,
        "--isl-block-size": _AGENTS["block_size"],
        "--concurrency": 2,
        "--extra-inputs": "ignore_eos:true",
        "--random-seed": 1,
        "--workers-max": 1,
        "--record-processor-service-count": 1,
        "--export-level": "summary",
        "--ui": "none",
        "--artifact-dir": folder / "found",
    }
    flags = ["--streaming", "--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics"]
    run([program, "profile", *words(options), *flags], folder, HF_HUB_CACHE=str(hub))
    found = json.loads((folder / "found" / "profile_export_aiperf.json").read_text())
    return {
        "requests": round(found["request_count"]["avg"]),
        "failed": round((found.get("error_request_count") or {"avg": 0})["avg"]),
        "ttft_ms": {name: round(found["time_to_first_token"][name], 1) for name in ("p50", "p90", "max")},
        "tokens_per_s": round(found["output_token_throughput"]["avg"], 1),
    }


TOOLS: dict[str, Callable[[str, str, Path, Path], dict[str, Any]]] = {
    each.__name__: each for each in (prefix_repetition, multi_turn, long_doc_qa, multi_round_chat, agentic_code)
}


def _hub(folder: Path) -> Path:
    """The model's folder as Hugging Face's cache has it: aiperf's processes find a tokenizer nowhere else."""
    kept = folder / f"models--{_HUB_NAME.replace('/', '--')}"
    for name in ("refs", "snapshots"):
        (kept / name).mkdir(parents=True)
    (kept / "refs" / "main").write_text("one")
    (kept / "snapshots" / "one").symlink_to(demo_model())
    return folder


def _source(work: Path) -> Path:
    """Folder of vLLM's multi-turn benchmark."""
    target = work / "vllm-source" / "vllm-0.33.0" / "benchmarks" / "multi_turn"
    if not target.exists():
        environments.pip(environments.vllm(work), "install", "pandas", "aiohttp", "xlsxwriter", "tqdm")
        with tempfile.TemporaryDirectory() as folder:
            packed = Path(folder) / "vllm.tar.gz"
            subprocess.run(["curl", "-sfL", "-o", packed, SOURCE], check=True)
            if hashlib.sha256(packed.read_bytes()).hexdigest() != SHA256:
                raise RuntimeError(f"{SOURCE} is not the file that was expected")
            with tarfile.open(packed) as archive:
                wanted = [each for each in archive.getmembers() if "/benchmarks/multi_turn/" in each.name]
                archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python has it from 3.11.4 on
                archive.extractall(work / "vllm-source", wanted)
    return target


def _wheel(work: Path) -> Path:
    """Folder of LMCache, beside what its benchmark imports."""
    target = work / "lmcache"
    if not target.exists():
        environments.pip(environments.vllm(work), "install", "--no-deps", "--target", str(target), LMCACHE)
    return target


# ---- a run ----


def visit(server: str, tool: str, options: argparse.Namespace) -> dict[str, Any]:
    """One tool against one server, which is started for it."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        start = servers.SERVERS[server](options, folder)
        if server.startswith("vllm"):
            start.command.extend(["--max-model-len", "8192"])
        with servers.started(start, options.work / f"field-{server}.log") as port:
            model = servers.model_of(port)
            servers.answer(port, servers.chat("0: say a colour.", 4, model))  # the first answer of a process is slower
            (folder / "tool").mkdir()
            found = TOOLS[tool](f"http://127.0.0.1:{port}", model, options.work, folder / "tool")
    return {"tool": tool, "server": server, **start.about, "when": time.strftime("%Y-%m-%d"), **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="*", choices=servers.SERVERS, default=["keepwarm", "vllm"])
    parser.add_argument("--tools", nargs="*", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--work", type=Path, default=cache_dir() / "peers", help="environments, model files, logs")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "field.jsonl")
    options = parser.parse_args()
    options.dtype, options.clients, options.gguf = "bfloat16", 8, "float16"
    options.work = options.work.expanduser().resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    failed = 0
    for tool in options.tools:
        for server in options.servers:
            try:
                found = visit(server, tool, options)
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                print(f"{tool} with {server} left out: {error}", file=sys.stderr)
                failed += 1
                continue
            print(json.dumps(found))
            with options.output.open("a") as out:
                print(json.dumps(found), file=out)
    return failed


if __name__ == "__main__":
    sys.exit(1 if main() else 0)  # a comparison that lacks a server is told as a failure
