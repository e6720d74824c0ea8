"""Fills in figures: every measured number of README.md and docs/benchmarks.md comes from a file of benchmarks/results.

A block stands between `<!-- figures: NAME -->` and `<!-- end -->`. `python -m tools.figures` writes the blocks and the
picture anew; a test compares, and wants no measured number outside of a block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/benchmarks.md")
PICTURE = "docs/images/second-start.svg"

_BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_MEASURED = re.compile(r"\d[\d,.]*\s?(?:ms|s|seconds|times|×|%|GB/s|tokens/s)(?![\w/])")


@cache
def records(name: str) -> tuple[dict[str, Any], ...]:
    """The records of a file of results."""
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line) for line in lines if line.strip())


def fill(text: str) -> str:
    """Return a page with its blocks made anew. Raises KeyError for an unknown name."""
    return _BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}\n{found[3]}", text)


def loose(text: str) -> list[str]:
    """Measured numbers that stand outside of blocks, code and links."""
    rest = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", _BLOCK.sub("", text), flags=re.DOTALL)
    return _MEASURED.findall(rest)


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def long(value: float) -> str:
    """Milliseconds as people say them."""
    return f"{value / 1000:.1f} s" if value >= 1000 else f"{value:.0f} ms"


# ---- what the files hold ----


def first_tokens(step: int = 2048) -> list[dict[str, Any]]:
    """Summaries of times to the first token, by prompt, at the default step."""
    found = (each["summary"] for each in records("ttft.jsonl") if "summary" in each)
    return [each for each in found if each["step"] == step]


def servers() -> dict[str, dict[str, float]]:
    """Medians of the rounds after the first, by server."""
    found = {}
    for each in records("servers.jsonl"):
        later = each["rounds"][1:]
        found[each["server"]] = {
            "first": each["rounds"][0]["tokens_per_s"],
            "tokens_per_s": median(one["tokens_per_s"] for one in later),
            "ttft": median(one["ttft_ms"]["p50"] for one in later),
            "last": median(one["ttft_ms"]["max"] for one in later),
            "per_token": median(one["per_token_ms"] for one in later),
        }
    return found


def in_batch(requests: int) -> dict[str, Any]:
    (found,) = [e["summary"] for e in records("batch.jsonl") if e.get("summary", {}).get("requests") == requests]
    return dict(found)


def registered(tools: int) -> dict[str, Any]:
    """A set of so many tools."""
    (found,) = [each["row"] for each in records("tools.jsonl") if each.get("row", {}).get("tools") == tools]
    return dict(found)


def conversation() -> dict[str, Any]:
    """A conversation of fifty turns, each compared with a run without the cache."""
    return dict(records("sessions-turns.jsonl")[-1])


# ---- README ----


def reasons() -> str:
    longest, turns, both = first_tokens()[-1], conversation(), servers()
    times = longest["speed-up process"]
    ratio = both["keepwarm"]["tokens_per_s"] / both["vllm"]["tokens_per_s"]
    return "\n".join([
        f"- **It survives a restart.** A new process answers a known prompt of {longest['prompt_tokens']:,} tokens "
        f"{times:.0f} times sooner: after {long(longest['ms']['process'])}, not {long(longest['ms']['cold'])}.",
        f"- **It does not change the answer.** {turns['bit_identical_turns']} of {turns['turns']} turns of a "
        "conversation equal a run without the cache, to the last bit.",
        f"- **It is shared.** Sixteen clients on one prompt get {ratio:.1f} times the tokens per second that vLLM's "
        "prefix cache gives on the same two cores (its build for the CPU).",
    ])


def speed() -> str:
    longest, batch = first_tokens()[-1], in_batch(16)
    cold = long(longest["ms"]["cold"])
    rows = [
        (
            f"a second start: {longest['prompt_tokens']:,} tokens from disk, in a new process",
            f"{longest['speed-up process']:.0f} ×",
            long(longest["ms"]["process"]),
            cold,
        ),
        ("the same prompt again, from RAM", f"{longest['speed-up ram']:.0f} ×", long(longest["ms"]["ram"]), cold),
    ]
    for each in (registered(20), registered(50)):
        told = f"a question to {each['tools']} tools, {each['tokens']:,} tokens"
        rows.append((told, f"{each['speedup']:.0f} ×", long(each["hit_ms"]), long(each["cold_ms"])))
    speeds = batch["tokens_per_second"]
    rows.append((
        "16 requests on one prompt: at once, beside in turn",
        f"{batch['speedup']:.1f} ×",
        f"{speeds['batch']:.0f} tokens/s",
        f"{speeds['in_turn']:.0f} tokens/s",
    ))
    return table(("time to the first token", "faster", "warm", "cold"), rows)


# ---- docs/benchmarks.md ----


def ttft() -> str:
    rows = []
    for each in first_tokens():
        names = ("oneshot", "cold", "process", "disk", "ram", "device", "floor")
        rows.append((f"{each['prompt_tokens']:,}", *(ms(each["ms"][name]) for name in names)))
    head = ("prompt tokens", "one-shot", "cold", "disk, new process", "disk", "RAM", "device", "floor")
    return table(head, rows)


def ttft_ratios() -> str:
    rows = []
    for each in first_tokens():
        ratios = [f"{each[f'{name}/floor']:.2f}" for name in ("device", "ram", "disk", "process")]
        faster = [f"{each[f'speed-up {name}']:.0f}" for name in ("ram", "process")]
        rows.append((f"{each['prompt_tokens']:,}", *ratios, *faster, f"{each['cold/oneshot']:.2f}"))
    head = ("prompt tokens", "device", "RAM", "disk", "disk, new process", "RAM", "disk, new process", "cold")
    over = ("", "over the floor", "over the floor", "over the floor", "over the floor", "times sooner than cold")
    return table(head, [(*over, "times sooner than cold", "of one-shot"), *rows])


def peers(name: str = "peers.jsonl") -> str:
    (found,) = [each["summary"] for each in records(name) if "summary" in each]
    rows = [
        (f"{_PEERS.get(e['peer'], e['peer'])}, {e['hit']}", ms(e["cold"]), ms(e["ttft"]), ms(e["per_token"]))
        for e in found
    ]
    return table(("", "cold TTFT, ms", "hit TTFT, ms", "decode, ms per token"), rows)


_PEERS = {
    "keepwarm": "Keepwarm",
    "vllm": "vLLM on the CPU, compiled",
    "vllm-eager": "vLLM on the CPU, eager",
    "llamacpp": "llama.cpp",
    "llamacpp-f16": "llama.cpp in float16",
}


def served() -> str:
    rows = [
        (
            _PEERS.get(name, name),
            f"{each['tokens_per_s']:.0f}",
            long(each["ttft"]),
            long(each["last"]),
            ms(each["per_token"]),
            f"{each['first']:.0f}",
        )
        for name, each in servers().items()
    ]
    head = ("", "tokens/s", "TTFT, median", "TTFT, last client", "ms per token", "tokens/s in the first round")
    return table(head, rows)


def at_once() -> str:
    found = [each["summary"] for each in records("peers-at-once.jsonl") if "summary" in each]
    rows = [
        (
            str(each["requests"]),
            _PEERS.get(each["peer"], each["peer"]),
            f"{each['tokens_per_second']:.0f}",
            long(each["ttft_p50_ms"]),
            f"{each['keepwarm_is_times_faster']:.1f}",
        )
        for each in found
    ]
    return table(("requests", "", "tokens/s", "TTFT, median", "Keepwarm is times faster"), rows)


def batch() -> str:
    rows = []
    for each in (e["summary"] for e in records("batch.jsonl") if "summary" in e):
        speeds = each["tokens_per_second"]
        rows.append((
            str(each["requests"]),
            f"{speeds['in_turn']:.0f}",
            f"{speeds['batch']:.0f}",
            f"{each['speedup']:.1f}",
            f"{each['peak_bytes_of_one']:.2f}",
        ))
    return table(("requests", "tokens/s in turn", "tokens/s at once", "times", "KV memory of one, times"), rows)


def tools(name: str = "tools.jsonl") -> str:
    rows = [
        (
            str(e["tools"]),
            f"{e['tokens']:,}",
            *(long(e[name]) for name in ("compile_ms", "hit_ms", "cold_ms")),
            f"{e['speedup']:.0f}",
            f"{e['break_even']:.1f}",
        )
        for e in (each["row"] for each in records(name) if "row" in each)
    ]
    head = ("tools", "tokens", "computed once in", "hit", "cold", "times sooner", "pays after requests")
    return table(head, rows)


def sessions() -> str:
    rows = [
        (
            f"{e['prompt_tokens']:,}",
            *(ms(e[name]) for name in ("cold_ms", "warm_ms", "restart_ms")),
            "yes" if e["bit_identical"] else "no",
        )
        for e in records("sessions-cases.jsonl")
        if "case" in e
    ]
    return table(("tokens of the second turn", "cold, ms", "warm, ms", "after a restart, ms", "equal bits"), rows)


def turns() -> str:
    found = conversation()
    return (
        f"In a conversation of {found['turns']} turns, {found['bit_identical_turns']} of {found['turns']} equal a run "
        "without the cache to the last bit, and each takes at least "
        f"{found['least_share_of_history_cached']:.0%} of its history from the cache."
    )


def vllm() -> str:
    rows = [
        (e["case"], e["mode"], ms(e["ttft_ms"]), f"{e['times_faster_than_recomputing']:.1f}", f"{e['of_own_hit']:.2f}")
        for e in records("vllm.jsonl")
        if "times_faster_than_recomputing" in e
    ]
    head = ("from", "mode", "TTFT, ms", "times sooner than recomputing", "of vLLM's own hit")
    return table(head, rows)


def sooner(name: str) -> str:
    rows = [
        (e["case"], ms(e["ttft_ms"]), f"{e.get('times_sooner_than_cold', 1):.0f}")
        for e in records(name)
        if e["case"] == "cold" or "times_sooner_than_cold" in e
    ]
    return table(("from", "TTFT, ms", "times sooner than cold"), rows)


def memory() -> str:
    rows, dtype = [], ""
    for each in records("floor.jsonl"):
        dtype = each.get("dtype", dtype)
        if peak := each.get("peak MiB beside KV"):
            rows.append((dtype, f"{each['tokens']:,}", str(peak["oneshot"]), str(peak["scheduled"])))
    return table(("dtype", "tokens", "one-shot prefill, MiB beside the KV", "Keepwarm, MiB"), rows)


def sources() -> str:
    rows = []
    for name in SOURCES:
        found: dict[str, Any] = {}
        for each in records(name):
            found = each | found
        kernels = re.findall(r"lean:(\w+)", str(found.get("attention", "")))
        rows.append((
            f"[{name}](../benchmarks/results/{name})",
            str(found.get("dtype") or found.get("asked", {}).get("dtype") or "not told"),
            ", ".join(kernels) or "not told",
            str(found.get("when", "not told")),
            SOURCES[name],
        ))
    return table(("file", "dtype", "kernels", "when", "made by"), rows)


SOURCES = {
    "ttft.jsonl": '`make bench ARGS="--rounds 9 --prefix 512 1024 2048 3000"`',
    "peers.jsonl": '`make bench-peers ARGS="--peers transformers vllm vllm-eager llamacpp llamacpp-f16"`',
    "peers-float32.jsonl": '`make bench-peers ARGS="--dtype float32"`, earlier',
    "peers-at-once.jsonl": "`python benchmarks/peers/at_once.py --dtype bfloat16 --peers transformers vllm`",
    "servers.jsonl": "`make bench-servers`",
    "batch.jsonl": "`python benchmarks/batch.py`",
    "tools.jsonl": "`keepwarm bench tools`",
    "tools-qwen2.5-0.5b.jsonl": "`keepwarm bench tools --model PATH --counts 5,10,20,50,100 --rounds 7`, earlier",
    "sessions-turns.jsonl": "`python benchmarks/sessions.py --part turns`",
    "sessions-cases.jsonl": "`python benchmarks/sessions.py --part cases`",
    "floor.jsonl": "`python benchmarks/floor.py --prefix 512 2048 --rounds 9`",
    "vllm.jsonl": "`python benchmarks/vllm.py`",
    "llamacpp.jsonl": "`python benchmarks/llamacpp.py`",
    "mlxlm.jsonl": "`python benchmarks/mlxlm.py`",
    "llamaserver.jsonl": "`python benchmarks/llamaserver.py`",
}

BLOCKS: dict[str, Callable[[], str]] = {
    "reasons": reasons,
    "speed": speed,
    "ttft": ttft,
    "ttft-ratios": ttft_ratios,
    "peers": peers,
    "peers-float32": lambda: peers("peers-float32.jsonl"),
    "servers": served,
    "at-once": at_once,
    "batch": batch,
    "tools": tools,
    "tools-qwen": lambda: tools("tools-qwen2.5-0.5b.jsonl"),
    "sessions": sessions,
    "turns": turns,
    "vllm": vllm,
    "llamacpp": lambda: sooner("llamacpp.jsonl"),
    "mlxlm": lambda: sooner("mlxlm.jsonl"),
    "llamaserver": lambda: sooner("llamaserver.jsonl"),
    "memory": memory,
    "sources": sources,
}


# ---- the picture ----


def picture() -> str:
    """Bars of the first start and the second one, as SVG."""
    longest = first_tokens()[-1]
    cold, warm = longest["ms"]["cold"], longest["ms"]["process"]
    width = 520
    bars = [("first start", cold, "#d9822b"), ("second start", warm, "#2f7d5b")]
    rows = []
    for place, (name, value, colour) in enumerate(bars):
        y = 40 + 44 * place
        length = max(3.0, width * value / cold)
        rows.append(
            f'<text x="108" y="{y + 19}" text-anchor="end">{name}</text>'
            f'<rect x="118" y="{y}" width="{length:.1f}" height="28" rx="3" fill="{colour}"/>'
            f'<text x="{126 + length:.1f}" y="{y + 19}" font-weight="bold">{long(value)}</text>'
        )
    title = f"Time to the first token of a prompt of {longest['prompt_tokens']:,} tokens"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 140" role="img" aria-label="{title}: '
        f'{long(cold)} at the first start, {long(warm)} at the second" font-family="system-ui, sans-serif" '
        'font-size="15" fill="#7a828c">',
        f'<text x="118" y="22">{title}</text>',
        *rows,
        "</svg>",
        "",
    ])


def main() -> None:
    for name in PAGES:
        path = ROOT / name
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")
    (ROOT / PICTURE).write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
