"""The plots of README.md and the manual, each drawn from the same records as the tables."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from tools.figures.beside import at_once_speeds, named
from tools.figures.charts import COLOURS, bars, lines
from tools.figures.manual import quality
from tools.figures.readme import first_tokens
from tools.figures.results import long, ms, records, summaries

FOLDER = "docs/images"
OURS, OTHERS = COLOURS[0], COLOURS[1]


def second_start() -> str:
    longest = first_tokens()[-1]
    rows = [("first start", longest["ms"]["cold"], OTHERS), ("second start", longest["ms"]["process"], OURS)]
    return bars(f"Time to the first token of a prompt of {longest['prompt_tokens']:,} tokens", rows, long)


def ttft() -> str:
    names = {
        "oneshot": "one-shot",
        "cold": "cold",
        "process": "disk, new process",
        "disk": "disk",
        "ram": "RAM",
        "device": "device",
        "floor": "floor",
    }
    series = {
        told: [(each["prompt_tokens"], each["ms"][name]) for each in first_tokens()] for name, told in names.items()
    }
    return lines("Time to first token, by length", "prompt tokens", "ms", series, log_y=True)


def peers() -> str:
    (found,) = summaries("peers.jsonl")
    rows = [
        (f"{named(each['peer'])}, {each['hit']}", each["ttft"], OURS if each["peer"] == "keepwarm" else OTHERS)
        for each in found
        if each["peer"] != "floor"
    ]
    return bars("Time to the first token of a hit", rows, lambda value: f"{ms(value)} ms", left=330)


def at_once() -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for (requests, peer), speeds in at_once_speeds().items():
        series.setdefault(named(peer), []).append((requests, median(speeds)))
    return lines("Requests at once on one warm prefix", "requests", "tokens per second", series, log_x=True)


def tools() -> str:
    rows = [each["row"] for each in records("tools.jsonl") if "row" in each]
    series = {
        told: [(row["tokens"], row[name]) for row in rows]
        for name, told in (("cold_ms", "cold"), ("hit_ms", "hit"), ("floor_ms", "floor"))
    }
    return lines("A question to registered tools", "tokens of the tools", "TTFT, ms", series, log_y=True)


def policies() -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for row in records("simulate.jsonl"):
        if row["trace"] == "mooncake_conversation" and row["replicas"] == 1:
            at = series.setdefault({"belady": "optimum"}.get(row["policy"], row["policy"]), [])
            at.append((100 * row["share"], 100 * row["hit_rate"]))
    ordered = {name: sorted(set(points)) for name, points in series.items()}
    title = "What a cache finds of a request log (conversation), by policy"
    return lines(title, "capacity, % of the distinct blocks", "% of prompt tokens found", ordered, log_x=True)


def fleets() -> str:
    names = {"local": "own, in turn", "routed": "own, routed", "shared": "one shared cache"}
    series: dict[str, list[tuple[float, float]]] = {told: [] for told in names.values()}
    for row in records("simulate.jsonl"):
        if row["trace"] == "mooncake_conversation" and row["replicas"] > 1 and row["share"] == 0.3:
            series[names[row["fleet"]]].append((row["replicas"], 100 * row["hit_rate"]))
    title = "What a fleet finds of it, with capacity for 30 % of the distinct blocks"
    return lines(title, "replicas", "% of prompt tokens found", series, log_x=True)


def chunks(model: str) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for (of, repair), found in quality().items():
        if of == model:
            point = (100 * found["repaired"], found["kl"])
            series.setdefault(repair.partition(":")[0], []).append(point)
    ordered = {name: sorted(points) for name, points in series.items()}
    title = f"{model}: quality against cost of repairing chunks"
    return lines(title, "% of the tokens recomputed", "KL of the first token, median", ordered, log_y=True)


PICTURES: dict[str, Callable[[], str]] = {
    "second-start": second_start,
    "ttft": ttft,
    "peers": peers,
    "at-once": at_once,
    "tools": tools,
    "policies": policies,
    "fleets": fleets,
    "chunks-smollm2": lambda: chunks("SmolLM2"),
    "chunks-qwen": lambda: chunks("Qwen2.5-0.5B"),
}
