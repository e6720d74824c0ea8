"""The vendors' published rules, against amounts worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.logs import CLAUDE, GPT, SYSTEM, anthropic, at, openai, text

from keepwarm.errors import ConfigError
from keepwarm.lint.log import read_log
from keepwarm.lint.prompt import estimated_tokens, prompt_of
from keepwarm.lint.replay import Outcome, common_length, replay
from keepwarm.lint.rules import load_prices

WORDS = "word " * 5000


def words(count: int) -> str:
    """A text of exactly so many estimated tokens."""
    return WORDS[: 5 * count].rstrip()


def run(entries: list[Any]) -> list[Outcome]:
    return list(replay([prompt_of(request) for request in read_log(text(entries))[0]], load_prices()))


def plain(system: str, question: str = "") -> dict[str, Any]:
    return {"model": GPT, "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}]}


@pytest.mark.parametrize(("shared", "read"), [(1023, 0), (1024, 1024), (1151, 1024), (1152, 1152), (2000, 1920)])
def test_openai_reads_in_increments_of_128_from_1024(shared: int, read: int) -> None:
    first, second = run([plain(words(shared), "a"), plain(words(shared), "b")])
    assert first.read == 0
    assert second.read == read
    assert second.units == pytest.approx(second.tokens - read + 0.25 * read)  # GPT-4.1 reads at a quarter
    assert second.price == pytest.approx(2e-6)


def test_openai_reads_part_of_a_message() -> None:
    first, second = run([plain(words(1500) + " then this"), plain(words(1500) + " then that")])
    assert (first.read, second.read) == (0, 1024 + 3 * 128)


def test_openai_entries_live_a_day_unless_they_are_kept_in_memory_only() -> None:
    day = plain(words(2000), "a")
    assert [bool(o.read) for o in run([at(0, day), at(86_000, day), at(180_000, day)])] == [False, True, False]
    body = day | {"prompt_cache_retention": "in_memory"}
    outcomes = run([at(0, body), at(299, body), at(598, body), at(899, body)])
    assert [bool(o.read) for o in outcomes] == [False, True, True, False]
    assert outcomes[-1].expired
    outcomes = run([at(0, body), at(80_000, body | {"prompt_cache_retention": "24h"})])
    assert outcomes[1].read


def test_from_gpt_5_6_on_openai_charges_for_writing_and_keeps_for_half_an_hour() -> None:
    body = plain(words(2000), "a") | {"model": "gpt-5.6-terra"}
    first, second, third = run([at(0, body), at(1700, body), at(3600, body)])
    assert (first.written, first.read, third.read) == (first.tokens, 0, 0)
    assert first.units == pytest.approx(1.25 * first.tokens)
    assert second.units == pytest.approx(0.1 * second.read + 1.25 * (second.tokens - second.read))
    assert run([plain(words(500), "a") | {"model": "gpt-5.6-terra"}])[0].written == 0


def test_every_price_says_where_it_was_read() -> None:
    prices = load_prices()
    for rules in (prices.openai, prices.anthropic):
        assert rules.sources
        for name, price in rules.models.items():
            assert price.source or {"input", "read"} <= set(price.unconfirmed), name
            assert set(price.unconfirmed) <= set(type(price).model_fields), name


def test_openai_prefixes_under_other_keys_and_models_do_not_meet() -> None:
    body = plain(words(2000), "a")
    assert run([body | {"prompt_cache_key": "x"}, body | {"prompt_cache_key": "y"}])[1].read == 0
    assert run([body, body | {"model": "gpt-5"}])[1].read == 0


def test_anthropic_reads_only_what_was_marked() -> None:
    assert [o.read for o in run([anthropic("a"), anthropic("b")])] == [0, 0]
    first, second = run([anthropic("a", ttl="5m"), anthropic("b", ttl="5m")])
    head = estimated_tokens(SYSTEM)
    assert (first.read, first.written) == (0, head)
    assert (second.read, second.written) == (head, 0)
    assert first.units == pytest.approx(first.tokens + 0.25 * head)
    assert second.units == pytest.approx(second.tokens - 0.9 * head)
    hour = run([anthropic("a", ttl="1h")])[0]
    assert hour.units == pytest.approx(hour.tokens + head)


def test_anthropic_minimum_is_the_models() -> None:
    def body(model: str, size: int) -> dict[str, Any]:
        return anthropic("a", words(size), ttl="5m", model=model)

    for model, minimum in ((CLAUDE, 1024), ("claude-haiku-4-5", 4096), ("claude-3-5-haiku-20241022", 2048)):
        assert run([body(model, minimum - 1)] * 2)[1].read == 0
        assert run([body(model, minimum)] * 2)[1].read == minimum


def test_anthropic_lifetimes() -> None:
    short, long = anthropic("a", ttl="5m"), anthropic("a", ttl="1h")
    assert [bool(o.read) for o in run([at(0, short), at(290, short), at(580, short), at(900, short)])] == [
        False,
        True,
        True,
        False,
    ]
    assert [bool(o.read) for o in run([at(0, long), at(3000, long), at(7000, long)])] == [False, True, False]


def test_anthropic_looks_back_twenty_blocks() -> None:
    def chat(blocks: int) -> dict[str, Any]:
        content: list[dict[str, Any]] = [{"type": "text", "text": f"Note {i}: " + words(200)} for i in range(blocks)]
        content[-1]["cache_control"] = {"type": "ephemeral"}
        return anthropic("x", messages=[{"role": "user", "content": content}], system=[])

    assert run([chat(10), chat(30)])[1].read > 0
    assert run([chat(10), chat(31)])[1].read == 0


def test_anthropic_automatic_caching_follows_the_conversation() -> None:
    turns = [
        {"role": "user", "content": words(1200)},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And then?"},
    ]
    more = {"cache_control": {"type": "ephemeral"}}
    first, second = run([anthropic("", messages=turns[:1], **more), anthropic("", messages=turns, **more)])
    assert second.read == first.tokens
    assert second.written == second.tokens - first.tokens


def test_unknown_models_have_tokens_but_no_price() -> None:
    first, second = run([plain(words(2000), "a") | {"model": "house-model"}] * 2)
    assert first.price is None
    assert second.read > 0


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("gpt-4o-mini-2024-07-18", 0.15),
        ("openai/gpt-4o-2024-11-20", 2.5),
        ("gpt-4.1", 2.0),
        ("us.anthropic.claude-sonnet-4-5-20250929-v1:0", None),
        ("anthropic/claude-sonnet-4-5", 3.0),
        ("claude-opus-4-1-20250805", 15.0),
        ("gpt-40", None),
    ],
)
def test_models_are_found_by_the_beginning_of_their_names(name: str, known: float | None) -> None:
    prices = load_prices()
    price = prices.of("anthropic" if "claude" in name else "openai").price(name)
    assert (price.input if price else None) == known or "us.anthropic" in name


def test_prices_may_be_overridden(tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    file.write_text(json.dumps({"openai": {"models": {"house": {"input": 1.0, "read": 0.3}}}}))
    prices = load_prices(file)
    assert prices.date == str(file)
    assert prices.openai.price("house-2") == prices.openai.models["house"]
    assert prices.openai.price("gpt-4o") is not None
    for wrong in ("[]", "{", '{"openai": {"minimum": -1}}', '{"openia": {}}'):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="prices.json"):
            load_prices(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_prices(tmp_path / "none.json")


@given(st.text("ab", max_size=40), st.text("ab", max_size=40))
def test_common_length(a: str, b: str) -> None:
    count = common_length(a, b)
    assert a[:count] == b[:count]
    assert count in (len(a), len(b)) or a[count] != b[count]


def test_repeats_of_one_request_are_read_but_for_a_token() -> None:
    outcomes = run([openai("Hello")] * 3)
    assert all(0 < o.read < o.tokens for o in outcomes[1:])
