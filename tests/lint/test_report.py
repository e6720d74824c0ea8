"""What stands in the way of a cache is found, weighed, and the first edit named."""

from __future__ import annotations

import copy
import random
import uuid
from typing import Any

import pytest
from tests.helpers.logs import SYSTEM, TOOLS, anthropic, at, openai, text

from keepwarm.lint.edits import canonical_text
from keepwarm.lint.report import Finding, Report, lint
from keepwarm.lint.rules import load_prices

COUNT = 12


def report(entries: list[Any]) -> Report:
    return lint(text(entries), load_prices())


def finding(found: Report, kind: str) -> Finding:
    return next(each for each in found.findings if each.kind == kind)


def shuffled_keys(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict):
        return {key: shuffled_keys(value[key], rng) for key in rng.sample(list(value), len(value))}
    return [shuffled_keys(item, rng) for item in value] if isinstance(value, list) else value


def broken_by(kind: str, i: int) -> dict[str, Any]:
    question = f"Question {i}: when does the next ferry leave?"
    rng = random.Random(i)
    match kind:
        case "timestamp":
            return openai(question, f"It is 2026-11-21T09:{i:02d}:07Z. {SYSTEM}")
        case "random_id":
            return openai(question, f"Session {uuid.UUID(int=rng.getrandbits(128))}. {SYSTEM}")
        case "key_order":
            return openai(question, tools=shuffled_keys(TOOLS, rng))
        case "tool_order":
            return openai(question, tools=rng.sample(TOOLS, len(TOOLS)))
        case "trailing_whitespace":
            return openai(question, SYSTEM[:40] + " " * i + "\n" + SYSTEM[40:])
        case "changing_value":
            return openai(question, f"You talk to {'ABCDEFGHIJKLMÄÖ你'[i] * 3}. {SYSTEM}")
        case "cache_key":
            return openai(question, prompt_cache_key=f"user {i}")
        case "no_breakpoint":
            return anthropic(question)
        case _:
            raise AssertionError(kind)


KINDS = (
    "timestamp",
    "random_id",
    "key_order",
    "tool_order",
    "trailing_whitespace",
    "changing_value",
    "cache_key",
    "no_breakpoint",
)


@pytest.mark.parametrize("kind", KINDS)
def test_each_breaker_is_found_and_is_the_first_edit(kind: str) -> None:
    found = report([broken_by(kind, i) for i in range(COUNT)])
    assert [each.kind for each in found.findings if each.severity == "costs"] == [kind]
    assert found.first_edit is not None
    assert found.first_edit.kind == kind
    group = found.groups[0]
    assert group.as_is.hit_rate < 0.75
    assert group.achievable.hit_rate > 0.7
    assert group.lost_tokens == found.first_edit.alone.tokens > 5000
    assert group.lost_dollars is not None
    assert group.lost_dollars > 0
    needless = kind in ("cache_key", "no_breakpoint")  # what only vendors' caches look at
    assert found.first_edit.needless_by_keepwarm == needless
    assert (group.keepwarm_hit_rate > 0.7) == needless or kind in ("trailing_whitespace", "changing_value")


@pytest.mark.parametrize("made", [openai, anthropic])
def test_keepwarm_reads_up_to_the_first_character_that_differs_of_prompts_of_any_length(made: Any) -> None:
    log = [
        at(30 * 86400 * i, made(f"Question {i}: when?", "You are polite.", prompt_cache_key=str(i))) for i in range(3)
    ]
    group = report(log).groups[0]
    assert group.as_is.read == group.achievable.read == 0  # too short for either vendor
    assert group.keepwarm_hit_rate > 0.4
    same = report([made("The same?", "You are polite.")] * 2).groups[0]
    assert same.keepwarm_hit_rate == pytest.approx((same.prompt_tokens / 2 - 1) / same.prompt_tokens)


@pytest.mark.parametrize(("kind", "told"), [("key_order", "order of keys"), ("tool_order", "order of the tools")])
def test_that_only_an_order_differs_is_said(kind: str, told: str) -> None:
    found = report([broken_by(kind, i) for i in range(COUNT)]).first_edit
    assert found is not None
    assert found.advice.startswith(f"only the {told} differs")


def test_the_order_of_what_is_required_is_an_order_of_keys() -> None:
    def sent(i: int) -> dict[str, Any]:
        tools = copy.deepcopy(TOOLS)
        for tool in tools:
            tool["function"]["parameters"]["required"] = ["a", "b", "c"][:: 1 if i % 2 else -1]
        return openai(f"Question {i}", tools=tools)

    found = report([sent(i) for i in range(COUNT)])
    assert [each.kind for each in found.findings] == ["key_order"]


def test_a_sound_log_needs_no_edit() -> None:
    found = report([at(i, openai(f"Question {i}?")) for i in range(COUNT)])
    assert found.findings == ()
    assert found.first_edit is None
    assert found.timed
    assert found.groups[0].lost_tokens == 0
    assert found.groups[0].as_is.hit_rate > 0.7


def test_two_breakers_that_hide_each_other() -> None:
    rng = random.Random(0)
    log = [
        openai(f"Q{i}", f"Now: 2026-11-21 09:{i:02d}. {SYSTEM}", rng.sample(TOOLS, len(TOOLS))) for i in range(COUNT)
    ]
    found = report(log)
    assert {each.kind for each in found.findings} == {"timestamp", "tool_order"}
    assert not any(each.needless_by_keepwarm for each in found.findings)
    assert all(each.together.tokens > 10_000 for each in found.findings)
    assert found.first_edit is not None
    assert found.first_edit.kind == "tool_order"  # it stands further in front
    assert finding(found, "timestamp").other is not None


def test_where_it_differs_is_told_to_the_character() -> None:
    found = report([openai("a", f"Grüße, 你好 👋. Key {i}. {SYSTEM}") for i in range(3)])
    place = finding(found, "changing_value").where
    assert (place.line, place.kind, place.char) == (2, "system", len("Grüße, 你好 👋. Key "))
    assert "你好 👋. Key 1" in place.text


def test_history_that_grows_is_no_fault() -> None:
    messages = [{"role": "system", "content": SYSTEM}]
    log = []
    for turn in range(6):
        messages = [*messages, {"role": "user", "content": f"At 09:{turn:02d}:11, order 5f3a9c0d1e2b{turn}?"}]
        log.append({"model": "gpt-4.1", "messages": messages})
        messages = [*messages, {"role": "assistant", "content": "Yes."}]
    assert [each for each in report(log).findings if each.severity == "costs"] == []


def test_risks_are_told_from_one_request() -> None:
    found = report([openai("a", f"Current time: 2026-11-21 09:00. Request id req_8fk2Lm3pQ9. {SYSTEM}  ")])
    assert {each.kind for each in found.findings} == {"timestamp", "random_id", "trailing_whitespace"}
    assert {each.severity for each in found.findings} == {"risk"}
    assert found.first_edit is None
    assert report([openai("a", f"Founded on 1994-05-02. {SYSTEM}")]).findings == ()


def test_lifetimes_are_advised_where_they_pay() -> None:
    seldom = [at(900 * i, anthropic(f"Question {i}", ttl="5m")) for i in range(COUNT)]
    found = report(seldom)
    assert found.misses.keys() == {"expired"}
    assert found.first_edit is not None
    assert found.first_edit.kind == "ttl"
    once_a_day = [at(86_400 * i, anthropic(f"Question {i}", ttl="5m")) for i in range(COUNT)]
    assert report(once_a_day).first_edit is None


def test_a_log_without_reuse_is_not_told_to_mark_breakpoints() -> None:
    found = report([anthropic(f"Question {i}", f"Story {i}. {SYSTEM}"[: 6000 + i]) for i in range(2)][:1])
    assert found.first_edit is None


def test_usage_in_the_log_scales_tokens_and_is_reported() -> None:
    def entry(i: int) -> dict[str, Any]:
        usage = {"prompt_tokens": 3000, "prompt_tokens_details": {"cached_tokens": 1500 if i else 0}}
        return {"body": openai(f"Question {i}"), "response": {"usage": usage}}

    group = report([entry(i) for i in range(4)]).groups[0]
    assert group.billed_hit_rate == pytest.approx(4500 / 12_000)
    assert group.prompt_tokens == pytest.approx(12_000, abs=4)


def test_both_vendors_and_broken_lines_in_one_log() -> None:
    log: list[Any] = []
    for i in range(6):
        log += [openai(f"Question {i}"), anthropic(f"Question {i}"), "{broken"]
    found = report(log)
    assert [(group.vendor, group.requests) for group in found.groups] == [("anthropic", 6), ("openai", 6)]
    assert len(found.broken) == 6
    assert [each.kind for each in found.findings] == ["no_breakpoint"]
    assert not found.timed


def test_canonical_text_sorts_json_inside_text() -> None:
    assert canonical_text('Given {"b": 1, "a": {"d": [], "c": {}}} and {x} {') == (
        'Given {"a":{"c":{},"d":[]},"b":1} and {x} {'
    )
    text = '{"required":["b","a"],"enum":["b","a"]}'
    assert canonical_text(text) == '{"enum":["b","a"],"required":["b","a"]}'
    assert canonical_text(text, schemas=True) == '{"enum":["b","a"],"required":["a","b"]}'


@pytest.mark.slow
def test_lint_loads_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, keepwarm.cli.lint; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
