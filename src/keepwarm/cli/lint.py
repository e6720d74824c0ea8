"""`keepwarm lint`: what a request log would gain from prompt caching, and the first edit to make. It runs no model."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from keepwarm.cli import output
from keepwarm.cli.diff import print_side_by_side
from keepwarm.cli.options import Json
from keepwarm.core.changing import place_of
from keepwarm.errors import ConfigError
from keepwarm.lint.report import Finding, Group, Place, Report, mended
from keepwarm.lint.report import lint as lint_log
from keepwarm.lint.rules import load_prices


def lint(
    log: Annotated[str, typer.Argument(metavar="LOG", help="Requests, one JSON object per line; '-' reads them.")],
    vendor: Annotated[
        str | None, typer.Option("--vendor", help="Whose rules apply where a line does not tell: openai or anthropic.")
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option("--prices", metavar="FILE", help="JSON with prices and rules that replace the published ones."),
    ] = None,
    rules: Annotated[
        bool, typer.Option("--rules", help="Print only rules for `keepwarm serve` that would mend what is found.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Replay a log of OpenAI or Anthropic requests without a model: reachable hit rate, tokens and money lost, and why.
    Also show what Keepwarm would reuse of the same log.

    Tokens are estimated from the texts, and fitted to the usage that the log has.
    """
    if vendor not in (None, "openai", "anthropic"):
        raise ConfigError(f"--vendor must be openai or anthropic, got {vendor!r}")
    report = lint_log(_text(log), load_prices(prices), vendor)
    if report.broken and not report.requests:
        first = report.broken[0]
        raise ConfigError(
            f"{log} is no log of requests: none of {output.counted(len(report.broken), 'line')} can be read as one "
            f"(line {first.line}: {first.why}); expected a JSON object per line, as OpenAI's or Anthropic's API takes"
        )
    if rules:
        _print_rules(report)
    elif as_json:
        output.print_json(report.to_dict())
    else:
        _print(report)


def _text(name: str) -> str:
    try:
        data = sys.stdin.read() if name == "-" else Path(name).expanduser().read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from None
    return data


def _print(report: Report) -> None:
    for broken in report.broken[:10]:
        output.note(f"line {broken.line}: {broken.why}")
    if len(report.broken) > 10:
        output.note(f"... and {output.counted(len(report.broken) - 10, 'line')} more that cannot be read")
    if not report.requests:
        print("no request in the log")
        return
    output.print_table(
        (
            "vendor",
            "model",
            "requests",
            "prompt tokens",
            "billed",
            "as sent",
            "reachable",
            "lost tokens",
            "lost",
            "Keepwarm",
        ),
        [_row(group) for group in report.groups],
        right=(2, 3, 4, 5, 6, 7, 8, 9),
    )
    print()
    rows = [
        ("rules", f"as published {report.prices}; token counts are estimates"),
        ("Keepwarm", "what it would reuse of this log as sent: up to the first character that differs, nothing marked"),
    ]
    if report.unconfirmed:
        rows.append(("unconfirmed", f"not read on a page of the vendor's own: {', '.join(report.unconfirmed)}"))
    if not report.timed:
        rows.append(("times", "not every line says when it was sent: replayed in order, and nothing expires"))
    if report.misses:
        lost = "; ".join(f"{cause} {tokens:,}" for cause, tokens in report.misses.items())
        rows.append(("lost to", f"{lost} (tokens, by where prompts part)"))
    output.print_fields(rows)
    if report.findings:
        print()
        output.print_table(
            ("finding", "", "requests", "saves alone", "with the others", "first at", "do"),
            [_finding(found) for found in report.findings],
            right=(2, 3, 4),
        )
    print()
    first = report.first_edit
    if first is None:
        print("first edit: none needed" if not report.findings else "first edit: none would save anything in this log")
        return
    print(f"first edit: {_advice(first)}")
    if first.other is not None:
        print_side_by_side((_where(first.other), first.other.text), (_where(first.where), first.where.text))


def _print_rules(report: Report) -> None:
    """Print rules for what changes in texts. The dearest finding's comes first."""
    shown: dict[str, str] = {}  # by what a rule does and where
    kinds: Counter[str] = Counter()
    for found in report.findings:
        rule = mended(found)
        if rule is None:
            continue
        where = found.where.kind if found.where.kind in ("tools", "system") else "message"
        place = place_of(where, found.where.part.partition("(")[2].rstrip(")"))
        if place is None:
            continue
        if (key := f"{rule.pattern} {place}") not in shown:
            kinds[rule.kind] += 1
            tokens = output.counted(found.worth.tokens, "token")
            shown[key] = f"# {rule.says}: {tokens} in this log\n{rule.rule(place, kinds[rule.kind])}"
    if not shown:
        output.note("nothing is found that a rule would mend")
    print("\n".join(shown.values()))


def _row(group: Group) -> tuple[str, ...]:
    billed = group.billed_hit_rate
    return (
        group.vendor,
        group.model,
        f"{group.requests:,}",
        f"{group.prompt_tokens:,}",
        "-" if billed is None else f"{billed:.0%}",
        f"{group.as_is.hit_rate:.0%}",
        f"{group.achievable.hit_rate:.0%}",
        f"{group.lost_tokens:,}",
        _money(group.lost_dollars),
        f"{group.keepwarm_hit_rate:.0%}",
    )


def _finding(found: Finding) -> tuple[str, ...]:
    saves = [
        f"{each.tokens:,} ({_money(each.dollars)})" if each.tokens else "-" for each in (found.alone, found.together)
    ]
    return (found.kind, found.severity, f"{found.requests:,}", *saves, _where(found.where), _advice(found))


def _advice(found: Finding) -> str:
    return f"{found.advice} (Keepwarm needs none of it)" if found.needless_by_keepwarm else found.advice


def _where(place: Place) -> str:
    return f"line {place.line}, {place.kind} {place.part}, character {place.char:,} (token {place.token:,})"


def _money(dollars: float | None) -> str:
    if dollars is None:
        return "?"
    return f"${dollars:,.2f}" if abs(dollars) >= 0.1 or not dollars else f"${dollars:.4f}"
