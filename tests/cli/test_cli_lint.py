"""The command `lint`: terminal and JSON."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from tests.helpers.cli import Cli
from tests.helpers.logs import SYSTEM, anthropic, openai, text


def test_command(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    log = [openai(f"Question {i}", f"It is 2026-11-21T09:{i:02d}:07Z. {SYSTEM}") for i in range(12)]
    file.write_text(text([*log, "{"]), encoding="utf-8")
    shown = cli("lint", file)
    assert shown.code == 0
    assert "line 13: not JSON" in shown.err
    assert "first edit: move dates and times out of the head" in shown.out
    assert "09:[-00-]:07Z" in shown.out
    assert "09:{+10+}:07Z" in shown.out
    assert "what it would reuse of this log as sent" in shown.out
    as_json = cli("lint", file, "--json").json
    assert as_json["first_edit"]["kind"] == "timestamp"
    assert cli("lint", "-", "--json", stdin=file.read_text("utf-8")).json == as_json
    assert cli("lint", tmp_path / "none").code == 2
    assert cli("lint", file, "--vendor", "acme").code == 2
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps({"openai": {"models": {"gpt-4.1": {"input": 200.0}}}}))
    dear = cli("lint", file, "--json", "--prices", prices).json
    assert dear["groups"][0]["lost_dollars"] == pytest.approx(100 * as_json["groups"][0]["lost_dollars"])
    assert "no request" in cli("lint", "-", stdin="\n\n").out


def test_what_keepwarm_needs_none_of_is_said(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(text([anthropic(f"Question {i}?") for i in range(12)]), encoding="utf-8")
    shown = cli("lint", file)
    assert "first edit: mark tools, system prompt and last message with cache_control (Keepwarm needs none" in shown.out


def test_rules_that_would_mend_it_are_printed(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    log = [openai(f"Question {i}", f"It is 2026-11-21T09:{i:02d}:07Z. {SYSTEM}") for i in range(12)]
    file.write_text(text(log), encoding="utf-8")
    shown = cli("lint", file, "--rules")
    (rule,) = tomllib.loads(shown.out)["rewrite"]
    assert (rule["name"], rule["where"], rule["action"]) == ("timestamp", ["system"], "move")
    assert re.fullmatch(rule["pattern"], "It is 2026-11-21T09:04:07Z")
    assert "# a date or a time:" in shown.out
    file.write_text(text([openai("Hello")]), encoding="utf-8")
    assert "nothing is found" in cli("lint", file, "--rules").err
