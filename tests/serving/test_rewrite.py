"""Rules that move or fix what changes in every request: what is behind it is reused, and each answer tells what was."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.inside import serving, status
from tests.helpers.processes import DEADLINE
from tests.helpers.services import weather

from keepwarm.core.changing import IDS, mend, place_of
from keepwarm.core.deadline import Deadline
from keepwarm.errors import ConfigError, TookTooLong
from keepwarm.serving.rewrite import Rewriting
from keepwarm.serving.settings import RewriteRule, ServeConfig

LONG = "Be brief, be kind, and call a tool when one fits. " * 30
RULES = [
    {"name": "day", "pattern": r"Today is [\d-]+\.\s*", "where": ["system", "first_user"], "action": "move"},
    {"name": "budget", "pattern": "<left>[^<]*</left>", "where": ["first_user"], "action": "drop"},
    {"name": "id", "pattern": r"run \K\w+", "where": ["tool_results", "tools"], "action": "replace", "text": "#"},
]
CHANGES = {"rule": "day", "where": "system", "count": 1}


@pytest.fixture(scope="module")
def model(saved: Callable[..., Path]) -> str:
    return str(saved("llama"))


@pytest.fixture(scope="module")
def url(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("store"), models={"tiny": model}, rewrite=RULES) as (found, _):
        yield found


@pytest.fixture(scope="module")
def plain(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Without rules."""
    with serving(tmp_path_factory.mktemp("store"), models={"tiny": model}) as (found, _):
        yield found


def system(day: int) -> str:
    return f"Today is 2026-11-{day}. {LONG}"


def asked(protocol: str, url: str, day: int) -> tuple[int, int, Any]:
    """Ask what differs in the system prompt's date alone. Return tokens reused, tokens in all, and what was changed."""
    body: dict[str, Any] = {"model": "tiny", "temperature": 0}
    if protocol == "chat":
        path, body["max_tokens"] = "chat/completions", 2
        body["messages"] = [{"role": "system", "content": system(day)}, {"role": "user", "content": "Hello"}]
    elif protocol == "anthropic":
        path, body["max_tokens"] = "messages", 2
        body |= {"system": system(day), "messages": [{"role": "user", "content": "Hello"}]}
    else:
        path, body["max_output_tokens"] = "responses", 2
        body |= {"instructions": system(day), "input": "Hello"}
    found = httpx.post(f"{url}/v1/{path}", json=body, timeout=DEADLINE).raise_for_status().json()
    usage, told = found["usage"], found["keepwarm"].get("rewritten")
    if protocol == "chat":
        return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"], told
    if protocol == "responses":
        return usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"], told
    cached, written = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
    return cached, cached + written + usage["input_tokens"], told


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "day"), [("chat", 11), ("anthropic", 13), ("responses", 15)])
def test_what_stands_behind_is_reused(url: str, plain: str, protocol: str, day: int) -> None:
    assert asked(protocol, url, day)[2] == [CHANGES]
    cached, tokens, told = asked(protocol, url, day + 1)
    assert told == [CHANGES]
    assert tokens - cached < 32, "the date stands at the end of what the user says"
    asked(protocol, plain, day)
    cached, tokens, told = asked(protocol, plain, day + 1)
    assert cached < 32, "it stands near the beginning"
    assert told is None


def test_diagnoses_are_of_what_the_model_was_shown(url: str, plain: str) -> None:
    """What a rule moved away is no change of the system prompt, which was reused."""

    def compared(where: str, day: int, protocol: str, earlier: str | None) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 2}
        user = {"role": "user", "content": "Hello"}
        if protocol == "chat":
            body["messages"] = [{"role": "system", "content": system(day)}, user]
            body |= {"prompt_cache_options": {"comparison_response_id": earlier}} if earlier else {}
            path = "chat/completions"
        else:
            body |= {"system": system(day), "messages": [user]}
            body |= {"diagnostics": {"previous_message_id": earlier}} if earlier else {}
            path = "messages"
        return dict(httpx.post(f"{where}/v1/{path}", json=body, timeout=DEADLINE).raise_for_status().json())

    for where, changed in ((url, "messages_changed"), (plain, "system_changed")):
        first = compared(where, 17, "anthropic", None)["id"]
        told = compared(where, 18, "anthropic", first)["diagnostics"]["cache_miss_reason"]
        assert told["type"] == changed
        first = compared(where, 19, "chat", None)["id"]
        diagnosed = compared(where, 20, "chat", first)["prompt_cache_diagnostics"]
        assert diagnosed["reason"] == "input_changed"
        assert (diagnosed["cache_missed_tokens"] < 32) == (where == url)


def test_bits_are_those_of_a_cold_run(url: str) -> None:
    for day in (23, 24):
        messages = [{"role": "system", "content": system(day)}, {"role": "user", "content": "Hello"}]
        body = {"messages": messages, "max_new_tokens": 3}
        found = httpx.post(f"{url}/query/compare", json=body, timeout=DEADLINE).raise_for_status().json()
        assert found["bit_identical"]
        assert found["warm"]["rewritten"] == [CHANGES]


def test_streams_tell_it_too(url: str) -> None:
    messages = [{"role": "system", "content": system(25)}, {"role": "user", "content": "<left>9</left>Hello"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 2, "stream": True}
    text = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=DEADLINE).text
    assert '"rewritten":[{"rule":"day","where":"system","count":1},{"rule":"budget","where":"first_user"' in text


def test_it_is_counted_and_explained(url: str, plain: str) -> None:
    assert asked("chat", url, 26)[0] > 0
    assert 'keepwarm_rewrites_total{rule="day",where="system"}' in httpx.get(f"{url}/metrics", timeout=DEADLINE).text
    rule = status(url)["rewrite"][0]
    assert (rule["name"], rule["action"]) == ("day", "move")
    assert rule["changed"]["system"] > 0
    assert "rewrite" not in status(plain)
    messages = [{"role": "system", "content": system(27)}, {"role": "user", "content": "Hello"}]
    explained = httpx.post(f"{url}/v1/cache/explain", json={"messages": messages}, timeout=DEADLINE).json()
    assert explained["rewritten"] == [CHANGES]
    asked("chat", plain, 26)
    explained = httpx.post(f"{plain}/v1/cache/explain", json={"messages": messages}, timeout=DEADLINE).json()
    assert explained["mend"]["kind"] == "timestamp"
    assert explained["mend"]["tokens"] > 200
    (proposed,) = tomllib.loads(explained["mend"]["rule"])["rewrite"]
    changed, applied = Rewriting([RewriteRule(**proposed)]).apply({"messages": messages})
    assert [one.count for one in applied] == [1]
    assert "2026" not in changed["messages"][0]["content"]


def test_tokens_are_counted_of_what_is_run(url: str, plain: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello <left>many tokens are left of it</left>"}]}
    counts = [
        httpx.post(f"{each}/v1/messages/count_tokens", json=body, timeout=DEADLINE).json()["input_tokens"]
        for each in (url, plain)
    ]
    assert counts[0] < counts[1]


def test_registered_sets_are_as_they_were_registered(url: str) -> None:
    tool = weather()
    tool["function"]["description"] = "Shows run abc."
    made = (
        httpx.post(f"{url}/tools", json={"name": "kept", "tools": [tool]}, timeout=DEADLINE).raise_for_status().json()
    )
    body = {"tools": "kept", "query": "Rain?", "max_new_tokens": 1}
    found = httpx.post(f"{url}/query", json=body, timeout=DEADLINE).raise_for_status().json()
    assert found["cached_tokens"] >= made["prefix_tokens"]
    assert "rewritten" not in found


# ---- rules themselves ----


def rewriting(*rules: dict[str, Any]) -> Rewriting:
    return Rewriting([RewriteRule(**rule) for rule in rules])


def test_only_what_a_rule_names_is_changed() -> None:
    tools = [{"type": "function", "function": {"name": "run abc", "description": "Shows run abc."}}]
    messages = [
        {"role": "user", "content": "run abc"},
        {"role": "assistant", "content": "run abc"},
        {
            "role": "tool",
            "content": [{"type": "text", "text": "run abc"}, {"type": "text", "text": "run def, run ghi"}],
        },
    ]
    given = {"messages": messages, "tools": tools, "temperature": 0}
    changed, applied = rewriting(*RULES).apply(given)
    assert changed["tools"][0]["function"] == {"name": "run abc", "description": "Shows run #."}
    assert [message["content"] for message in changed["messages"][:2]] == ["run abc", "run abc"]
    assert [part["text"] for part in changed["messages"][2]["content"]] == ["run #", "run #, run #"]
    assert [(one.where, one.count) for one in applied] == [("tools", 1), ("tool_results", 3)]
    assert tools[0]["function"]["description"] == "Shows run abc.", "the request stays as it came"


def test_values_in_a_schema_stay() -> None:
    kept = {"description": "run abc"}
    schema = {
        "type": "object",
        "description": "A run abc",
        "properties": {
            "description": {"type": "string", "description": "Of run abc"},
            "default": {"description": "Of run abc", "default": kept, "enum": [kept], "const": kept},
        },
    }
    changed, (applied,) = rewriting(RULES[2]).apply({"messages": [], "tools": [{"name": "x", "parameters": schema}]})
    found = changed["tools"][0]["parameters"]
    assert applied.count == 3
    assert found["description"] == "A run #"
    assert found["properties"]["description"]["description"] == "Of run #"
    assert found["properties"]["default"] == schema["properties"]["default"] | {"description": "Of run #"}


def test_what_is_moved_stands_at_the_end_of_the_last_user_message() -> None:
    messages = [
        {"role": "system", "content": "Today is 2026-11-25. Hello."},
        {"role": "user", "content": "Today is 2026-11-24. One"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": [{"type": "text", "text": "Two"}]},
        {"role": "assistant", "content": "2"},
    ]
    changed, _ = rewriting(RULES[0]).apply({"messages": messages})
    assert [message["content"] for message in changed["messages"]] == [
        "Hello.",
        "One",
        "1",
        [{"type": "text", "text": "Two"}, {"type": "text", "text": "\n\nToday is 2026-11-25.\nToday is 2026-11-24."}],
        "2",
    ]
    alone = {"messages": messages[:1]}
    assert rewriting(RULES[0]).apply(alone) == (alone, ()), "there is nowhere to move it to"


def test_a_rule_that_takes_too_long_changes_nothing_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepwarm.serving.rewrite._SECONDS", 0.02)
    slow = rewriting({"name": "slow", "pattern": "(a|aa)+$", "where": ["system"], "action": "drop"}, RULES[0])
    messages = [
        {"role": "system", "content": "Today is 2026-11-25. " + "a" * 100 + "b"},
        {"role": "user", "content": "?"},
    ]
    changed, applied = slow.apply({"messages": messages})
    assert [one.to_dict() for one in applied] == [
        {"rule": "slow", "where": "system", "count": 0, "too_slow": True},
        CHANGES,
    ]
    assert changed["messages"][1]["content"] == "?\n\nToday is 2026-11-25."
    assert slow.described()[0]["too_slow"] == 1


@pytest.mark.parametrize(
    ("action", "pattern"),
    [("drop", r"\b"), ("move", "(?=Hello)"), ("replace", r"(?<=Hello) ?\K"), ("replace", r"x*(?= there)")],
)
def test_a_place_between_two_characters_is_no_text(action: str, pattern: str) -> None:
    rule = {"name": "nothing", "pattern": pattern, "where": ["system"], "action": action}
    given = {"messages": [{"role": "system", "content": "Hello there"}, {"role": "user", "content": "?"}]}
    assert rewriting(rule | ({"text": "#"} if action == "replace" else {})).apply(given) == (given, ())


def test_a_request_whose_time_is_over_tries_no_further_rule() -> None:
    deadline = Deadline(60)
    deadline.give_up()
    with deadline.governing(), pytest.raises(TookTooLong):
        rewriting(RULES[0]).apply({"messages": [{"role": "user", "content": "?"}]})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"pattern": "("}, "the rule 'day': its pattern is no regular expression"),
        ({"pattern": "x*"}, "the rule 'day': its pattern matches an empty text"),
        ({"action": "replace"}, "the rule 'day': replace needs a text"),
        ({"text": "x"}, "the rule 'day': text is for replace, and the action is 'move'"),
        ({"where": ["answers"]}, r"rewrite\.0\.where\.0"),
        ({"name": "two words"}, r"rewrite\.0\.name"),
        ({"colour": "red"}, "unknown setting 'rewrite.0.colour'"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServeConfig.load(None, {"rewrite": [RULES[0] | wrong]}, {})


def test_two_rules_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two rules have one name, of day, day"):
        ServeConfig.load(None, {"rewrite": [RULES[0], RULES[0]]}, {})


@pytest.mark.parametrize(
    ("text", "other", "kind"),
    [
        ("Today is 2026-11-25.", "Today is 2026-11-24.", "timestamp"),
        ("It is Tue Nov 25, 2026 now", "It is Wed Nov 26, 2026 now", "timestamp"),
        ("a <total_tokens>120 left</total_tokens>", "a <total_tokens>99 left</total_tokens>", "token_budget"),
        ("Working directory: /home/a\nGo", "Working directory: /home/b\nGo", "working_folder"),
        ("Status:\n M src/a.py\n", "Status:\n M src/b.py\n", "git_status"),
        ("x-anthropic-billing-header: cch=1;", "x-anthropic-billing-header: cch=2;", "billing_header"),
        ("see req_id: abc123def4", "see req_id: abc123def5", "random_id"),
        ("Hello there", "Hello where", None),
    ],
)
def test_what_changes_is_named_by_its_look(text: str, other: str, kind: str | None) -> None:
    found = mend(text, other)
    assert (found.kind if found else None) == kind
    if found is not None:
        (rule,) = tomllib.loads(found.rule("system"))["rewrite"]
        made = RewriteRule(**rule)
        assert made.name == kind
        if kind != "git_status":  # its rule takes the whole block, which is not here
            both = [
                rewriting(rule).apply({
                    "messages": [{"role": "system", "content": each}, {"role": "user", "content": "?"}]
                })
                for each in (text, other)
            ]
            assert both[0][0]["messages"][0] == both[1][0]["messages"][0]


@pytest.mark.parametrize(
    ("segment", "name", "place"),
    [
        ("system", "", "system"),
        ("tools", "get_weather", "tools"),
        ("message", "developer", "system"),
        ("message", "user", "first_user"),
        ("message", "tool", "tool_results"),
        ("message", "assistant", None),
        ("document", "user", None),
        ("prompt", "", None),
    ],
)
def test_a_rule_is_proposed_only_for_what_rules_change(segment: str, name: str, place: str | None) -> None:
    assert place_of(segment, name) == place


@pytest.mark.parametrize("text", ["a-", "1-", "aB-", "req-"])
def test_long_texts_are_searched_once(text: str) -> None:
    """Without a look at the rest of the text from each of its characters: that would take hours here."""
    assert IDS.search(text * 300_000) is None


def test_ids_are_known_by_their_look() -> None:
    text = "see req_abc123def4, -Ab1-Cd2-Ef3-Gh4-Ij5-Kl6 and 01ARZ3NDEKTSV4RRFFQ69G5FAV, not Ab1-Cd2"
    found = [match.group() for match in IDS.finditer(text)]
    assert found == ["req_abc123def4", "-Ab1-Cd2-Ef3-Gh4-Ij5-Kl6", "01ARZ3NDEKTSV4RRFFQ69G5FAV"]
