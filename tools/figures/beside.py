"""Blocks about Keepwarm beside others, and within other engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.figures.readme import servers
from tools.figures.results import divided, long, mb, ms, ratio, records, sooner, summaries, table

NAMES = {
    "keepwarm": "Keepwarm",
    "vllm": "vLLM on the CPU, compiled",
    "vllm-eager": "vLLM on the CPU, eager",
    "llamacpp": "llama.cpp",
    "llamacpp-f16": "llama.cpp in float16",
}

FIELD = {
    "prefix_repetition": "vLLM's `bench serve`, `prefix_repetition`",
    "multi_turn": "vLLM's `benchmark_serving_multi_turn.py`",
    "long_doc_qa": "LMCache's `bench engine`, `long-doc-qa`",
    "multi_round_chat": "LMCache's `bench engine`, `multi-round-chat`",
    "agentic_code": "NVIDIA's `aiperf`, `agentic-code`",
}


def named(peer: str) -> str:
    return NAMES.get(peer, peer)


def peers(name: str = "peers.jsonl") -> str:
    (found,) = summaries(name)
    hits = _hits(name)
    rows = []
    for each in found:
        ratios = divided(hits.get((each["peer"], each["hit"]), []), hits["keepwarm", "ram"])
        times = sooner(ratios) if ratios and each["peer"] != "keepwarm" else ""
        shown = (ms(each["cold"]), ms(each["ttft"]), ms(each["per_token"]))
        rows.append((f"{named(each['peer'])}, {each['hit']}", *shown, times))
    head = ("cold TTFT, ms", "hit TTFT, ms", "decode, ms per token", "Keepwarm's hit is times sooner")
    return table(("", *head), rows)


def _hits(name: str) -> dict[tuple[str, str], list[float]]:
    """Times to the first token of hits, by peer and kind of hit, round by round."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in records(name):
        for kind, told in row.items():
            if "round" in row and isinstance(told, dict) and "ttft" in told:
                found.setdefault((row["peer"], kind), []).append(told["ttft"])
    return found


def served() -> str:
    rows = [
        (
            named(name) + ("" if each["dtype"] == "bfloat16" else f", {each['dtype']}"),
            f"{each['tokens_per_s']:.0f}",
            f"{each['least']:.0f}",
            long(each["ttft"]),
            long(each["last"]),
            ms(each["per_token"]),
            f"{each['first']:.0f}",
        )
        for name, each in servers().items()
    ]
    head = ("", "tokens/s", "least", "TTFT, median", "TTFT, last client", "ms per token")
    return table((*head, "tokens/s in the first round"), rows)


def at_once() -> str:
    speeds = at_once_speeds()
    rows = []
    for each in summaries("peers-at-once.jsonl"):
        count, peer = each["requests"], each["peer"]
        times = "" if peer == "keepwarm" else sooner(divided(speeds[count, "keepwarm"], speeds[count, peer]))
        speed = f"{each['tokens_per_second']:.0f}"
        rows.append((str(count), named(peer), speed, long(each["ttft_p50_ms"]), times))
    return table(("requests", "", "tokens/s", "TTFT, median", "Keepwarm is times faster"), rows)


def at_once_speeds() -> dict[tuple[int, str], list[float]]:
    """Tokens per second, by requests and peer, round by round."""
    found: dict[tuple[int, str], list[float]] = {}
    for row in records("peers-at-once.jsonl"):
        if "round" in row:
            found.setdefault((row["requests"], row["peer"]), []).append(row["tokens_per_second"])
    return found


def vllm() -> str:
    rows = [
        (
            e["case"],
            e["mode"],
            ms(e["ttft_ms"]),
            ms(e["most_ms"]),
            *(ratio(e[name]) if name in e else "" for name in ("sooner_than_recomputing", "of_own_hit")),
        )
        for e in records("vllm.jsonl")
        if "case" in e
    ]
    head = ("from", "mode", "TTFT, ms", "most, ms", "times sooner than recomputing", "of vLLM's own hit")
    return table(head, rows)


# ---- engines that keep their prompts with us ----


def cases(name: str) -> dict[str, dict[str, Any]]:
    return {each["case"]: each for each in records(name)}


def within(name: str) -> str:
    """An engine's cases, for the page of benchmarks."""
    return table(("from", "TTFT, ms", "times sooner than cold"), list(_rows(name, ms)))


def _rows(name: str, shown: Any) -> Iterator[tuple[str, str, str]]:
    for case, each in cases(name).items():
        if case == "cold":
            yield case, shown(each["ttft_ms"]), ""
        elif "times_sooner_than_cold" in each:
            yield case, shown(each["ttft_ms"]), ratio(each["times_sooner_than_cold"])


def _page(name: str, told: dict[str, str], more: dict[str, str]) -> str:
    """An engine's cases in the words of its own page, with a column more."""
    rows = [(told.get(case, case), ttft, times, more.get(case, "")) for case, ttft, times in _rows(name, long)]
    return table(("", "first token", "times sooner than cold", ""), rows)


def llamacpp() -> str:
    found = cases("llamacpp.jsonl")
    told = {
        "own, in RAM": "`LlamaRAMCache`, context emptied",
        "own, after a restart": "`LlamaDiskCache`, after a restart",
        "ours": "`KeepwarmCache` from disk, context emptied",
        "ours, after a restart": "`KeepwarmCache`, after a restart",
    }
    size = found["bytes on disk"]
    disk = {
        "own, after a restart": f"{mb(size['own'])} on disk",
        "ours, after a restart": f"{mb(size['ours'])} on disk",
    }
    about = found["cold"]
    behind = [each["behind_ms"] for case, each in found.items() if case.startswith(("own, in RAM", "ours"))]
    return "\n".join([
        f"{about['tokens']:,} tokens and another question, medians of {about['rounds']} rounds:",
        "",
        _page("llamacpp.jsonl", told, disk),
        "",
        f"Opening the store took {long(found['opening']['ttft_ms'])} more: it probes the form of states with four "
        f"tokens. After an answer the library copied the state and scores, for any cache: {long(min(behind))} to "
        f"{long(max(behind))}.",
    ])


def llamaserver() -> str:
    found = cases("llamaserver.jsonl")
    about, size = found["cold"], found["bytes on disk"]
    more = {
        "in a slot": "the question's tokens are computed",
        "after a restart": f"the same, the server is asked what it saves, and {mb(size['store'])} are restored",
        "in a slot, straight, the same prompt again": "one token is computed",
        "restored by hand, after a restart, the same prompt again": "one token is computed",
    }
    kept = found["behind the answer"]["ttft_ms"]
    return "\n".join([
        f"{about['tokens']:,} tokens and another question, medians of {about['rounds']} rounds:",
        "",
        _page("llamaserver.jsonl", {}, more),
        "",
        f"Saving and storing took {long(kept)} behind the first answer. Cold times went from "
        f"{long(about['least_ms'])} to {long(about['most_ms'])}.",
    ])


def mlxlm() -> str:
    found = cases("mlxlm.jsonl")
    told = {
        "own, in memory": "mlx-lm's own cache in memory",
        "ours, in memory": "`KeepwarmPromptCache`, in memory",
        "ours, from disk": "from disk, memory emptied",
        "ours, after a restart": "after a restart",
    }
    lookups = {case: f"{each['lookup_ms']:.0f} ms of it are the lookup" for case, each in found.items() if case in told}
    about = found["cold"]
    return "\n".join([
        f"{about['tokens']:,} tokens and another question, rounds: {about['rounds']}.",
        "",
        _page("mlxlm.jsonl", told, lookups),
        "",
        f"The prompt took {mb(found['bytes on disk']['ours'])} on disk.",
    ])


def gguf() -> str:
    rows = []
    latest = {each["file"]: each for each in records("gguf.jsonl")}
    for file, each in latest.items():
        for what in ("decode", "hit", "cold"):
            found = each[what]
            rows.append((file, what, ms(found["ours"]), ms(found["theirs"]), ratio(found)))
    return table(("file", "", "Keepwarm, ms", "llama.cpp, ms", "times sooner"), rows)


def gguf_memory() -> str:
    latest = {each["file"]: each for each in records("gguf.jsonl")}
    rows = [
        (file, f"{each['file_mib']:,.0f}", *(f"{each['memory_mib'][side]:,.0f}" for side in ("ours", "theirs")))
        for file, each in latest.items()
    ]
    return table(("file", "its size, MiB", "Keepwarm holds, MiB", "llama.cpp holds, MiB"), rows)


def drafts() -> str:
    """Answers with drafted tokens, without them, and llama.cpp's."""
    rows = []
    for each in records("drafts.jsonl"):
        accepted = f"{each['accepted']} of {each['drafted']}"
        times = [ms(each[name]) for name in ("drafts_ms", "without_ms", "again_ms", "llamacpp_ms") if name in each]
        times += [""] * (4 - len(times))
        beside = ratio(each["llamacpp"]) if "llamacpp" in each else ""
        rows.append((each["model"], each["request"], accepted, *times, ratio(each), ratio(each["again"]), beside))
    head = ("with drafts, ms", "without, ms", "asked again, ms", "llama.cpp, ms")
    sooner = ("drafts: times sooner than without", "asked again: times sooner", "drafts: times sooner than llama.cpp")
    return table(("model", "request", "drafts accepted", *head, *sooner), rows)


def field() -> str:
    """The field's own tools: one row for each, Keepwarm beside vLLM."""
    found = {(each["tool"], each["server"]): each for each in records("field.jsonl")}
    rows = []
    for tool, told in FIELD.items():
        own, other = found[tool, "keepwarm"], found[tool, "vllm"]
        times = [long(each["ttft_ms"][name]) for name in ("p50", "p90") for each in (own, other)]
        speeds = [f"{each['tokens_per_s']:.0f}" if "tokens_per_s" in each else "" for each in (own, other)]
        ratio = sooner([other["ttft_ms"]["p50"] / own["ttft_ms"]["p50"]])
        rows.append((told, str(own["requests"]), *times, *speeds, ratio))
    sides = [f"{what}, {side}" for what in ("TTFT p50", "p90", "tokens/s") for side in ("Keepwarm", "vLLM")]
    return table(("", "requests", *sides, "Keepwarm's p50 is times sooner"), rows)


BLOCKS = {
    "field": field,
    "peers": peers,
    "peers-float32": lambda: peers("peers-float32.jsonl"),
    "servers": served,
    "at-once": at_once,
    "vllm": vllm,
    "llamacpp": lambda: within("llamacpp.jsonl"),
    "llamaserver": lambda: within("llamaserver.jsonl"),
    "mlxlm": lambda: within("mlxlm.jsonl"),
    "llamacpp-page": llamacpp,
    "llamaserver-page": llamaserver,
    "mlxlm-page": mlxlm,
    "drafts": drafts,
    "gguf": gguf,
    "gguf-memory": gguf_memory,
}
