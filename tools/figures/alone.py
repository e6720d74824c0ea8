"""Blocks about Keepwarm itself: prompts, batches, tools, conversations, memory, the service, remote tiers."""

from __future__ import annotations

from typing import Any

from tools.figures.readme import conversation, first_tokens, restarted, tools_ratios, ttft_rounds
from tools.figures.results import divided, long, ms, over, plain, ratio, records, sooner, summaries, table


def ttft() -> str:
    rows = []
    for each in first_tokens():
        names = ("oneshot", "cold", "process", "disk", "ram", "device", "floor")
        rows.append((f"{each['prompt_tokens']:,}", *(ms(each["ms"][name]) for name in names)))
    head = ("prompt tokens", "one-shot", "cold", "disk, new process", "disk", "RAM", "device", "floor")
    return table(head, rows)


def ttft_ratios() -> str:
    rows = []
    for row in ttft_rounds():
        times = row["times"]
        shares = [over(divided(times[name], times["floor"])) for name in ("device", "ram", "disk")]
        faster = (sooner(divided(times["cold"], times["ram"])), sooner(restarted(row)))
        rows.append((f"{row['prompt_tokens']:,}", *shares, *faster, over(divided(times["cold"], times["oneshot"]))))
    head = ("prompt tokens", "device / floor", "RAM / floor", "disk / floor")
    return table((*head, "cold / RAM", "cold / disk, new process", "cold / one-shot"), rows)


def batch() -> str:
    rounds: dict[int, list[dict[str, Any]]] = {}
    for each in records("batch.jsonl"):
        if "round" in each:
            rounds.setdefault(each["requests"], []).append(each)
    rows = []
    for each in summaries("batch.jsonl"):
        speeds = each["tokens_per_second"]
        speed = {
            kind: [one[kind]["tokens_per_second"] for one in rounds[each["requests"]]] for kind in ("batch", "in_turn")
        }
        rows.append((
            str(each["requests"]),
            f"{speeds['in_turn']:.0f}",
            f"{speeds['batch']:.0f}",
            sooner(divided(speed["batch"], speed["in_turn"])),
            f"{each['peak_bytes_of_one']:.2f}",
        ))
    return table(("requests", "tokens/s in turn", "tokens/s at once", "times", "KV memory of one, times"), rows)


def tools(name: str = "tools.jsonl") -> str:
    rows = [
        (
            str(e["tools"]),
            f"{e['tokens']:,}",
            *(long(e[name]) for name in ("compile_ms", "hit_ms", "cold_ms")),
            sooner(tools_ratios(e)),
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


def straight() -> str:
    rows = []
    for each in records("sessions-straight.jsonl"):
        if "turns" in each:
            low, middle, high = each["ttft_over_floor"]
            shown = f"{plain(middle)} ({plain(low)} to {plain(high)}; {plain(each['worst'])})"
            rows.append((f"{each['system_tokens']:,}", str(each["turns"]), f"{each['last_prompt_tokens']:,}", shown))
    return table(("tokens of the system prompt", "turns", "tokens of the last one", "TTFT / floor"), rows)


def memory() -> str:
    rows, dtype = [], ""
    for each in records("floor.jsonl"):
        dtype = each.get("dtype", dtype)
        if peak := each.get("peak MiB beside KV"):
            rows.append((dtype, f"{each['tokens']:,}", str(peak["oneshot"]), str(peak["scheduled"])))
    return table(("dtype", "tokens", "one-shot prefill, MiB beside the KV", "Keepwarm, MiB"), rows)


def remote() -> str:
    names = {"cold": "cold", "ram": "RAM", "disk": "disk", "redis": "Redis", "s3": "S3", "file": "a shared folder"}
    rows = []
    for each in records("remote.jsonl"):
        name, _, first = each["case"].partition("_")
        told = names[name] + (", first request of a process" if first else "")
        speed = f"{each['load_gb_per_s']:.1f}" if "load_gb_per_s" in each and name != "ram" else ""
        times = "" if name == "cold" else ratio(each["sooner_than_cold"])
        rows.append((told, ms(each["ttft_ms"]), ms(each["most_ms"]), times, speed))
    return table(("from", "TTFT, ms", "most, ms", "times sooner than cold", "GB/s"), rows)


def service() -> str:
    parts = {each.get("part"): each for each in records("serve.jsonl")}
    added, load = parts["overhead"]["overhead_ms"], parts["load"]
    health = load["health_ms"]
    return (
        f"Through HTTP, a hit's first token comes {added['median']:.1f} ms later (p99: {added['p99']:.0f} ms). While "
        f"{load['clients']} clients get {load['tokens_per_s']:.0f} tokens/s, `/health` answers in "
        f"{health['median']:.1f} ms (p99: {health['p99']:.0f} ms, most: {health['max']:.0f} ms)."
    )


def page() -> str:
    names = {"first_paint": "first paint", "interactive": "interactive", "filled": "filled"}
    rows = [
        (
            names[each["part"]],
            f"{ms(each['median'])} ({ms(each['quartile_1'])} to {ms(each['quartile_3'])}; {ms(each['worst'])})",
        )
        for each in records("page.jsonl")
    ]
    return table(("", "ms from the start of a visit"), rows)


def codecs() -> str:
    rows = []
    for each in (one for one in records("codecs.jsonl") if one["kind"] == "quality"):
        for name, found in each["codecs"].items():
            rows.append((
                each["model"],
                name,
                f"{found['share_of_bf16']:.0%}",
                f"{found['change']:+.2%}",
                f"{found['kl_mean']:.4f}",
                f"{found['top1_same']:.1%}",
            ))
    return table(("model", "codec", "bytes, of bfloat16's", "perplexity", "KL, mean", "same first choice"), rows)


def adapters() -> str:
    rows = []
    for each in records("adapters.jsonl"):
        times = "" if each["side"] == "without" else ratio(each)
        rows.append((each["what"], each["side"], ms(each["ms"]), times))
    return table(("", "", "ms", "times that without an adapter"), rows)


def families() -> str:
    rows = []
    for each in records("families.jsonl"):
        shown = (ms(each["keepwarm_ms"]), ms(each["transformers_ms"]))
        rows.append((each["model"], each["what"], *shown, ratio(each)))
    return table(("model", "", "Keepwarm, ms", "transformers, ms", "times sooner"), rows)


def levels() -> str:
    rows = []
    for each in records("levels.jsonl"):
        shown = (ms(each["keepwarm_ms"]), ms(each["transformers_ms"]))
        rows.append((f"`{each['level']}`", each["dtype"], each["what"], *shown, ratio(each)))
    return table(("level", "dtype", "", "Keepwarm, ms", "transformers, ms", "times sooner"), rows)


def hybrids() -> str:
    rows = [
        (
            each["model"],
            f"{each['cached_tokens']:,} of {each['prompt_tokens']:,}",
            *(ms(each[name]) for name in ("cold_ms", "hit_ms", "edited_ms", "restart_ms")),
            f"{each['snapshot_bytes'] / 1e6:.0f} MB",
            "yes" if each["bit_identical"] else "no",
        )
        for each in records("hybrids-hits.jsonl")
        if "cold_ms" in each
    ]
    head = ("shaped like", "reused", "cold, ms", "hit, ms", "after an edit, ms", "after a restart, ms", "snapshots")
    return table((*head, "equal bits"), rows)


def attach() -> str:
    names = {"not attached": "transformers alone", "model": "the model's own kernels", "own": "compiled kernels"}
    rows = [
        (
            names[each["kernels"]],
            f"{each['reused']:,} of {each['tokens']:,}",
            ms(each["first_ms"]),
            ms(each["again_ms"]),
            ratio(each["over_floor"]),
        )
        for each in records("attach.jsonl")
    ]
    return table(("`attach`", "reused", "first, ms", "again, ms", "again / floor"), rows)


def agents() -> str:
    found = [each for each in records("traces.jsonl") if " and " in each["trace"]]
    told = {each["tier"]: each for each in found}["disk"]
    return (
        f"Of {told['requests']:,} requests of real coding agents, {told['tokens']:,} tokens in all, "
        f"{told['share']:.2%} are found. A cache without bounds that remembers single tokens finds "
        f"{told['best_share']:.2%}."
    )


BLOCKS = {
    "ttft": ttft,
    "ttft-ratios": ttft_ratios,
    "batch": batch,
    "tools": tools,
    "tools-qwen": lambda: tools("tools-qwen2.5-0.5b.jsonl"),
    "sessions": sessions,
    "turns": turns,
    "straight": straight,
    "memory": memory,
    "remote": remote,
    "service": service,
    "page": page,
    "codecs": codecs,
    "adapters": adapters,
    "families": families,
    "levels": levels,
    "hybrids": hybrids,
    "attach": attach,
    "agents-found": agents,
}
