"""What was measured, as medians, paired ratios and a Markdown table."""

from __future__ import annotations

import statistics
from typing import Any

BASE = ("keepwarm", "ram")  # what ratios are taken of
Row = dict[str, Any]
Times = dict[int, dict[str, float]]  # by round: "cold" (in some), "ttft" and "per_token", in ms


def summary(rows: list[Row], about: dict[str, Row], prompt: int, suffix: int) -> list[Row]:
    """One line for each peer and kind of hit, and three for the floors; `prompt` and `suffix` in tokens.

    Ratios are medians of those within each round: this time by that of Keepwarm's hit in RAM.
    """
    times = {(name, kind): _times(rows, name, kind) for name, told in about.items() for kind in told["hits"]}
    base = times[BASE]
    lines = []
    for (name, kind), mine in times.items():
        peak = max(row["peak_bytes"] for row in rows if row["peer"] == name) / 2**30
        extra = {"same_tokens": _same(rows, name, kind), "peak_gib": round(peak, 2)}
        lines.append({"peer": name, "hit": kind} | _medians(mine, base) | extra)
    for kind, floor in _floors(rows, about["keepwarm"], prompt, suffix).items():
        lines.append({"peer": "floor", "hit": kind} | _medians(floor, base))
    return lines


def markdown(lines: list[Row], about: dict[str, Row], failed: dict[str, str]) -> str:
    """The table that is printed, what each peer is, and which failed how."""
    text = [
        "| | hit | cold TTFT, ms | hit TTFT, ms | decode, ms a token | cold ÷ | hit ÷ | decode ÷ | same tokens | GiB |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for line in lines:
        same = f"{line['same_tokens']:.0%}" if "same_tokens" in line else ""
        peak = f"{line['peak_gib']:.1f}" if "peak_gib" in line else ""
        text.append(
            f"| {line['peer']} | {line['hit']} | {line['cold']:,.0f} | {line['ttft']:.1f} | {line['per_token']:.1f} "
            f"| {line['cold_ratio']:.2f} | {line['ttft_ratio']:.2f} | {line['per_token_ratio']:.2f} | {same} | {peak} |"
        )
    notes = [f"{name}: {', '.join(f'{k} {v}' for k, v in told.items() if k != 'hits')}" for name, told in about.items()]
    notes += [f"{name} left out: {why}" for name, why in failed.items()]
    return "\n".join([*text, "", f"÷: by Keepwarm's, hit in {BASE[1]}.", "", *(f"- {note}" for note in notes)])


def _times(rows: list[Row], name: str, kind: str) -> Times:
    mine = {row["round"]: row for row in rows if row["peer"] == name}
    return {
        number: {"ttft": row[kind]["ttft"], "per_token": _per_token(row[kind])}
        | ({"cold": row["cold"]} if "cold" in row else {})
        for number, row in mine.items()
    }


def _per_token(answer: Row) -> float:
    """Of the tokens after the first, in ms. Keepwarm's answer ends at an end token, however soon."""
    later = len(answer["tokens"]) - 1
    if not later:
        raise ValueError("an answer of one token tells nothing about decoding: ask another question")
    return float(answer["total"] - answer["ttft"]) / later


def _medians(times: Times, base: Times) -> Row:
    line: Row = {}
    for what in ("cold", "ttft", "per_token"):
        both = [number for number in times if what in times[number] and what in base.get(number, {})]
        line[what] = round(statistics.median(times[number][what] for number in both), 3)
        ratios = (times[number][what] / base[number][what] for number in both)
        line[f"{what}_ratio"] = round(statistics.median(ratios), 3)
    return line


def _floors(rows: list[Row], about: Row, prompt: int, suffix: int) -> dict[str, Times]:
    """What the machine allows by the rates measured in each round: `bytes` (weights and KV are read once),
    `operations` (multiplications and additions at the speed of one large matrix product) and `sustained` (at that of
    such products one after the other for as long as a cold prompt takes)."""

    def operations(tokens: int, seen: float) -> float:
        return tokens * (2.0 * about["body"] + about["attention"] * seen) + 2.0 * about["head"]

    kv = about["kv_bytes_per_token"] * prompt
    amounts = {
        "bytes": {"cold": about["weight_bytes"], "ttft": about["weight_bytes"] + kv},
        "operations": {"cold": operations(prompt, prompt / 2), "ttft": operations(suffix, prompt - suffix / 2)},
    }
    amounts["bytes"]["per_token"] = amounts["bytes"]["ttft"]
    amounts["operations"]["per_token"] = operations(1, prompt)
    amounts["sustained"] = amounts["operations"]
    machines = {row["round"]: row["machine"] for row in rows if "machine" in row}
    return {
        kind: {
            number: {what: amount / machine[f"{kind}_per_second"] * 1e3 for what, amount in needed.items()}
            for number, machine in machines.items()
        }
        for kind, needed in amounts.items()
    }


def _same(rows: list[Row], name: str, kind: str) -> float:
    """Share of a peer's tokens that stand before the first that differs from Keepwarm's on the same prompt."""
    asked = {
        (row["round"], hit["prompt"]): hit["tokens"]
        for row in rows
        if row["peer"] == BASE[0]
        for hit in row.values()
        if isinstance(hit, dict) and "prompt" in hit
    }
    same = total = 0
    for row in rows:
        if row["peer"] == name:
            theirs, ours = row[kind]["tokens"], asked[row["round"], row[kind]["prompt"]]
            length = min(len(theirs), len(ours))
            same += next((i for i in range(length) if theirs[i] != ours[i]), length)
            total += length
    return round(same / total, 3)
