"""What `make bench-all` runs: a step for each file of results, with its commands and the minutes that two cores need.

A command may name these: {python}, this environment's; {out}, the step's own folder, where it writes its files; {work},
the folder of environments and files of models; {models} and {traces}; and what the peers' environments are, {vllm},
{llamacpp}, {llama_server} and {mlx}. Minutes are estimates, from the times that earlier results hold; after a run,
`--list` shows what each step took instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Step:
    name: str
    commands: tuple[str, ...]
    files: tuple[str, ...]  # what is kept of it, in the folder of results
    minutes: float
    needs: tuple[str, ...] = ()  # a program, `model NAME`, `traces`, or `peer NAME`, which is an environment
    quick: str = ""  # the smallest sizes: the last command alone, with these arguments behind it
    holds: tuple[str, ...] = ()  # what else a file must hold: some programs go on without a peer that does not start
    made: str = ""  # the file's name as the command writes it, where it is kept under another one


_CLI = "{python} -m keepwarm.cli"
_REPAIRS = "none seam:16 leading:32 deviation:0.15 attention:0.15 impact:0.05 impact:0.1 impact:0.13 impact:0.2"
_QUALITY = f"{{python}} benchmarks/chunks.py quality --dtype bfloat16 --output {{out}}/chunks.jsonl --repair {_REPAIRS}"
_SPEED = (
    "{python} benchmarks/chunks.py speed --dtype bfloat16 --tokens 4000 --output {out}/chunks.jsonl"
    " --repair none impact:0.1 impact:0.13"
)
_QWEN = "{models}/qwen2.5-0.5b"
_FAMILIES = "{python} benchmarks/families.py %s --rounds 5 --out {out}/families.jsonl"
# Shapes, and whose vocabulary they have: one that is like the real model's.
_RANDOM = {"qwen3-moe": _QWEN, "lfm2": "{demo}", "granite4": _QWEN, "gemma4": "{demo}"}
_CLIENTS = ("qwen-code", "opencode", "openai-agents", "pydantic-ai", "ai-sdk", "openai-ts", "claude", "aider", "codex")
_FIELD = ("prefix_repetition", "multi_turn", "long_doc_qa", "multi_round_chat", "agentic_code")
_MOONCAKE = "{traces}/mooncake_conversation.jsonl {traces}/mooncake_synthetic.jsonl"
_SIMULATE = f"{_CLI} simulate --match blocks --jobs 2 --out {{out}}/simulate.jsonl"
_GGUF, _Q8 = ("qwen2.5-1.5b", "qwen2.5-0.5b"), "{out}/%s-q8_0.gguf"
_BOTH = " ".join(f"{{models}}/{file}.gguf {_Q8 % file}" for file in _GGUF)
_AGENTS = "{traces}/agent_*.json"  # a pattern: its files are put in its place

STEPS = (
    Step(
        "ttft",
        ("{python} benchmarks/ttft.py --prefix 512 1024 2048 3000 --step 2048 --rounds 5 --output {out}",),
        ("ttft.jsonl",),
        4,
        quick="--prefix 64 --rounds 1",
    ),
    Step(
        "batch",
        ("{python} benchmarks/batch.py --dtype bfloat16 --rounds 3 --output {out}",),
        ("batch.jsonl",),
        3,
        quick="--requests 1 2 --prefix 64 --rounds 1 --new 4",
    ),
    Step(
        "tools",
        (f"{_CLI} bench tools --dtype bfloat16 --counts 5,10,20,50 --rounds 5 --output {{out}}",),
        ("tools.jsonl",),
        2,
        quick="--counts 1,2 --rounds 1",
    ),
    Step(
        "tools-qwen",
        (f"{_CLI} bench tools --model {_QWEN} --counts 5,10,20 --rounds 3 --output {{out}}",),
        ("tools-qwen2.5-0.5b.jsonl",),
        3,
        ("model qwen2.5-0.5b",),
        "--counts 1,2 --rounds 1",
    ),
    Step(
        "sessions",
        ("{python} benchmarks/sessions.py --part cases turns straight --output {out}",),
        ("sessions-cases.jsonl", "sessions-turns.jsonl", "sessions-straight.jsonl"),
        6,
    ),
    Step(
        "floor",
        ("{python} benchmarks/floor.py --prefix 512 2048 --rounds 5 --output {out}",),
        ("floor.jsonl",),
        3,
        quick="--prefix 64 --rounds 1",
    ),
    Step(
        "attach", ("{python} benchmarks/attach.py --out {out}/attach.jsonl",), ("attach.jsonl",), 2, quick="--rounds 1"
    ),
    Step(
        "serve",
        ("{python} benchmarks/serve.py --output {out}",),
        ("serve.jsonl",),
        2,
        quick="--prefix 64 --hits 2 --clients 2 --new 4 --seconds 2",
    ),
    Step(
        "page", ("{python} benchmarks/page.py --out {out}/page.jsonl",), ("page.jsonl",), 1, ("chromium",), "--rounds 3"
    ),
    Step(
        "remote",
        ("{python} benchmarks/remote.py --out {out}/remote.jsonl",),
        ("remote.jsonl",),
        3,
        ("redis-server",),
        "--prefix 64 --rounds 1",
    ),
    Step(
        "codecs",
        ("{python} benchmarks/codecs.py quality --passage 0 1 --output {out}",),
        ("codecs.jsonl",),
        1,
        quick="--passage 0",
    ),
    Step(
        "adapters",
        ("{python} benchmarks/adapters.py {demo} --rounds 5 --out {out}/adapters.jsonl",),
        ("adapters.jsonl",),
        2,
        quick="--prefix 64 --rounds 1",
    ),
    Step(
        "families",
        (
            *(_FAMILIES % f"{{models}}/{model}" for model in ("gemma3-270m", "gemma3-270m.gguf")),
            *(f"{_FAMILIES % model} --random {shape}" for shape, model in _RANDOM.items()),
        ),
        ("families.jsonl",),
        4,
        ("model gemma3-270m", "model gemma3-270m.gguf", "model qwen2.5-0.5b"),
        "--prefix 64 --rounds 1",
    ),
    Step(
        "levels",
        ("{python} benchmarks/levels.py {demo} --rounds 5 --out {out}/levels.jsonl",),
        ("levels.jsonl",),
        5,
        quick="--prefix 64 --rounds 1",
    ),
    Step("hybrids", ("{python} benchmarks/hybrids.py --part hits --output {out}",), ("hybrids-hits.jsonl",), 6),
    Step(
        "chunks",
        (
            f"{_QUALITY} --questions 28",
            f"{_QUALITY} --questions 25 --model {_QWEN}",
            f"{_SPEED} --rounds 7",
            f"{_SPEED} --rounds 5 --model {_QWEN}",
        ),
        ("chunks.jsonl",),
        7,
        ("model qwen2.5-0.5b",),
    ),
    Step(
        "simulate",
        (
            f"{_SIMULATE} --capacity 0.3,1,3,10,30,100 {_MOONCAKE}",
            f"{_SIMULATE} --capacity 1,3,10,30,100 --together {_AGENTS}",
            f"{_SIMULATE} --capacity 3,10,30,100 --policy s3fifo --replicas 1,10,100,1000 {_MOONCAKE}",
        ),
        ("simulate.jsonl",),
        4,
        ("traces",),
        "--capacity 30",
    ),
    Step(
        "traces",
        (f"{{python}} benchmarks/traces.py {_AGENTS} --out {{out}}/traces.jsonl",),
        ("traces.jsonl",),
        4,
        ("traces",),
    ),
    Step(
        "peers",
        (
            "{python} benchmarks/peers/run.py --dtype bfloat16 --rounds 5 --work {work} --output {out}"
            " --peers transformers vllm vllm-eager llamacpp llamacpp-f16",
        ),
        ("peers.jsonl",),
        8,
        ("peer vllm", "peer llamacpp"),
        "--peers transformers --rounds 1 --cold 1 --prefix 64 --new-tokens 4",
        holds=('"peer": "vllm"', '"peer": "vllm-eager"', '"peer": "llamacpp"', '"peer": "llamacpp-f16"'),
    ),
    Step(
        "peers-float32",
        (
            "{python} benchmarks/peers/run.py --dtype float32 --rounds 3 --cold 2 --work {work} --output {out}"
            " --peers transformers vllm llamacpp",
        ),
        ("peers-float32.jsonl",),
        6,
        ("peer vllm", "peer llamacpp"),
        "--peers transformers --rounds 1 --cold 1 --prefix 64 --new-tokens 4",
        made="peers.jsonl",
        holds=('"peer": "vllm"', '"peer": "llamacpp"'),
    ),
    Step(
        "at-once",
        (
            "{python} benchmarks/peers/at_once.py --dtype bfloat16 --requests 1 4 16 --rounds 3 --work {work}"
            " --output {out} --peers transformers vllm",
        ),
        ("peers-at-once.jsonl",),
        6,
        ("peer vllm",),
        "--peers --requests 1 2 --rounds 1 --prefix 64 --new-tokens 4",
        holds=('"peer": "vllm"', '"peer": "transformers"'),
    ),
    Step(
        "servers",
        ("{python} benchmarks/peers/servers.py --work {work} --output {out}/servers.jsonl",),
        ("servers.jsonl",),
        8,
        ("peer vllm", "peer llama-server"),
        "--servers keepwarm --clients 2 --rounds 2 --new 4",
        holds=('"server": "vllm"', '"server": "llama.cpp"'),
    ),
    Step(
        "field",
        ("{python} benchmarks/field.py --work {work} --output {out}/field.jsonl",),
        ("field.jsonl",),
        14,
        ("peer vllm",),
        "--servers keepwarm --tools long_doc_qa",
        holds=tuple(f'"tool": "{tool}", "server": "vllm"' for tool in _FIELD),
    ),
    Step(
        "peers-chunks",
        ("{python} benchmarks/peers/chunks.py --dtype bfloat16 --work {work} --output {out}/peers-chunks.jsonl",),
        ("peers-chunks.jsonl",),
        4,
        ("peer kvboost",),
        "--rounds 1 --documents 2",
        holds=('"peer": "kvboost"',),
    ),
    Step(
        "vllm",
        ("{python} benchmarks/vllm.py --prompts 20 --work {work} --out {out}/vllm.jsonl",),
        ("vllm.jsonl",),
        5,
        ("peer vllm", "redis-server"),
        "--prompts 2 --cold 1 --kinds disk",
    ),
    Step(
        "llamacpp",
        ("{llamacpp} benchmarks/llamacpp.py {models}/qwen2.5-0.5b.gguf --rounds 3 --out {out}/llamacpp.jsonl",),
        ("llamacpp.jsonl",),
        5,
        ("peer llamacpp", "model qwen2.5-0.5b.gguf"),
        "--tokens 64 --rounds 1",
    ),
    Step(
        "gguf",
        (
            *(f"{{python}} benchmarks/gguf_files.py --make-q8 {{models}}/{file}.gguf {_Q8 % file}" for file in _GGUF),
            f"{{python}} benchmarks/gguf_files.py {_BOTH} {{models}}/gemma3-270m.gguf"
            " --peer {llamacpp} --no-logits --output {out}",
        ),
        ("gguf.jsonl",),
        6,
        ("peer llamacpp", "model qwen2.5-0.5b.gguf", "model qwen2.5-1.5b.gguf", "model gemma3-270m.gguf"),
    ),
    Step(
        "drafts",
        (
            "{python} benchmarks/drafts.py {models}/qwen2.5-1.5b.gguf {demo} --rounds 3"
            " --peer {llamacpp} --out {out}/drafts.jsonl",
        ),
        ("drafts.jsonl",),
        6,
        ("peer llamacpp", "model qwen2.5-1.5b.gguf"),
        "--rounds 1 --new 8",
    ),
    Step(
        "prove",
        ("{python} benchmarks/peers/prove.py --work {work} --output {out}/prove.jsonl",),
        ("prove.jsonl",),
        4,
        ("peer vllm", "peer llama-server"),
        "--servers keepwarm --new 4",
        holds=('"server": "vllm-eager"', '"server": "llama.cpp"'),
    ),
    Step(
        "llama-server",
        (
            "{python} benchmarks/llamaserver.py {models}/qwen2.5-0.5b.gguf --program {llama_server} --rounds 3"
            " --out {out}/llamaserver.jsonl",
        ),
        ("llamaserver.jsonl",),
        5,
        ("peer llama-server", "model qwen2.5-0.5b.gguf"),
        "--tokens 64 --rounds 1",
    ),
    Step(
        "mlx-lm",
        ("{mlx} benchmarks/mlxlm.py {demo} --tokens 500 --rounds 3 --out {out}/mlxlm.jsonl",),
        ("mlxlm.jsonl",),
        3,
        ("peer mlx",),
        "--tokens 64",
    ),
    Step(
        "clients",
        ("env KEEPWARM_CLIENTS_MODEL={models}/qwen2.5-0.5b make test-clients ARGS=--record={out}/clients.jsonl",),
        ("clients.jsonl",),
        12,
        ("npm", "model qwen2.5-0.5b"),
        '"ARGS=--record={out}/clients.jsonl -k openai-ts"',
        holds=(*(f'"client": "{name}"' for name in _CLIENTS),),
    ),
)

# Environments that are made once, before the first step that needs them: packages beside the peer's own, and minutes.
PEERS = {
    "vllm": ("pytest xxhash redis obstore moto[s3] flask flask-cors", 6),
    "llamacpp": ("pytest hypothesis gguf pydantic xxhash cryptography", 4),
    "llama-server": ("", 5),
    "mlx": ("pytest hypothesis pydantic xxhash cryptography", 1),
    "kvboost": ("", 3),
}
