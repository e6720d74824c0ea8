"""The blocks of README.md, and what other pages use of the same files."""

from __future__ import annotations

from statistics import median
from typing import Any

from tools.figures.results import long, records, summaries, table


def first_tokens(step: int = 2048) -> list[dict[str, Any]]:
    """Summaries of times to the first token, by prompt, at the default step."""
    return [each for each in summaries("ttft.jsonl") if each["step"] == step]


def servers() -> dict[str, dict[str, float]]:
    """Medians of the rounds after the first, by server, and the least of them."""
    found = {}
    for each in records("servers.jsonl"):
        later = each["rounds"][1:]
        found[each["server"]] = {
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
    longest = first_tokens()[-1]
    (batch,) = [each for each in summaries("batch.jsonl") if each["requests"] == 16]
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


BLOCKS = {"reasons": reasons, "speed": speed}
