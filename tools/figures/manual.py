"""Blocks of the manual's other pages: chunks, agents, fleets, proofs; and of papers/nope.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from tools.figures.results import ROOT, ms, ratio, records, table

MODELS = {"smollm2": "SmolLM2", "demo": "SmolLM2", "qwen2.5-0.5b": "Qwen2.5-0.5B"}
DEFAULT = "impact:0.13"


# ---- chunks ----


def quality() -> dict[tuple[str, str], dict[str, Any]]:
    """Of each model and repair: what is recomputed and reused, KL, agreement, and how many answers are the same."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in records("chunks.jsonl"):
        if row["what"] == "quality" and row["texts"] == "handbook":
            groups.setdefault((MODELS[row["model"]], row["repair"]), []).append(row)
    return {key: _quality(rows) for key, rows in groups.items()}


def _quality(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    kl = sorted(row["kl"] for row in rows)
    return {
        "questions": len(rows),
        "repaired": mean(row["repaired"] for row in rows),
        "reused": mean(row["reused"] for row in rows),
        "kl": median(kl),
        "kl90": kl[int(0.9 * (len(kl) - 1))],
        "worst": kl[-1],
        "agree": mean(row["agree"] for row in rows),
        "same": sum(row["leading"] == row["of"] for row in rows),
    }


def _order(repair: str) -> tuple[int, str, float]:
    kind, _, much = repair.partition(":")
    kinds = ("none", "seam", "leading", "deviation", "attention", "impact")
    return kinds.index(kind), kind, float(much or 0)


def chunks_quality() -> str:
    found = quality()
    models = sorted({model for model, _ in found}, reverse=True)  # the smaller one first
    rows = []
    for repair in sorted({repair for _, repair in found}, key=_order):
        cells: list[str] = []
        for model in models:
            if each := found.get((model, repair)):
                cells += [f"{each['kl']:.4f}", f"{each['kl90']:.4f}", f"{each['worst']:.4f}", f"{each['agree']:.1%}"]
                cells.append(f"{each['same']} of {each['questions']}")
            else:
                cells += [""] * 5
        share = found[next(key for key in ((model, repair) for model in models) if key in found)]["repaired"]
        rows.append((f"`{repair}`", f"{share:.0%}", *cells))
    head = [part for model in models for part in (f"{model}: KL median", "90 %", "worst", "agreement", "same answer")]
    return table(("repair", "recomputed", *head), rows)


def _speeds() -> dict[tuple[str, str], dict[str, Any]]:
    """Rows of speed, by model and repair; the row without a repair is the full prefill's."""
    rows = (row for row in records("chunks.jsonl") if row["what"] == "speed")
    return {(MODELS[row["model"]], row.get("repair", "")): row for row in rows}


def chunks_bounds() -> str:
    found, speeds = quality(), _speeds()
    models = sorted({model for model, _ in found}, reverse=True)  # the smaller one first
    qualities = [found[model, DEFAULT] for model in models]
    speed = [speeds[model, DEFAULT] for model in models]
    rows = [
        (
            "at least 90 % of document tokens reused",
            *(_held(f"{e['reused']:.1%}", e["reused"] >= 0.9) for e in qualities),
        ),
        ("first-token KL at most 0.02, median", *(_held(f"{e['kl']:.4f}", e["kl"] <= 0.02) for e in qualities)),
        (
            "at least 95 % of the first 16 tokens agree",
            *(_held(f"{e['agree']:.1%}", e["agree"] >= 0.95) for e in qualities),
        ),
        (
            "TTFT at most a third of a full prefill's at 4,000 tokens",
            *(_held(f"{e['times']:.1f} times lower", e["times"] >= 3) for e in speed),
        ),
        (
            "recomputing costs at most 1.3 times as many tokens in an ordinary step",
            *(_held(f"{e['repair_per_ordinary']:.2f}", e["repair_per_ordinary"] <= 1.3) for e in speed),
        ),
    ]
    return table(("bound", *models), rows)


def _held(value: str, held: bool) -> str:
    return f"{value}: {'held' if held else 'not held'}"


def chunks_speed() -> str:
    rows, full = [], []
    for (model, repair), each in _speeds().items():
        if not repair:
            full.append(
                f"{model}: {each['prompt_tokens']:,} tokens, {each['rounds']} rounds, {each['oneshot_ms']:,} ms; the "
                f"engine's own steps take {each['scheduled_ms']:,} ms."
            )
            continue
        rows.append((
            model,
            f"`{repair}`",
            f"{each['ttft_ms']:,}",
            ratio(each),
            *(f"{each[name]:.0f}" for name in ("load_ms", "select_ms", "repair_ms", "carry_ms", "rows", "ordinary_ms")),
            f"{each['repair_per_ordinary']:.2f}",
        ))
    head = (
        "model",
        "repair",
        "TTFT ms",
        "times lower",
        "load and turn ms",
        "choose ms",
        "recompute ms",
        "carry over ms",
    )
    more = ("rows", "ordinary step of as many rows, ms", "recompute ÷ ordinary")
    return "\n".join([f"A full prefill: {' '.join(full)}", "", table((*head, *more), rows)])


def chunks_peers() -> str:
    found = [each for each in records("peers-chunks.jsonl") if "case" in each]
    rows = []
    for peer, kind in dict.fromkeys((each["peer"], each["kind"]) for each in found):
        cells: list[str] = []
        for case in ("same beginning", "documents moved"):
            (each,) = [e for e in found if (e["peer"], e["kind"], e["case"]) == (peer, kind, case)]
            told = (
                f" (it says {each['told_ms']:.0f})" if each["told_ms"] and each["told_ms"] < each["ttft_ms"] / 2 else ""
            )
            cells += [f"{each['ttft_ms']:.0f}{told}", f"{each['reused']:.0%}", f"{each['agree']:.0%}"]
        rows.append((peer, f"`{kind}`", *cells))
    cases = ("header and documents asked about before: TTFT ms", "documents moved: TTFT ms")
    head = [part for case in cases for part in (case, "reused", "agreement")]
    return table(("", "reuse", *head), rows)


# ---- agents ----

CLIENTS = {
    "qwen-code": "Qwen Code",
    "opencode": "OpenCode",
    "openai-agents": "OpenAI Agents SDK",
    "pydantic-ai": "pydantic-ai",
    "ai-sdk": "AI SDK",
    "openai-ts": "OpenAI TypeScript SDK, Responses",
    "claude": "Claude Code",
    "aider": "aider",
    "codex": "Codex CLI",
}


def clients() -> str:
    rows = []
    for each in records("clients.jsonl"):
        cold = each["cold"]
        cells = [f"{cold['prompt_tokens']:,}", f"{cold['ttft_ms'] / 1000:.1f} s"]
        for part in (each["second_start"], each["next_turn"]):
            cells.append(f"{part['cached_tokens']:,} of {part['prompt_tokens']:,} ({part['reused']:.1%})")
            cells.append(f"{part['ttft_ms'] / 1000:.2f} s")
        name = f"{CLIENTS.get(each['client'], each['client'])} {each['version']}"
        computed = [part["prompt_tokens"] - part["cached_tokens"] for part in (each["second_start"], each["next_turn"])]
        rows.append((name, *cells, f"{computed[0]:,} and {computed[1]:,}"))
    head = ("client", "tokens of the first prompt", "its first token", "second start: reused", "its first token")
    return table((*head, "turn after it: reused", "its first token", "tokens computed in both"), rows)


# ---- fleets ----


def rates(policy: str = "s3fifo") -> dict[tuple[str, int, str, float], float]:
    """Shares of prompt tokens found, by trace, replicas, kind of fleet, and capacity."""
    return {
        (row["trace"].removeprefix("mooncake_"), row["replicas"], row["fleet"], row["share"]): row["hit_rate"]
        for row in records("simulate.jsonl")
        if row["policy"] == policy
    }


def fleets() -> str:
    found = rates()
    rows = []
    for trace in ("conversation", "synthetic"):
        for replicas in (10, 100, 1000):
            shown = (f"{found[trace, replicas, fleet, 0.3]:.1%}" for fleet in ("local", "routed", "shared"))
            rows.append((f"{trace}, {replicas:,}", *shown))
    return table(("replicas", "own caches, requests in turn", "own caches, routed by prefix", "one shared cache"), rows)


# ---- proofs ----


def prove(server: str) -> str:
    (found,) = [each for each in records("prove.jsonl") if each["server"] == server]
    rows = []
    for each in found["checks"]:
        times, of = each["ttft_ms"], each["prompts"]
        cached = (
            "not told" if each["cached_tokens"] is None else f"{each['cached_tokens']:,} of {each['prompt_tokens']:,}"
        )
        rows.append((
            each["check"],
            f"{each['same_tokens']} of {of}",
            f"{each['equal']} of {of}",
            f"{float(each['largest_logprob_difference'] or 0):.3g}",
            cached,
            f"{ms(times['reference'])} ms" if times else "",
            f"{ms(times['tested'])} ms" if times else "",
        ))
    head = ("same tokens", "equal", "largest difference", "cached", "TTFT of what it is compared with", "TTFT")
    return table(("", *head), rows)


# ---- tools without positions ----


def nope(name: str) -> str:
    """The table of a report, without the columns about the tool that was named."""
    text = (ROOT / "papers" / "results" / name / "report.md").read_text(encoding="utf-8")
    rows = []
    for line in re.findall(r"^\| ((?:alone|header) \|.*) \|$", text, re.MULTILINE):
        cells = line.split(" | ")
        rows.append((*cells[:6], cells[7].partition(" [")[0], cells[8]))
    head = ("computed", "repaired", "recomputed", "questions", "logits cosine, mean", "KL, median")
    return table((*head, "same first token", "greedy agreement"), rows)


BLOCKS = {
    "chunks-quality": chunks_quality,
    "chunks-bounds": chunks_bounds,
    "chunks-speed": chunks_speed,
    "chunks-peers": chunks_peers,
    "clients": clients,
    "fleets": fleets,
    "prove-keepwarm": lambda: prove("keepwarm"),
    "prove-vllm": lambda: prove("vllm-eager"),
    "prove-llamacpp": lambda: prove("llama.cpp"),
    "nope-smollm2": lambda: nope("nope-smollm2"),
    "nope-qwen": lambda: nope("nope-qwen2.5-0.5b"),
}
