"""The blocks of README.md, and what other pages use of the same files."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from tools.figures.results import divided, long, records, sooner, summaries, table


def first_tokens(step: int = 2048) -> list[dict[str, Any]]:
    """Summaries of times to the first token, by prompt, at the default step."""
    return [each for each in summaries("ttft.jsonl") if each["step"] == step]


def ttft_rounds(step: int = 2048) -> list[dict[str, Any]]:
    """The times of every round, by prompt, at the default step."""
    return [each for each in records("ttft.jsonl") if each.get("step") == step]


def servers() -> dict[str, dict[str, Any]]:
    """Medians of the rounds after the first, by server, and the least of them."""
    found = {}
    for each in records("servers.jsonl"):
        later = each["rounds"][1:]
        found[each["server"]] = {
            "dtype": each["dtype"],
            "first": each["rounds"][0]["tokens_per_s"],
            "tokens_per_s": median(one["tokens_per_s"] for one in later),
            "least": min(one["tokens_per_s"] for one in each["rounds"]),
            "ttft": median(one["ttft_ms"]["p50"] for one in later),
            "last": median(one["ttft_ms"]["max"] for one in later),
            "per_token": median(one["per_token_ms"] for one in later),
        }
    return found


def registered(tools: int) -> dict[str, Any]:
    """A set of so many tools."""
    (found,) = [each["row"] for each in records("tools.jsonl") if each.get("row", {}).get("tools") == tools]
    return dict(found)


def conversation() -> dict[str, Any]:
    """A conversation of fifty turns, each compared with a run without the cache."""
    return dict(records("sessions-turns.jsonl")[-1])


def restarted(row: Mapping[str, Any]) -> list[float]:
    """How many times sooner the first request of a new process is than the median cold one: they share no rounds."""
    return [median(row["times"]["cold"]) / each for each in row["times"]["process"]]


def reasons() -> str:
    longest, turns, both = first_tokens()[-1], conversation(), servers()
    times = median(restarted(ttft_rounds()[-1]))
    ratio = both["keepwarm"]["tokens_per_s"] / both["vllm"]["tokens_per_s"]
    return "\n".join([
        f"- **It survives a restart.** Once its model is loaded, a new process answers a known prompt of "
        f"{longest['prompt_tokens']:,} tokens {times:.0f} times sooner: after {long(longest['ms']['process'])}, not "
        f"{long(longest['ms']['cold'])}.",
        f"- **It does not change the answer.** {turns['bit_identical_turns']} of {turns['turns']} turns of a "
        "conversation equal a run without the cache, to the last bit.",
        f"- **It is shared.** Sixteen clients on one prompt get {ratio:.1f} times the tokens per second that vLLM's "
        "prefix cache gives on the same two cores (its build for the CPU).",
    ])


def speed() -> str:
    longest, row, turn = first_tokens()[-1], ttft_rounds()[-1], records("sessions-cases.jsonl")[-1]
    cold = long(longest["ms"]["cold"])
    tokens = f"{longest['prompt_tokens']:,} tokens"
    rows = [
        (f"a second start: {tokens} from disk, in a new process", restarted(row), longest["ms"]["process"], cold),
        (
            "the same prompt again, from RAM",
            divided(row["times"]["cold"], row["times"]["ram"]),
            longest["ms"]["ram"],
            cold,
        ),
    ]
    for each in (registered(20), registered(50)):
        told = f"a question to {each['tools']} tools, {each['tokens']:,} tokens"
        rows.append((told, tools_ratios(each), each["hit_ms"], long(each["cold_ms"])))
    told = f"the second turn of a conversation, {turn['prompt_tokens']:,} tokens"
    rounds = turn["rounds_ms"]
    rows.append((told, divided(rounds["cold"], rounds["warm"]), turn["warm_ms"], long(turn["cold_ms"])))
    return table(
        ("time to the first token", "times sooner", "warm", "cold"),
        [(told, sooner(ratios), long(warm), without) for told, ratios, warm, without in rows],
    )


def tools_ratios(row: Mapping[str, Any]) -> list[float]:
    """How many times sooner a hit is, round by round; one number, where the file has no rounds."""
    found = row.get("rounds_ms")
    return divided(found["cold"], found["hit"]) if found else [row["speedup"]]


BLOCKS = {"reasons": reasons, "speed": speed}
